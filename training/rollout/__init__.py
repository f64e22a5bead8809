"""Rollout engines: responses sampled from a policy, one interface.

The reinforcement-learning loop, evaluation, retraining and inference may import it.
"""
