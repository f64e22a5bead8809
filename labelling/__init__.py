"""Human feedback in: pairs of responses on a local page, votes in a file, agreement. Knows no
orchestrator, no tracker and no torch.
"""
