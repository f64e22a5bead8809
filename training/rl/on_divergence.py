"""Handling of divergence: the batch is kept for inspection, and the stage ends or goes back to an earlier checkpoint.

Going back ends the attempt; the next one resumes as after a crash, so that time, money and rows are accounted for as
usual.

Shapes: B responses, T response tokens.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from config.errors import RolledBack, TrainingDiverged
from training.modeling.tokenizer import decode_response
from training.process.stage import Stage
from training.rl.episodes import Episodes
from training.rl.roles import Roles
from training.rl.state import PpoState, roll_back, save_state

KEPT = "diverged.jsonl"
"""File in runs/<stage>/."""


class Batch(NamedTuple):
    """A rollout to keep."""

    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[list[int]]
    responses: Sequence[list[int]]
    score_B: Tensor
    episodes: Episodes


@contextmanager
def on_divergence(
    stage: Stage, roles: Roles, state: PpoState, batch: Batch, statistics: Mapping[str, float] | None = None
) -> Iterator[None]:
    """Around a check of the update after `state`: what it raises says where the batch is.

    statistics  of a rollout that cannot be learnt from, for the log; the weights that made it are
                then saved, unless the stage goes back

    With on_divergence=roll_back the first time leaves the newest checkpoint with half the learning rates, and says so.
    All processes raise alike.
    """
    try:
        yield
    except TrainingDiverged as diverged:
        write_batch(stage, state.update + 1, batch)
        if statistics is not None:
            stage.log(state.update + 1, statistics)
        message = f"{diverged} Its batch is in runs/{stage.name}/{KEPT}."
        if roles.settings.on_divergence == "roll_back" and not state.rolled_back:
            back = roll_back(stage, roles)
            raise RolledBack(
                f"{message} The next attempt goes on after update {back.update} with half the learning rates."
            ) from None
        if statistics is not None:
            save_state(stage, roles, state)
        raise TrainingDiverged(message) from None


def write_batch(stage: Stage, update: int, batch: Batch) -> None:
    """Append a rollout to runs/<stage>/diverged.jsonl, one response per line. Numbers that are not finite are written
    as text, which is valid JSON.
    """
    if stage.rank != 0:
        return
    tokens, episodes = batch.episodes.mask, batch.episodes
    per_token = {
        "logprobs": episodes.logprobs,
        "values": episodes.values,
        "advantages": episodes.advantages,
        "returns": episodes.returns,
    }
    with (stage.root / "runs" / stage.name / KEPT).open("a", encoding="utf-8") as file:
        for i, (prompt, response) in enumerate(zip(batch.prompts, batch.responses, strict=True)):
            row: dict[str, Any] = {
                "run_id": stage.run_id,
                "attempt": stage.attempt,
                "step": update,
                "score": _number(batch.score_B[i].item()),
                "prompt": batch.tokenizer.decode(prompt, skip_special_tokens=True).strip(),
                "response": decode_response(batch.tokenizer, response),
            }
            for name, x_BT in per_token.items():
                if x_BT is not None:
                    row[name] = [_number(x) for x in x_BT[i][tokens[i]].tolist()]
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
