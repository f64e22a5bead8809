"""A reward function as every stage calls it: in a process of its own, with a time limit for each response.

models/reward/function.json  which function, and its time limit
models/reward/function.py    its file, as it was in the reward stage

The process starts anew for each batch: nothing that the function keeps reaches the next batch, so that a resumed run
gets the same scores.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from itertools import cycle, repeat
from pathlib import Path
from typing import Any, NamedTuple

from config import jsonl
from config.child import BOUND
from config.errors import DataError, ModelError
from config.terminal_text import shown
from training.modeling.tokenizer import Prompt, prompt_text
from training.rewards import worker

CARD, CODE = "function.json", "function.py"
LOG = Path("runs/reward_function.log")
"""Output of the function in the last batch."""
LOADING_SECONDS = 120.0
"""Longest import of the function's file."""


class Call(NamedTuple):
    """One call of the function."""

    prompt: Prompt
    response: str
    row: Mapping[str, Any]
    """The other columns of the prompt's row."""


class RewardFunction:
    """The function in a folder `models/reward`."""

    def __init__(self, folder: Path, root: Path) -> None:
        """It runs in the project at `root`. Raises ModelError if the folder is damaged."""
        try:
            card = json.loads((folder / CARD).read_text(encoding="utf-8"))
            self.path, self.timeout_seconds = str(card["path"]), float(card["timeout_seconds"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{folder / CARD} is damaged ({error}). Run the reward stage.") from None
        self._code = (folder / CODE).resolve()
        self._root = root.resolve()

    def scores(self, calls: Sequence[Call]) -> list[float]:
        """A score for each call, in order.

        Raises DataError with one line if the function raises, returns no finite number, or takes too long.
        """
        if not calls:
            return []
        with closing(self._answers(calls)) as answers:
            self._score(next(answers), None)
            return [self._score(answer, call) for answer, call in zip(answers, calls, strict=True)]

    def _score(self, answer: dict[str, Any], call: Call | None) -> float:
        if "fault" not in answer:
            return float(answer.get("score", 0.0))
        place = ""
        if call is not None:
            prompt, response = map(shown, (prompt_text(call.prompt), call.response))
            place = f" for the response {response} to {prompt}"
        raise DataError(f"reward.path={self.path}: it {answer['fault']}{place}. Fix the function.")

    def _answers(self, calls: Sequence[Call]) -> Generator[dict[str, Any]]:
        """Messages of the process: that it has loaded the function, then each call's result."""
        reading, writing = os.pipe()
        log = self._root / LOG
        log.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder, os.fdopen(reading, "rb", buffering=0) as results:
            batch = Path(folder) / "calls.json"
            batch.write_text(json.dumps(calls), encoding="utf-8")
            command = [*BOUND, sys.executable, "-B", worker.__file__, str(self._code), self.path.rpartition(":")[2]]
            command += [str(self._root), str(batch), str(writing)]
            with log.open("wb") as printed:
                process = subprocess.Popen(
                    command, cwd=self._root, stdin=subprocess.DEVNULL, stdout=printed,
                    stderr=printed, pass_fds=[writing], start_new_session=True,
                )  # fmt: skip
            os.close(writing)
            try:
                waited = max(LOADING_SECONDS, self.timeout_seconds)
                rest = b""
                for _ in range(len(calls) + 1):
                    while b"\n" not in rest:
                        if not select.select([results], [], [], waited)[0]:
                            yield {"fault": f"took longer than {waited:g} s (reward.timeout_seconds)"}
                            return
                        part = results.read(1 << 16)
                        if not part:
                            yield {"fault": f"ended its process (see {LOG})"}
                            return
                        rest += part
                    line, _, rest = rest.partition(b"\n")
                    waited = self.timeout_seconds
                    yield json.loads(line)
            finally:
                with_children(process)


def with_children(process: subprocess.Popen[bytes]) -> None:
    """End a process and whatever it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def is_function(folder: Path) -> bool:
    """Whether a folder `models/reward` holds a function instead of a model."""
    return (folder / CARD).exists()


def rows_of(folder: Path, prompts: Iterable[Prompt]) -> Iterator[dict[str, Any]]:
    """The other columns of each prompt, as prepared below a project's folder: of equal prompts one row after another,
    as in the file; empty for a prompt that is not there.
    """
    rows: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((folder / "data/prepared/prompts").glob("*.jsonl")):
        for row in jsonl.plain(path):
            rows.setdefault(prompt_text(row["prompt"]), []).append(row.get("row", {}))
    turns = {text: cycle(alike) for text, alike in rows.items()}
    yield from (next(turns.get(prompt_text(prompt), repeat({}))) for prompt in prompts)


def function_scores(folder: Path, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
    """The scores of the function in models/reward below a project's folder, with the rows of `rows_of`."""
    calls = map(Call, prompts, responses, rows_of(folder, prompts))
    return RewardFunction(folder / "models/reward", folder).scores(list(calls))
