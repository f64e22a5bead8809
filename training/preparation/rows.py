"""From examples to the three datasets of later stages: TRL's canonical rows, without duplicates,
split by prompt.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from config.errors import DataError
from training.modeling.batching import shared_length
from training.modeling.tokenizer import (
    Message,
    Prompt,
    TemplateRefusal,
    encode_prompts,
    encode_responses,
    render_prompt,
)
from training.preparation.cleaning import Refusal, same_prompt_key, write_quarantine
from training.preparation.formats import Example
from training.preparation.splits import JUDGE, SPLITS, VALIDATION, split_of
from training.preparation.tokens import COLUMNS, write_tokens
from training.process.artifacts import replacing, write_jsonl


class Row(NamedTuple):
    """A canonical row and its lengths."""

    content: dict[str, Any]
    sequence_tokens: tuple[int, ...]
    """Tokens of prompt plus response for each response; of the prompt alone if there is none."""
    pair_tokens: int | None = None
    """Tokens of both sequences of a pair, their common prefix counted once."""
    ids: tuple[list[int], ...] = ()
    """Of the prompt, then of each reply."""


Datasets = Mapping[str, Mapping[str, Sequence[Row]]]
"""Dataset (one of USES) -> split -> rows."""

REPLIES: Mapping[str, Callable[[Example], list[dict[str, str]]]] = {
    "sft": lambda example: [{"completion": text} for text in example.completions],
    "preference": lambda example: [
        {"chosen": pair.chosen, "rejected": pair.rejected} for pair in example.pairs
    ],
    "prompts": lambda example: [{}],
}
"""Use of an example -> the reply columns of each row it gives."""

USES = tuple(REPLIES)


def with_room(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], context_length: int
) -> tuple[dict[Example, list[int]], list[Refusal]]:
    """Token ids of the rendered prompt of each example that leaves room for a reply; the others are
    refused, as are those that the chat template refuses.
    """
    refusals: list[Refusal] = []
    rendered = list(examples)

    def encoded() -> list[list[int]]:
        return encode_prompts(tokenizer, [each.prompt for each in rendered])

    try:
        prompts = encoded()
    except TemplateRefusal:
        rendered = []
        for example in examples:
            try:
                render_prompt(tokenizer, example.prompt)
                rendered.append(example)
            except TemplateRefusal as refusal:
                detail = f"the chat template says: {refusal}"
                refusals.append(Refusal("chat_template", detail, example.origin))
        prompts = encoded()
    tokens = dict(zip(rendered, prompts, strict=True))
    for example, ids in tokens.items():
        if len(ids) >= context_length:
            detail = (
                f"prompt of {len(ids)} tokens leaves no room for a reply in "
                f"model.context_length={context_length}"
            )
            refusals.append(Refusal("prompt_fills_context", detail, example.origin))
    return {each: ids for each, ids in tokens.items() if len(ids) < context_length}, refusals


def make_dataset(
    use: str,
    examples: Sequence[Example],
    fractions: tuple[float, float, float],
    tokenizer: PreTrainedTokenizerBase,
    tokens: Mapping[Example, list[int]],
) -> dict[str, list[Row]]:
    """Split -> rows of one dataset, without exact duplicates, in the order of the source. `tokens`
    are those of the prompts; `fractions` are the shares for test, judge and validation. Prompts of
    the judge are in no other dataset than the preferences; prompts have no validation split, as
    sampling reads no replies.
    """
    unique = _unique(use, examples)
    texts = list(dict.fromkeys(text for _, replies in unique for text in replies.values()))
    encoded = dict(zip(texts, encode_responses(tokenizer, texts), strict=True))
    conversational = is_conversational(examples)
    _, judge, validation = fractions
    kept = [*SPLITS]
    kept += [JUDGE] if use == "preference" and judge else []
    kept += [VALIDATION] if use != "prompts" and validation else []
    dataset: dict[str, list[Row]] = {split: [] for split in kept}
    for example, replies in unique:
        split = split_of(example.prompt, *fractions)
        if use == "prompts" and split == VALIDATION:
            split = "train"
        if split not in dataset:
            continue
        responses = [encoded[text] for text in replies.values()]
        prompt = tokens[example]
        lengths = tuple(len(prompt) + len(ids) for ids in responses) or (len(prompt),)
        pair_tokens = (
            sum(lengths) - len(prompt) - shared_length(*responses) if len(responses) == 2 else None
        )
        content = canonical_row(example.prompt, replies, conversational)
        if use == "prompts" and example.columns:
            content["row"] = example.columns
        row = Row(content, lengths, pair_tokens, (prompt, *responses))
        dataset[split].append(row)
    return dataset


def _unique(use: str, examples: Sequence[Example]) -> list[tuple[Example, dict[str, str]]]:
    rows, seen = [], set()
    for example in examples:
        for replies in REPLIES[use](example):
            key = (same_prompt_key(example.prompt), *replies.values())
            if key not in seen:
                seen.add(key)
                rows.append((example, replies))
    return rows


def in_one_form(
    examples: Sequence[Sequence[Example]], additions: Sequence[bool]
) -> list[list[Example]]:
    """The examples of every source with prompts in one form, so that equal prompts are rendered the
    same way.

    One conversation makes the prompts of all sources conversations. `additions` are sources that
    only add to others: they must have the others' form, or they would change everything trained so
    far.

    Raises DataError if one is conversational where the others are plain.
    """
    talks = [is_conversational(found) for found in examples]
    main = any(talk for talk, added in zip(talks, additions, strict=True) if not added)
    if any(talks) and not main:
        raise DataError(
            "data.vote_source has conversations as prompts, the other sources plain text: one "
            "prompt would be rendered in two ways. "
            "Give the votes plain prompts, or the other sources conversations."
        )
    if not main:
        return [list(found) for found in examples]
    return [
        [replace(example, prompt=_as_conversation(example.prompt)) for example in found]
        for found in examples
    ]


def is_conversational(examples: Iterable[Example]) -> bool:
    """Whether these examples need lists of messages: one conversational prompt requires it for
    all.
    """
    return any(not isinstance(example.prompt, str) for example in examples)


def canonical_row(
    prompt: Prompt, replies: Mapping[str, str], conversational: bool
) -> dict[str, Any]:
    """TRL's row: {prompt} and replies by column, plain or as lists of messages."""
    if not conversational:
        return {"prompt": prompt, **replies}
    return {
        "prompt": _as_conversation(prompt),
        **{name: [{"role": "assistant", "content": text}] for name, text in replies.items()},
    }


