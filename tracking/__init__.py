"""Everything MLflow: ships what a run left on disk, exactly once, whenever MLflow is reachable.

Tasks and the command line import it; it imports no orchestrator.
"""
