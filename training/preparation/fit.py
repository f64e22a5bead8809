"""Whether a file's examples fit the params of a run: refused rows, and lengths against the model's
limits.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import quantiles
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from config.schema import Params
from training.modeling.tokenizer import encode_responses, token_counts
from training.preparation.formats import Example, Parsed
from training.preparation.rows import in_one_form, with_room
from training.preparation.splits import SPLITS, split_of
from training.preparation.vocabulary import train_tokenizer


class Fit(NamedTuple):
    """Lengths are in tokens of the params' model."""

    context_length: int
    max_length: int
    """reward.max_length, or dpo.max_length with that method."""
    setting: str
    """Name of that parameter."""
    refused: int
    """Rows, those whose prompt fills the context included."""
    rows: int
    limit: float
    """data.max_quarantine_fraction."""
    too_long: int
    """Pairs with a sequence over `max_length`, which are left out."""
    pairs: int
    sft_max_length: int
    cut: int
    """Demonstrations whose reply loses its end at sft.max_length."""
    dropped: int
    """Demonstrations whose prompt alone is as long."""
    demonstrations: int
    prompt_tokens: Mapping[str, int]
    """p95 and maximum; of prompts and of full sequences."""
    sequence_tokens: Mapping[str, int]
    fault: str | None
    """Why the data stage would fail, in a line; empty if it would not."""
    enough: float | None
    """A data.max_quarantine_fraction that lets these rows pass, if the current one does not."""


def fit(parsed: Parsed, base: PreTrainedTokenizerBase | None, params: Params) -> tuple[Parsed, Fit]:
    """How one source's examples fit, and the same without those that the chat template refuses.
    Examples whose prompt leaves no room for a reply are refused by a run, pairs that are too long
    left out.

    base  tokenizer of `model.path`; without it, one is trained on the examples, as a run does
    """
    [examples] = in_one_form([parsed.examples], [False])
    tokenizer = base or train_tokenizer(examples, params)
    context = params.model.context_length
    encoded, without_room = with_room(tokenizer, examples, context)
    prompts = {example: len(ids) for example, ids in encoded.items()}
    del encoded
    crowded = [each for each in without_room if each.reason == "prompt_fills_context"]
    by_template = [each for each in without_room if each.reason == "chat_template"]
    examples = list(prompts)
    texts = list({text for each in examples for text in _replies(each)})
    replies = dict(zip(texts, token_counts(encode_responses, tokenizer, texts), strict=True))
    del texts
    pairs = [
        prompts[each] + max(replies[pair.chosen], replies[pair.rejected])
        for each in examples
        for pair in each.pairs
    ]
    sequences = pairs or [
        prompts[each] + max((replies[text] for text in each.completions), default=0)
        for each in examples
    ]
    setting = "dpo" if params.align.method == "dpo" else "reward"
    max_length = getattr(params.section(setting), "max_length", context)  # a function has none
    refused = len(parsed.refusals) + len(without_room)
    limit = params.data.max_quarantine_fraction
    share = refused / max(1, parsed.rows_read)
    enough = min(1.0, math.ceil(100 * share) / 100) if share > limit else None
    spread = _spread(list(prompts.values()))
    demonstrations = [(prompts[each], replies[text]) for each in examples
                      for text in each.completions]  # fmt: skip
    longest = params.sft.max_length
    found = Fit(
        context_length=context,
        max_length=max_length,
        setting=f"{setting}.max_length",
        refused=refused,
        rows=parsed.rows_read,
        limit=limit,
        too_long=sum(length > max_length for length in pairs),
        pairs=len(pairs),
        sft_max_length=longest,
        cut=sum(prompt < longest < prompt + reply for prompt, reply in demonstrations),
        dropped=sum(prompt >= longest for prompt, _ in demonstrations),
        demonstrations=len(demonstrations),
        prompt_tokens=spread,
        sequence_tokens=_spread(sequences),
        fault=_fault(refused, parsed.rows_read, limit, enough, len(crowded), context, spread["p95"])
        or _empty(examples, params),
        enough=enough,
    )
    places = {id(refusal.origin) for refusal in by_template}
    kept = [each for each in parsed.examples if id(each.origin) not in places]
    return parsed._replace(examples=kept, refusals=[*parsed.refusals, *by_template]), found


def _replies(example: Example) -> list[str]:
    return [*example.completions, *(text for pair in example.pairs for text in pair[:2])]


def _spread(lengths: Sequence[int]) -> dict[str, int]:
    if len(lengths) < 2:
        return {"p95": max(lengths, default=0), "max": max(lengths, default=0)}
    p95 = math.ceil(quantiles(lengths, n=20, method="inclusive")[-1])
    return {"p95": p95, "max": max(lengths)}


def _fault(
    refused: int,
    rows: int,
    limit: float,
    enough: float | None,
    crowded: int,
    context: int,
    p95: int,
) -> str | None:
    why, remedy = "", "fix the rows"
    if 2 * crowded > refused:
        why = f", {crowded:,} as their prompts fill model.context_length={context}"
        remedy = f"raise model.context_length (95% of the prompts have up to {p95} tokens)"
    if refused >= rows:
        return f"all {rows:,} rows are refused{why}; none is left to train on. To go on, {remedy}."
    if enough is None:
        return None
    return (
        f"{refused:,} of {rows:,} rows ({refused / rows:.1%}) are refused{why}; "
        f"data.max_quarantine_fraction={limit:g}. Set it to {enough:g}, or {remedy}."
    )


def _empty(examples: Sequence[Example], params: Params) -> str | None:
    """Both splits need prompts."""
    data = params.data
    found = {split_of(each.prompt, *data.fractions) for each in examples}
    missing = next((split for split in SPLITS if split not in found), None)
    if missing is None:
        return None
    return (
        f"no prompt is left for the {missing} split at data.test_fraction="
        f"{params.data.test_fraction}. Add prompts, or change data.test_fraction."
    )
