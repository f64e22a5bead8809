"""A stage on this machine: its process, progress, budget and outcome.

Remote, retraining and pipeline may import it.
"""
