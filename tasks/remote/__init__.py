"""Remote stages: client, worker, the exchange between them, heartbeat, checkpoints, recovery.

Pipeline and the flow `stage` may import it.
"""
