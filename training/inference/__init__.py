"""The models of a finished run: loading, chat, and pairs of responses to compare.

Retraining imports it; the command line starts chat and pairs as processes.
"""
