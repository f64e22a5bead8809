"""One pipeline run in a folder: its name, params and rows, its lock, the request to stop.

Every other package may import it.
"""
