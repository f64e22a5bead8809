"""From examples to the four datasets of later stages: TRL's canonical rows with their token ids, without duplicates,
split by prompt.

Rows pass through one after another. A first pass checks every row and keeps the accepted examples in a file; a second
one, which knows the tokenizer and what is a duplicate, writes the datasets. In memory remain some digests and lengths
of each row, about 100 bytes.

data/prepared/<dataset>/<split>.jsonl   canonical rows, for people and for TRL
data/prepared/<dataset>/<split>.arrow   their token ids, for the stages
data/prepared/quarantine.jsonl          refused rows
"""

import json
import pickle
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from config import jsonl
from config.errors import DataError
from config.schema import Params
from config.sections.data import Data
from config.terminal_text import shown
from training.modeling.batching import shared_length
from training.modeling.duplicates import digest, first_occurrences
from training.modeling.tokenizer import (
    SPECIAL_TOKENS,
    Message,
    Prompt,
    TemplateRefusal,
    encode_prompts,
    encode_responses,
    pretrained_tokenizer,
    prompt_text,
    render_prompt,
    response_text,
    special_tokens,
)
from training.preparation.cleaning import KEPT_QUARANTINE, Quarantine, Refusal, TextRules, same_prompt_key
from training.preparation.examples import Need, Reading
from training.preparation.formats import REPLIES, USES, Example, replies_of
from training.preparation.splits import JUDGE, SPLITS, VALIDATION, opening, split_of
from training.preparation.tokens import COLUMNS, Ids, TokenTable, TokenWriter

EXAMPLES_AT_ONCE = 2000
T = TypeVar("T")


def in_parts(items: Iterable[T]) -> Iterator[list[T]]:
    ahead = iter(items)
    while part := list(islice(ahead, EXAMPLES_AT_ONCE)):
        yield part


# ---------------------------------------------------------------- the first pass


class Accepted:
    """The accepted examples of one source, kept in a file."""

    def __init__(self, need: Need, rules: TextRules, path: Path) -> None:
        self.need = need
        self.reading: Reading = need.reading(rules)
        self.conversational = False
        """Whether some prompt is a conversation, or all are to become one."""
        self.digests = {use: array("Q") for use in need.uses}
        """Dataset -> a digest of each row that the examples give it."""
        self.accepted = self.characters = 0
        """Examples; characters of their prompts and replies."""
        self._path = path

    def read(self, quarantine: Quarantine, check: Callable[[], None], is_plain: bool) -> None:
        """Read the source. `check` may raise to stop; with `is_plain` all prompts before were."""
        quarantine.add(self.need.refused)
        with self._path.open("wb") as file:
            for part in in_parts(self._examples(quarantine, is_plain and self.need.follows)):
                check()
                pickle.dump(part, file)

    def _examples(self, quarantine: Quarantine, only_plain: bool) -> Iterator[Example]:
        for item in self.reading:
            if isinstance(item, Refusal):
                quarantine.add([item])
            elif only_plain and not isinstance(item.prompt, str):
                detail = "a conversation, where the prompts of the other sources are plain texts"
                quarantine.add([Refusal("conversation", detail, item.origin)])
            else:
                self._count(item)
                yield item

    def _count(self, example: Example) -> None:
        self.accepted += 1
        self.conversational |= not isinstance(example.prompt, str)
        self.characters += len(prompt_text(example.prompt)) + sum(map(len, replies_of(example)))
        prompt = same_prompt_key(example.prompt)
        for use, digests in self.digests.items():
            columns = [json.dumps(example.columns, sort_keys=True)] if use == "prompts" and example.columns else []
            digests.extend(digest(prompt, *map(str, row.values()), *columns) for row in REPLIES[use](example))

    def remove(self) -> None:
        """Remove the file."""
        self._path.unlink()

    @property
    def rows_read(self) -> int:
        return self.reading.rows_read + len(self.need.refused)

    def __iter__(self) -> Iterator[Example]:
        with self._path.open("rb") as file:
            while file.peek(1):
                for example in pickle.load(file):
                    yield (
                        replace(example, prompt=as_conversation(example.prompt)) if self.conversational else example
                    )


def as_conversation(prompt: Prompt) -> list[Message]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


# ---------------------------------------------------------------- the second pass


NewRow = tuple[dict[str, Any], int, bool]
"""Reply columns of a row, the digest of its content, and whether it is the first with it."""


