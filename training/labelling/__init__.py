"""Pairs of responses for people to compare.

Nobody imports it: rlhf label starts it as a process.
"""
