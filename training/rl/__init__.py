"""Reinforcement learning: formulas, layouts, roles, state and report of the loop.

Only the stages that sample may import it.
"""
