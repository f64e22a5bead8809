"""Parts of ppo_vs_trl.py: what both trainers start from, a run of either, and TRL 1.12.0 (the last
with a PPO) in an environment of its own.
"""
