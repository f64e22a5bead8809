"""Compares today's data with the champion's: `python -m training.retraining.examine`. Nothing of the project is
changed.

params.yaml's sources, champions/<run> -> rows that came and went, drift of prompts, the champion's reward model on the
new pairs
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from config import jsonl
from config.load import load
from config.schema import Params
from config.work import EXAMINED_PAIRS
from config.workspace.retraining import Examination, LengthDrift, Share
from training.evaluation.intervals import wilson
from training.inference.trained_models import TrainedModels, pair_margins
from training.modeling.tokenizer import Prompt, encode_prompts, prompt_text, token_counts
from training.preparation.cleaning import Quarantine, same_prompt_key
from training.preparation.examples import read_sources
from training.preparation.formats import USES
from training.preparation.prepared import Passes, refuse_if_too_many, text_rules
from training.process.artifacts import write_json
from training.retraining.drift import critical_distance, length_distance, unseen_words
from training.retraining.helper import run_helper

Contents = Mapping[str, Sequence[dict[str, Any]]]
"""dataset/split -> rows."""


def examine(root: Path, params: Params, champion: TrainedModels) -> Examination:
    """Compare the current content of the sources with the champion's data. Raises DataError as the data stage does."""
    confidence = params.evaluate.confidence
    with tempfile.TemporaryDirectory() as folder:
        now, refused = prepared_now(root, params, champion.tokenizer, Path(folder))
    before = contents(champion.folder / "data/prepared")
    names = dict.fromkeys([*now, *before])  # only one of them may have a split for a judge
    added = {name: _without(now.get(name, ()), before.get(name, ())) for name in names}
    removed = {name: _without(before.get(name, ()), now.get(name, ())) for name in names}
    new_prompts = _prompts(row for rows in added.values() for row in rows)
    old_prompts = _prompts(row for rows in before.values() for row in rows)
    pairs = [row for name, rows in added.items() if name.startswith("preference/") for row in rows]
    return Examination(
        added={name: len(rows) for name, rows in added.items()},
        removed={name: len(rows) for name, rows in removed.items()},
        refused=refused,
        length_drift=_length_drift(new_prompts, old_prompts, champion.tokenizer, confidence) if new_prompts else None,
        new_words=_new_words(new_prompts, old_prompts, confidence),
        accuracy=_accuracy(champion, pairs[:EXAMINED_PAIRS], confidence),
        accuracy_before=champion.metrics("reward").get("accuracy"),
    )


def prepared_now(root: Path, params: Params, tokenizer: PreTrainedTokenizerBase, folder: Path) -> tuple[Contents, int]:
    """Rows that the data stage would write, and the number it would refuse."""
    quarantine = Quarantine(folder / "quarantine.jsonl")
    passes = Passes(quarantine, params.data)
    base = None if params.model.path is None else tokenizer
    accepted = passes.read(read_sources(params, root), text_rules(params, base))
    refuse_if_too_many(accepted, quarantine, params.data, root)
    passes.write(accepted, tokenizer, params.model.context_length)
    return contents(folder), quarantine.total


def contents(prepared: Path) -> Contents:
    """The rows of a folder of prepared data."""
    return {
        f"{use}/{path.stem}": list(jsonl.plain(path))
        for use in USES
        for path in sorted((prepared / use).glob("*.jsonl"))
    }


def _without(rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    other_rows = {json.dumps(row, sort_keys=True) for row in others}
    return [row for row in rows if json.dumps(row, sort_keys=True) not in other_rows]


def _prompts(rows: Iterable[dict[str, Any]]) -> list[Prompt]:
    """Distinct prompts."""
    return list({same_prompt_key(row["prompt"]): row["prompt"] for row in rows}.values())


def _length_drift(
    new: list[Prompt], before: list[Prompt], tokenizer: PreTrainedTokenizerBase, confidence: float
) -> LengthDrift:
    lengths_new, lengths_before = (token_counts(encode_prompts, tokenizer, prompts) for prompts in (new, before))
    return LengthDrift(
        distance=length_distance(lengths_new, lengths_before),
        critical=critical_distance(len(new), len(before), confidence),
        mean_before=sum(lengths_before) / len(before),
        mean_new=sum(lengths_new) / len(new),
    )


def _new_words(new: list[Prompt], before: list[Prompt], confidence: float) -> Share | None:
    unseen, of = unseen_words([prompt_text(prompt) for prompt in new], [prompt_text(prompt) for prompt in before])
    return Share(**wilson(unseen, of, confidence)._asdict(), of=of) if of else None


def _accuracy(champion: TrainedModels, pairs: Sequence[dict[str, Any]], confidence: float) -> Share | None:
    """Share of new pairs on which the champion's reward model agrees with the label; a tie counts half."""
    if not pairs:
        return None
    margins = pair_margins(champion, pairs)
    right = sum((margin > 0) + 0.5 * (margin == 0) for margin in margins)
    return Share(**wilson(right, len(margins), confidence)._asdict(), of=len(margins)) if margins else None


def main(options: argparse.Namespace) -> None:
    write_json(options.out, examine(Path(), load(options.params), TrainedModels(options.champion)).model_dump())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compare the data as it is now with the champion's.")
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    sys.exit(run_helper(parser, main))
