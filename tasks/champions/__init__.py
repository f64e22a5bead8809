"""Which model is in use: the record, its files, and the gate that evidence has to pass.

Retraining and pipeline may import it.
"""
