"""The Prefect and MLflow servers of a project: processes, databases, settings.

Everything above tasks.run may import it.
"""
