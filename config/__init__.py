"""Params: their schema, how they are read and merged; the rows that processes exchange; the errors.
Everybody may import it; it imports pydantic, yaml and itself alone.
"""
