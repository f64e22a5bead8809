"""Everything MLflow: what a run left on the disk is shipped there, exactly once, whenever MLflow
can be reached.

Tasks and the command line import it; it knows no orchestrator.
"""
