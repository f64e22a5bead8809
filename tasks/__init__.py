"""Orchestration: run a stage as a process, watch it, report, pass rows to the tracker. No machine learning.

Flows and the command line import it.
"""
