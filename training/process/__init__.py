"""The stage contract: how a process starts, checkpoints, accounts for itself and ends.

Stages and every other package may import it; it knows of no model.
"""
