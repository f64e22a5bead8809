"""From files, URLs and generated worlds to rows without duplicates, split by prompt.

The stages, calibration and retraining may import it; it trains nothing.
"""
