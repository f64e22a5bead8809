"""Alignment methods, one file each: settings, advantage estimator and labels.

A new file here with a METHOD is a new value of align.method; docs/tour.md has an example.
"""
