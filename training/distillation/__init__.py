"""Distillation of the aligned model (teacher) into a smaller one (student): where the student comes
from, what it minimises, and the signs that it goes wrong. The loop is training/distill.py.
"""
