"""Commands that end with this process."""

import shutil

BOUND = ("setpriv", "--pdeathsig", "TERM") if shutil.which("setpriv") else ()
"""Put before a command: however this process ends, SIGTERM goes to the command's. Linux only;
elsewhere it outlives a killed parent.
"""
