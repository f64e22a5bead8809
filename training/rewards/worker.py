"""The process that runs a reward function: python worker.py SCRIPT FUNCTION ROOT CALLS RESULTS.

CALLS is a JSON file: a list of [prompt, response, row]. RESULTS is the number of an open pipe: a line {} once the
function is loaded, then for each call {"score": number} or {"fault": why}. It imports the standard library alone, so
that it starts in a fraction of a second.
"""

import importlib
import json
import math
import os
import resource
import sys
import traceback
from numbers import Real
from pathlib import Path
from typing import Any

MOST_PRINTED_BYTES = 16 * 2**20
"""Most that the function may print: its output goes to a file."""


def main(script: str, name: str, root: str, calls: str, results: str) -> None:
    sys.path[:1] = [str(Path(script).parent), root]  # the function's own imports are those of its project
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_PRINTED_BYTES, MOST_PRINTED_BYTES))
    with os.fdopen(int(results), "w", encoding="utf-8") as answers:

        def answer(result: dict[str, Any]) -> None:
            answers.write(json.dumps(result) + "\n")
            answers.flush()

        try:
            function = getattr(importlib.import_module(Path(script).stem), name, None)
        except BaseException as error:  # noqa: BLE001 # a user's code raises anything
            return answer({"fault": raised(error, script)})
        if not callable(function):
            return answer({"fault": f"has no function {name}"})
        answer({})
        for prompt, response, row in json.loads(Path(calls).read_text(encoding="utf-8")):
            try:
                score = function(prompt, response, row)
            except BaseException as error:  # noqa: BLE001
                return answer({"fault": raised(error, script)})
            if not isinstance(score, Real) or not math.isfinite(score):
                return answer({"fault": f"returned {score!r:.80}, a finite number is needed"})
            answer({"score": float(score)})
    return None


def raised(error: BaseException, script: str) -> str:
    """The function's exception, with the line of its own file that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    line = next((frame.lineno for frame in reversed(frames) if frame.filename == script), None)
    if isinstance(error, SyntaxError):
        line = error.lineno
    text = " ".join(str(error).split())[:160].rstrip(".")
    place = "" if line is None else f"line {line} "
    return f"{place}raised {type(error).__name__}{f': {text}' if text else ''}"


if __name__ == "__main__":
    main(*sys.argv[1:])
