"""One stage elsewhere: client, worker, the exchange between them, heartbeat, checkpoints, recovery.

Pipeline and deployment may import it.
"""
