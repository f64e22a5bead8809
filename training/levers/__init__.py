"""Evaluation for the comparison of levers: replies to held-out prompts, best-of-n, paired
differences.
"""
