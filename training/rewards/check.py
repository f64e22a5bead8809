"""The reward stage where reward.kind is function: it tries the function on held-out data and keeps a copy of it with
the models.

data/prepared/{prompts,preference}/test.jsonl, the function's file -> models/reward, metrics/reward.json,
plots/reward*.csv
"""

import logging
import random
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import numpy as np

from config import jsonl
from config.errors import DataError
from config.sections.offline import RewardFunction as Settings
from training.evaluation.intervals import wilson
from training.evaluation.reliability import pair_accuracy
from training.modeling.tokenizer import response_text
from training.process.artifacts import replacing, write_csv, write_json
from training.process.stage import Stage
from training.rewards.function import CARD, CODE, Call, RewardFunction, rows_of

logger = logging.getLogger("training")

TRIED_PROMPTS = 200
"""Held-out prompts that the function is tried on, with the known reply and with an empty one."""
TRIED_PAIRS = 2000


def check_function(stage: Stage, limits: Mapping[str, Any]) -> None:
    """Write models/reward and what the function says of the held-out data; rank 0 does all of it. `limits` are the
    facts of the data stage about the held-out pairs.

    Raises DataError if the function fails.
    """
    settings = stage.params.reward
    assert isinstance(settings, Settings)
    if stage.rank != 0:
        return
    prepared = stage.root / "data/prepared"
    stage.check_params()
    with replacing(stage.root / "models/reward") as folder:
        folder.mkdir()
        shutil.copyfile(stage.root / settings.script, folder / CODE)
        write_json(folder / CARD, {"path": settings.path, "timeout_seconds": settings.timeout_seconds})
        function = RewardFunction(folder, stage.root)
        with stage.meter.phase("score", 0) as work:
            replies = known_replies(list(islice(jsonl.plain(prepared / "prompts/test.jsonl"), TRIED_PROMPTS)))
            pairs = pair_calls(stage.root, list(islice(jsonl.plain(prepared / "preference/test.jsonl"), TRIED_PAIRS)))
            began = time.perf_counter()
            calls = [*replies, *pairs]
            scores = function.scores(calls)
            seconds = time.perf_counter() - began
            work.add(sequences=len(scores))
        if not scores:
            raise DataError(f"reward.path={settings.path}: there is no held-out prompt to try it on.")
        if any(call.response for call in calls) and len(set(scores)) == 1:
            raise DataError(
                f"reward.path={settings.path} gives {scores[0]:g} to each of {len(scores)} replies, known, empty, cut "
                "and shuffled ones alike: nothing can be learned from it. Correct the function."
            )
    pair_scores = np.array(scores[len(replies) :]).reshape(-1, 2)
    margins = pair_scores[:, 0] - pair_scores[:, 1]
    accuracy, low, high = wilson(pair_accuracy(margins) * len(margins), len(margins)) if len(margins) else [None] * 3
    known_scores = [
        score
        for number, (call, score) in enumerate(zip(calls, scores, strict=True))
        if call.response and (number >= len(replies) or call.response in call.row.values())
    ] or scores
    empty_scores = [score for call, score in zip(calls, scores, strict=True) if not call.response]
    empty_as_good = bool(empty_scores) and known_scores is not scores and mean(empty_scores) >= mean(known_scores)
    if empty_as_good:
        logger.warning(
            "warning: reward.path=%s scores empty replies %.3g and known ones %.3g on average: a model can learn to "
            "say nothing", settings.path, mean(empty_scores), mean(known_scores),
        )  # fmt: skip
    metrics = {
        "accuracy": accuracy, "accuracy_low": low, "accuracy_high": high, "ece": None,
        **limits,
        "margin_mean": float(margins.mean()) if len(margins) else None,
        "score_mean": mean(known_scores), "score_std": pstdev(known_scores),
        "test_pairs": len(margins), "tried": len(scores),
        "seconds_per_reply": seconds / len(scores), "empty_as_good": empty_as_good,
    }  # fmt: skip
    write_csv(stage.root / "plots/reward.csv", ("step", "loss"), [])
    write_csv(stage.root / "plots/reward_calibration.csv", ("confidence", "accuracy", "count"), [])
    write_json(stage.root / "metrics/reward.json", metrics)
    stage.finish("models/reward", "metrics/reward.json", "plots/reward.csv", "plots/reward_calibration.csv")


def known_replies(prompts: Sequence[Mapping[str, Any]]) -> list[Call]:
    """Each prompt with the texts of its row as replies, whole, cut in half and with their words in another order, and
    with an empty one: a function must stand whatever a model says, and tell some of these apart.
    """
    calls = []
    for row in prompts:
        columns = row.get("row", {})
        texts = [value for value in columns.values() if isinstance(value, str)]
        calls += [Call(row["prompt"], text, columns) for text in dict.fromkeys(["", *texts, *changed_texts(texts)])]
    return calls


def changed_texts(texts: Iterable[str]) -> Iterator[str]:
    """Texts cut in half, and with their words in another order."""
    rng = random.Random(0)
    for text in texts:
        if words := text.split():
            yield text[: len(text) // 2]
            yield " ".join(rng.sample(words, len(words)))


def pair_calls(root: Path, pairs: Sequence[Mapping[str, Any]]) -> list[Call]:
    """Chosen and rejected reply of each pair, one after the other."""
    rows = rows_of(root, [pair["prompt"] for pair in pairs])
    return [
        Call(pair["prompt"], response_text(pair[side]), row)
        for pair, row in zip(pairs, rows, strict=True)
        for side in ("chosen", "rejected")
    ]
