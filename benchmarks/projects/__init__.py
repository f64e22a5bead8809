"""Folders that several benchmarks run stages in: checkouts of this code, and stage processes whose output goes to a
log. Parts of commands, which stand one folder above; imports none of them.
"""
