"""Files of a project folder that several packages read: kept runs, the running run, the champion, the calibrated
machine, the servers' keys. Every package may import it; the schema must not.
"""
