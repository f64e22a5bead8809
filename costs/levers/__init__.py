"""Levers that make alignment cheaper: the variants that are compared, and what their comparison
says of the planner.
"""