class Split:
    """The rows of one split of a dataset, written as they come, and what is known of them."""

    def __init__(self, folder: Path, use: str, name: str) -> None:
        self.rows = 0
        self.prompts = array("Q")
        """A digest of each row's prompt."""
        self.pair_tokens = array("i")
        """Tokens of both sequences of a pair, their common prefix counted once."""
        self.longer_wins = 0.0
        """Pairs whose chosen reply has more characters; equal lengths count half."""
        self.path = folder / use / f"{name}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("w", encoding="utf-8")
        self._tokens = TokenWriter(self.path.with_suffix(".arrow"), COLUMNS[use])

    def add(self, row: Mapping[str, Any], prompt: int, ids: Sequence[Ids]) -> None:
        """Write a row. `prompt` is a digest of its prompt, `ids` are those of the prompt and of each reply."""
        self.rows += 1
        self.prompts.append(prompt)
        prompt_ids, *replies = ids
        if "chosen" in row:
            tokens = len(prompt_ids) + sum(map(len, replies)) - shared_length(*replies)
            self.pair_tokens.append(tokens)
            chosen, rejected = (len(response_text(row[name])) for name in ("chosen", "rejected"))
            self.longer_wins += 0.5 if chosen == rejected else chosen > rejected
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._tokens.add(ids)

    def close(self) -> None:
        self._file.close()
        self._tokens.close()

    def lengths(self) -> dict[str, NDArray[np.int64]]:
        """Tokens of each row, by column of the file of ids. Only after closing."""
        table = TokenTable(self.path.with_suffix(".arrow"))
        return {column: table.lengths(column) for column in table.columns if column != "label"}

    def sequence_tokens(self) -> NDArray[np.int64]:
        """Tokens of prompt plus response for each response, [responses]; of the prompt alone where there is none. Only
        after closing.
        """
        prompts, *replies = self.lengths().values()
        return np.concatenate([prompts + reply for reply in replies]) if replies else prompts


class Datasets:
    """Writes the rows of the four datasets. `duplicates` counts those left out, by dataset."""

    def __init__(self, folder: Path, settings: Data) -> None:
        self._settings = settings
        self.splits = {use: {name: Split(folder, use, name) for name in self._names(use)} for use in USES}
        """Dataset -> split."""
        self.duplicates = dict.fromkeys(USES, 0)
        self.pairs, self.opposite_pairs = array("Q"), array("Q")
        """A digest of each pair without its duplicates, and of its opposite."""
        self.prompt_tokens = array("i")
        """Tokens of each example's prompt."""
        self.known_orders, self.chosen_first = 0, 0
        """Pairs of which the source says which reply was shown first; those where it is the preferred one."""

    def _names(self, use: str) -> list[str]:
        """Prompts have no validation split, as sampling reads no replies."""
        return [
            *SPLITS,
            *([JUDGE] if use == "preference" and self._settings.judge_fraction else []),
            *([VALIDATION] if use != "prompts" and self._settings.validation_fraction else []),
        ]

    def add(
        self, example: Example, rows: Mapping[str, Sequence[NewRow]], prompt_ids: Ids, reply_ids: Mapping[str, Ids]
    ) -> None:
        """Write the rows that an example gives to each dataset. Prompts of the judge are in no other dataset than the
        preferences.
        """
        key = same_prompt_key(example.prompt)
        prompt, place = digest(key), split_of(example.prompt, *self._settings.fractions)
        self.prompt_tokens.append(len(prompt_ids))
        for use, new in rows.items():
            name = "train" if use == "prompts" and place == VALIDATION else place
            split = self.splits[use].get(name)
            for replies, row_digest, is_first in new:
                if not is_first:
                    self.duplicates[use] += 1
                    continue
                if use == "preference":
                    self.pairs.append(row_digest)
                    self.opposite_pairs.append(digest(key, *reversed(replies.values())))
                if split is not None:
                    row = canonical_row(example.prompt, replies)
                    if use == "prompts" and example.columns:
                        row["row"] = example.columns
                    ids = [prompt_ids, *([int(v)] if isinstance(v, bool) else reply_ids[v] for v in replies.values())]
                    split.add(row, prompt, ids)
        for pair in example.pairs if "preference" in rows else ():
            self.known_orders += pair.chosen_first is not None
            self.chosen_first += pair.chosen_first is True

    def contradictory_pairs(self) -> int:
        """Pairs whose opposite occurs too; both are counted."""
        return int(np.isin(self.opposite_pairs, self.pairs).sum()) if self.pairs else 0

    def items(self) -> Iterator[tuple[str, str, Split]]:
        """(dataset, its split's name, split)"""
        for use, splits in self.splits.items():
            for name, split in splits.items():
                yield use, name, split

    def close(self) -> None:
        for _, _, split in self.items():
            split.close()


# ---------------------------------------------------------------- both


