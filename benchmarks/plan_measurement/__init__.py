"""Parts of plan_accuracy.py: the configurations it draws, the folder and the process in which one
is measured, and the picture of them all. Nothing else imports it.
"""
