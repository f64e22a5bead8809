"""Measures this machine for the planner.

Nobody imports it: rlhf calibrate starts it as a process.
"""
