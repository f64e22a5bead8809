"""What a run costs: the ledger of what was measured. Pure formulas and readers; imports neither
torch nor an orchestrator nor a tracker.
"""
