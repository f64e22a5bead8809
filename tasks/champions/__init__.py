"""The model in use: the record of champions, their files, and the promotion gate.

Retraining, pipeline and the command line may import it.
"""
