"""The Prefect tasks of a run: one per stage, and its progress as a whole.

Flows and the command line import it; no other package does.
"""
