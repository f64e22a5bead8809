"""What stands on a running server: deployments, automations, the compose stack's setup.

The command line and compose use it; no other room does.
"""
