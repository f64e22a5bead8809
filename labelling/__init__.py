"""Human feedback in: pairs of responses on a local page, votes in a file, agreement.

The command line and retraining import it; it knows no orchestrator, no tracker and no torch.
"""
