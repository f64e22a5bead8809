"""What the comparison of levers asks of models: replies to held-out prompts, best-of-n, paired
differences.
"""
