"""Which model is in use: the record, its files, and the gate that evidence has to pass.

Retraining, pipeline and the command line may import it.
"""
