"""The `rlhf` command, thin: it reads arguments, calls the packages below, and prints.

Nobody imports it.
"""
