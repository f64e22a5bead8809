"""A process that may be killed: a fork of this one, which has imported what it needs already."""

import os
from collections.abc import Callable


def exit_code_of_fork(work: Callable[[], object]) -> int:
    """What a fork that does `work` ends with, as subprocess tells it: minus the signal that killed it. Nothing that it
    changes is changed here, files apart.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
