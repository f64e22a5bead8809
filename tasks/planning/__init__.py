"""Before a run: what it will cost, whether the budget and the placement allow it.

Stage, remote, retraining and pipeline may import it.
"""
