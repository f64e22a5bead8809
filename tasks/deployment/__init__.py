"""Objects on a running Prefect server: deployments, automations, the compose stack's setup.

The command line and the flow `start` import it, compose starts its modules; no other package does.
"""
