"""Ours beside TRL 1.12.0, the last with a PPO: what both start from, a run of either, and TRL's own environment.
Commands that compare with TRL import it.
"""
