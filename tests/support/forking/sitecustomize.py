"""Where tests/support/stage_server.py is running, every `python -m training.X` below it becomes a stand-in: a fork of
that server does the work, this process passes on signals and the exit code.

Python imports a module of this name before anything else, if its folder is in PYTHONPATH.
"""

import os
import sys

ADDRESS = os.environ.get("TESTS_STAGE_SERVER")
MODULE = sys.orig_argv[2] if sys.orig_argv[1:2] == ["-m"] and len(sys.orig_argv) > 2 else ""


def stand_in(address: str) -> None:
    import json
    import signal
    import socket

    passed_on = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)  # until there is whom to pass them to
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        message = {
            "cwd": os.path.abspath("."),  # noqa: PTH100 - pathlib takes as long as all else
            "environment": dict(os.environ),
            "module": MODULE,
            "arguments": sys.orig_argv[3:],
        }
        content = json.dumps(message).encode()
        socket.send_fds(server, [len(content).to_bytes(8, "big")], [0, 1, 2])
        server.sendall(content)
        pid = int.from_bytes(server.recv(8), "big")
        for number in passed_on:
            signal.signal(number, lambda signum, _: os.kill(pid, signum))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
        ended = server.recv(8)
    code = int.from_bytes(ended, "big", signed=True) if ended else 1
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


# launch is not a stage: it becomes one, or is the parent of several, which know it by its id
STAGE = MODULE.startswith(("training.", "tests.training.")) and MODULE != "training.process.launch"
if ADDRESS and STAGE and "RLHF_LAUNCHER_PID" not in os.environ:
    try:
        stand_in(ADDRESS)
    except BaseException:  # noqa: BLE001 - Python would go on, and do the stage's work itself
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)
