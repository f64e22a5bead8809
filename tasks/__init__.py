"""What the flow is made of: run a stage as a process, watch it, report, hand the rows to the
tracker. Never the machine learning itself.

Flows and the command line import it.
"""
