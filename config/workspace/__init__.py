"""Files of a project folder that more than one package reads: what runs kept, which run is at work,
the champion, the calibrated machine, the servers' keys. Everybody may import it but the schema.
"""
