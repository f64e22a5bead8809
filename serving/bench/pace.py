"""How fast this machine is at the moment: other programs and neighbours on the same processor make
the same work take half as long again, or more.
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
    """Seconds of a fixed piece of work, done on every core at the same time; the mean."""
    command = [sys.executable, "-S", "-c", WORK]
    started = [  # in sessions of their own, as Ctrl-C is meant for what measures
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            start_new_session=True,
        )
        for _ in range(os.cpu_count() or 1)
    ]  # fmt: skip
    try:
        return mean(float(process.communicate()[0]) for process in started)
    finally:
        for process in started:  # after Ctrl-C some are still at work
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
