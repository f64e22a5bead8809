"""Runs beside one another: `rlhf compare` of runs that are there, `rlhf study` of the variants that it ran. One
record, one table, one page.
"""
