"""The HTML report of a run: reading what the stages left, saying what it means, drawing it. One file, no external
requests.

The command line and tasks may import it; it knows no orchestrator and no tracker.
"""
