"""A retrain cycle: is there news, is it worth a training, does the new model win.

Pipeline may import it.
"""
