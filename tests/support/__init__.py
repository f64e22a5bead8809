"""What tests of several packages share: ports, forked stage processes, projects, order and skips. Tests alone import
it.
"""
