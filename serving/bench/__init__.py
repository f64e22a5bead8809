"""Load tests of an OpenAI-compatible endpoint: LLMeter sends the requests; rates, latencies and a price come from its
measurements.
"""
