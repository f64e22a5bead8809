"""A stage on nodes of a Ray cluster: the pipeline's process is Ray's driver, and an actor on each node starts the
stage's processes there.
"""
