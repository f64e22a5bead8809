"""The sections of params.yaml, grouped into modules.

The schema combines them; every package may import their types.
"""