def _as_conversation(prompt: Prompt) -> list[Message]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def refuse_empty_splits(datasets: Datasets, test_fraction: float) -> None:
    """Check that every dataset has rows to train and to test on; without any preferences a reward
    function is needed.

    Raises DataError.
    """
    for name, split, rows in each(datasets):
        in_all = sum(len(other) for other in datasets[name].values())
        if not rows and (in_all or name != "preference"):
            raise DataError(
                f"no row is left for {name}/{split}: {in_all} rows in all, split by prompt at "
                f"data.test_fraction={test_fraction}. "
                "Add prompts to the source, or change data.test_fraction (of judge and "
                "validation: data.judge_fraction, data.validation_fraction) in params.yaml."
            )


def write_prepared(target: Path, datasets: Datasets, refusals: Sequence[Refusal]) -> None:
    """<dataset>/<split>.jsonl and .arrow, and quarantine.jsonl; the folder is replaced
    atomically.
    """
    with replacing(target) as folder:
        for name, split, rows in each(datasets):
            write_jsonl(folder / name / f"{split}.jsonl", [row.content for row in rows])
            write_tokens(folder / name / f"{split}.arrow", COLUMNS[name], [row.ids for row in rows])
        write_quarantine(folder / "quarantine.jsonl", refusals)


def each(datasets: Datasets) -> list[tuple[str, str, Sequence[Row]]]:
    """(dataset, split, rows) of all datasets."""
    return [
        (name, split, rows) for name, splits in datasets.items() for split, rows in splits.items()
    ]
