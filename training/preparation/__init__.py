"""From files, URLs and the generated helpdesk to rows without duplicates, split by prompt.

The stages, calibration and retraining may import it; it trains nothing.
"""
