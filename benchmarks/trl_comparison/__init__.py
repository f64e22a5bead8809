"""What runs of ours beside TRL 1.12.0 (the last with a PPO) are made of: what both start from, a run
of either, TRL's environment. Commands that compare with TRL import it.
"""
