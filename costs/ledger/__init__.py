"""Measured costs of a run beside its plan; budgets; the history of this machine.

It imports planning and below.
"""
