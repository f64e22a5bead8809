"""From params to the plan of every stage; the cheapest levers that fit; how cost grows.

It imports formulas and tables.
"""
