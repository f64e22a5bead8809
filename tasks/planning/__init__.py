"""Checks before a run: its planned cost, its budget and its placement.

Stage, remote, retraining and pipeline may import it.
"""
