"""The commands of `rlhf`, one module each; cli/main.py registers them.

Heavy imports are inside the functions, so that `rlhf --help` stays fast.
"""
