"""Distillation of the aligned model (teacher) into a smaller one (student): the student's initial weights, its loss,
and detection of divergence. The loop is training/distill.py.
"""
