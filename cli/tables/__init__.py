"""What commands print on a terminal, as rich tables at most 80 columns wide.

No table computes a number: what it shows comes from costs, reporting and tasks.
"""
