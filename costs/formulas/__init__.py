"""Pure formulas: counts, memory, time. Numbers in, numbers out.

They import tables alone.
"""
