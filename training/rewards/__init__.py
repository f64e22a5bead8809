"""Reward functions: a function of the user's own in place of a reward model."""
