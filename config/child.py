"""Commands of other programs: those that end with this process, and where vLLM's is."""

import os
import shutil

from config.errors import EnvironmentFault

BOUND = ("setpriv", "--pdeathsig", "TERM") if shutil.which("setpriv") else ()
"""Put before a command: however this process ends, SIGTERM goes to the command's. Linux only; elsewhere it outlives a
killed parent.
"""
VLLM_VARIABLE = "RLHF_VLLM"
"""Path of the command vllm in another environment."""


def vllm_command(setting: str) -> str:
    """The command vllm that RLHF_VLLM names, or that is on the PATH; `setting` asks for it.

    Raises EnvironmentFault if there is none.
    """
    vllm = os.environ.get(VLLM_VARIABLE) or shutil.which("vllm")
    if vllm is None or shutil.which(vllm) is None:
        raise EnvironmentFault(
            f"{setting} finds no command vllm ({vllm or 'not on the PATH'}). Install it in "
            f"an environment of its own and name it: {VLLM_VARIABLE}=/path/to/bin/vllm."
        )
    return vllm
