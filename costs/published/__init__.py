"""Published measurements in their own words, held against the formulas.

Only benchmarks and the command line's --setting import it.
"""
