"""The Prefect UI: artifacts, events, links, the summary.

Every room above servers may import it.
"""
