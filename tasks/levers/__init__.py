"""Trains one variant per lever of the same alignment, each stage in a folder of its own that its
settings name, so that variants share what they have in common.
"""
