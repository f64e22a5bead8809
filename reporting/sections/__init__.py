"""The sections of the report, one file each, in the order of the page: Findings in, Markup out.

build.py puts them together; only the report and its command import them.
"""
