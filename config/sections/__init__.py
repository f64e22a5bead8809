"""The sections of params.yaml, a module each for what belongs together.

The schema puts them together; everybody may import their types.
"""
