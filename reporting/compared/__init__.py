"""Runs side by side: read, compared, worded and drawn.

`rlhf compare` imports it; the report of a single run does not.
"""
