"""Responses of a training policy: a few for people to read, or all of them to be judged.

Shapes: B responses.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from config.records import ROLLOUTS_VARIABLE
from training.modeling.tokenizer import decode_response
from training.process.stage import Stage

KEPT = 4
"""Responses per update in samples.jsonl."""


def write_samples(
    stage: Stage,
    update: int,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    responses: Sequence[list[int]],
    score_B: Tensor | None = None,
) -> None:
    """Append a few responses to runs/<stage>/samples.jsonl. Rank 0 writes."""
    rows = _rows(stage, update, tokenizer, prompts[:KEPT], responses[:KEPT], score_B)
    _append(stage, "samples.jsonl", rows)


def write_rollouts(
    stage: Stage,
    update: int,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    responses: Sequence[list[int]],
    score_B: Tensor,
) -> None:
    """Append every response to runs/<stage>/rollouts.jsonl if the environment variable is set. Rank
    0 writes.
    """
    if os.environ.get(ROLLOUTS_VARIABLE):
        rows = _rows(stage, update, tokenizer, prompts, responses, score_B)
        _append(stage, "rollouts.jsonl", rows)


def _rows(
    stage: Stage,
    update: int,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    responses: Sequence[list[int]],
    score_B: Tensor | None,
) -> Iterator[dict[str, Any]]:
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        yield {
            "run_id": stage.run_id,
            "attempt": stage.attempt,
            "step": update,
            "index": i,
            **({"score": score_B[i].item()} if score_B is not None else {}),
            "prompt": tokenizer.decode(prompt, skip_special_tokens=True).strip(),
            "response": decode_response(tokenizer, response),
        }


def _append(stage: Stage, name: str, rows: Iterable[dict[str, Any]]) -> None:
    if stage.rank != 0:
        return
    with (stage.root / "runs" / stage.name / name).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