class Passes:
    """The two passes over the sources. Files are written beside the quarantine."""

    def __init__(self, quarantine: Quarantine, settings: Data, check: Callable[[], None] = lambda: None) -> None:
        """`check` is called now and then, and may raise to stop."""
        self._quarantine, self._settings, self._check = quarantine, settings, check
        self._folder = quarantine.path.parent

    def read(self, needs: Sequence[Need], rules: TextRules) -> list[Accepted]:
        """Read every source once. One conversation makes the prompts of all sources conversations, so that equal
        prompts are rendered the same way.

        Raises DataError if a source cannot be read, or if votes are conversations where the other sources are plain:
        they would change everything trained so far.
        """
        accepted = [Accepted(need, rules, self._folder / f"{i}.pickle") for i, need in enumerate(needs)]
        for source in accepted:
            source.read(self._quarantine, self._check, not any(before.conversational for before in accepted))
        conversational = [source for source in accepted if source.conversational]
        if conversational and not any(source.need.teaches_tokens for source in conversational):
            raise DataError(
                "data.vote_source has conversations as prompts, the other sources plain text: one "
                "prompt would be rendered in two ways. "
                "Give the votes plain prompts, or the other sources conversations."
            )
        for source in accepted:
            source.conversational = bool(conversational)
        return accepted

    def write(self, accepted: Sequence[Accepted], tokenizer: PreTrainedTokenizerBase, context_length: int) -> Datasets:
        """Write the datasets; examples whose prompt leaves no room for a reply are refused."""
        with closing(Datasets(self._folder, self._settings)) as datasets:
            digests = {use: _digests(use, accepted) for use in USES}
            for source in accepted:
                for part in in_parts(source):
                    self._check()
                    prompts, refusals = with_room(tokenizer, part, context_length)
                    self._quarantine.add(refusals)
                    replies = list(dict.fromkeys(text for e in prompts for text in replies_of(e)))
                    ids = dict(zip(replies, encode_responses(tokenizer, replies), strict=True))
                    for example in part:
                        rows = {
                            use: [(row, *next(digests[use])) for row in REPLIES[use](example)]
                            for use in source.need.uses
                        }
                        if example in prompts:
                            datasets.add(example, rows, prompts[example], ids)
        return datasets


def base_tokenizer(params: Params) -> PreTrainedTokenizerBase | None:
    """The tokenizer of `model.path`; None for a model without one. Raises ModelError."""
    if params.model.path is None:
        return None
    return pretrained_tokenizer(params.model, params.data.prompt_template)


def text_rules(params: Params, tokenizer: PreTrainedTokenizerBase | None) -> TextRules:
    """The limits of texts; without a tokenizer one is trained, with special tokens of its own."""
    special = SPECIAL_TOKENS if tokenizer is None else special_tokens(tokenizer)
    return TextRules(params.data.max_prompt_chars, params.data.max_response_chars, special)


def _digests(use: str, accepted: Iterable[Accepted]) -> Iterator[tuple[int, bool]]:
    """Digest of each row of a dataset over all sources, and whether it is the first of its value."""
    digests = array("Q")
    for source in accepted:
        digests.extend(source.digests.get(use, ()))
    return zip(digests, map(bool, first_occurrences(digests).tobytes()), strict=True)


def with_room(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], context_length: int
) -> tuple[dict[Example, Ids], list[Refusal]]:
    """Token ids of the rendered prompt of each example that leaves room for a reply; the others are refused, as are
    those that the chat template refuses.
    """
    refusals: list[Refusal] = []
    rendered = list(examples)

    def encoded() -> list[Ids]:
        return encode_prompts(tokenizer, [example.prompt for example in rendered])

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
            detail = f"prompt of {len(ids)} tokens leaves no room for a reply in model.context_length={context_length}"
            refusals.append(Refusal("prompt_fills_context", detail, example.origin))
    return {e: ids for e, ids in tokens.items() if len(ids) < context_length}, refusals


def canonical_row(prompt: Prompt, replies: Mapping[str, str | bool]) -> dict[str, Any]:
    """TRL's row: {prompt}, replies by column, plain or as lists of messages, and the label of a rated one."""
    if isinstance(prompt, str):
        return {"prompt": prompt, **replies}
    talks = {
        name: value if isinstance(value, bool) else [{"role": "assistant", "content": value}]
        for name, value in replies.items()
    }
    return {"prompt": prompt, **talks}


def refuse_if_too_many(accepted: Sequence[Accepted], quarantine: Quarantine, settings: Data, root: Path) -> None:
    """Fail if more rows were refused than data.max_quarantine_fraction allows; they are then kept in runs/data below
    `root`.

    Raises DataError.
    """
    rows_read = sum(source.rows_read for source in accepted)
    quarantine.refuse_if_too_many(rows_read, settings.max_quarantine_fraction, root / KEPT_QUARANTINE)


def refuse_empty_splits(datasets: Datasets, test_fraction: float) -> None:
    """Check that every dataset has rows to train and to test on; without any preferences a reward function is needed,
    and ratings are for KTO.

    Raises DataError.
    """
    for use, name, split in datasets.items():
        in_all = sum(other.rows for other in datasets.splits[use].values())
        if not split.rows and (in_all or use not in ("preference", "ratings")):
            rows = (row for other in datasets.splits[use].values() for row in jsonl.plain(other.path))
            [(text, alike)] = Counter(opening(row["prompt"]) for row in rows).most_common(1) or [("", 0)]
            most = f" {alike} of them begin with {shown(text)}, and what begins alike is in one split."
            raise DataError(
                f"no row is left for {use}/{name}: {in_all} rows in all, split by prompt at "
                f"data.test_fraction={test_fraction}.{most if 2 * alike > max(in_all, 2) else ''} "
                "Add prompts to the source, or change data.test_fraction (of judge and "
                "validation: data.judge_fraction, data.validation_fraction) in params.yaml."
            )
