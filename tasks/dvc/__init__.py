"""DVC: status, pull, repro, push.

It imports tasks.run alone.
"""
