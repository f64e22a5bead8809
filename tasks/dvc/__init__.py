"""What DVC knows and does: status, pull, repro, push.

It imports tasks.run alone.
"""
