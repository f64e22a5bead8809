"""The Prefect UI: artifacts, events, links, the summary.

Every package above servers may import it.
"""
