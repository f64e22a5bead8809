"""Measurements behind the figures in README and docs: commands here, their parts in the folders. People run them,
never the tests; nothing of the project imports them.
"""
