"""Levers that make alignment cheaper: variants to compare, and an assessment of the planner from
the results.
"""
