"""Prefect flows: tables of contents.

The command line imports them, and Prefect's workers by the addresses in prefect.yaml.
"""
