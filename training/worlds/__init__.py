"""Generated worlds with a known truth: the helpdesk, written by hand or drawn, its rows, and the gold score of a
reply.
"""
