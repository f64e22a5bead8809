"""What a run costs: pure formulas and readers, plans, and the ledger of what was measured.

Everybody but training may import it; it imports neither torch nor an orchestrator nor a tracker.
"""
