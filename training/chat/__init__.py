"""Talking to the models of a run.

Nobody imports it: rlhf chat starts it as a process.
"""
