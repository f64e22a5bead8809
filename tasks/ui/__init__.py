"""What people see in the Prefect UI: artifacts, events, links, the summary.

Every room above servers may import it.
"""
