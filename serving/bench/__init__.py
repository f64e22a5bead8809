"""Load tests of an OpenAI-compatible endpoint: LLMeter sends the requests, and what it measured
becomes rates, latencies and a price.
"""
