"""Comparison of runs: reading, comparing, wording and drawing.

`rlhf compare` imports it; the report of a single run does not.
"""
