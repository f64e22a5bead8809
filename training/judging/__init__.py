"""Judges of replies that training never saw: each prefers one of two replies to a prompt."""
