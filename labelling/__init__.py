"""Human feedback: pairs of responses on a local page, votes in a file, agreement.

The command line and retraining import it; it imports no orchestrator, no tracker and no torch.
"""
