"""A retrain cycle: new data, decision, training, contest.

Pipeline may import it.
"""
