"""The exported model behind an OpenAI-compatible API: one front that owns the key, the limits and
the prompts, and behind it an engine process that generates tokens.
"""
