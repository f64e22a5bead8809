"""Prefect flows: tables of contents."""
