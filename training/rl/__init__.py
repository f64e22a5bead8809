"""Reinforcement learning: formulas, layouts, roles, state and report of the loop.

Only the stages that sample (ppo, rloo, grpo) may import it.
"""
