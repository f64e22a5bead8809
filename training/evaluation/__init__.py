"""Win rates, intervals, calibration of preferences: pure statistics.

Stages, preparation and retraining may import it; it imports no torch module of ours.
"""
