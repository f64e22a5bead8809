"""A served model under load: `rlhf bench` and the flow serve-bench start the server, measure it, and keep what was
measured with the run.
"""
