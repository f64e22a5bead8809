"""The machine learning: one module per stage, each a process of its own (`python -m training.<stage>`), and the maths they share."""
