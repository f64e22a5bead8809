"""Measures this machine for the planner.

No package imports it: rlhf calibrate starts it as a process.
"""
