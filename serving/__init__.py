"""The exported model behind an OpenAI-compatible API: a front that owns the key, the limits and the prompts, and an
engine process that generates tokens.
"""
