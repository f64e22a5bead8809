"""The machine's current pace: other programs, and neighbours on the same processor, can slow the same work by half or
more.
"""

import os
import subprocess
import sys
from statistics import mean

WORK = """
import json, time
began = time.perf_counter()
for number in range(100000):
    json.loads(json.dumps({"index": number, "text": "token"}))
print(time.perf_counter() - began)
"""


def pace_seconds() -> float:
    """Mean seconds of a fixed piece of work, run on every core at once."""
    command = [sys.executable, "-S", "-c", WORK]
    started = [  # in their own sessions: Ctrl-C is meant for the load test
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True)
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        return mean(float(process.communicate()[0]) for process in started)
    finally:
        for process in started:  # some still run after Ctrl-C
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
