"""The cost of a run: formulas, plans, and the ledger of measurements.

Every package but training may import it; it imports neither torch nor an orchestrator nor a tracker.
"""
