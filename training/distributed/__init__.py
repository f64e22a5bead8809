"""Several processes as one: collectives, and weights and optimizer state divided among them.

Everything that trains may import it.
"""
