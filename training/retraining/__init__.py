"""The processes of a retrain cycle: the data examined, the new model against the champion.

Nobody imports it: tasks/ starts its modules as processes.
"""
