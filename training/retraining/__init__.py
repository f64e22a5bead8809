"""The processes of a retrain cycle: the data examined, the new model against the champion.

Only training.labelling imports it, for the models of a run; tasks/ starts its modules as processes.
"""
