"""Distributed training: collectives, and sharding of weights and optimizer state.

Every training stage may import it.
"""
