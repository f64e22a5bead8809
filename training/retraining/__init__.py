"""The processes of a retrain cycle: examination of the data, and the contest with the champion.

No package imports it: tasks/ starts its modules as processes.
"""
