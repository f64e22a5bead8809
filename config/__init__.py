"""Params: their schema, reading and merging; rows that processes exchange; errors. Every package may import it; it
imports only pydantic and yaml.
"""
