"""The models of a finished run: read from its folder, talked to, asked for pairs of responses.

Retraining imports its models; the command line starts chat and pairs as processes.
"""
