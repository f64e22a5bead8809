"""What a run did cost, beside its plan; the budget; the history of this machine.

It imports planning and below.
"""
