"""Votes from the JSON exports of Label Studio and Argilla. What cannot be read becomes a Refused
with its reason, never an exception.

label-studio   a list of tasks: data (the texts), annotations[] with completed_by, was_cancelled and
               result[]; a result of type
               pairwise has value.selected (left, right), one of type choices has value.choices (a
               list of texts)
argilla        a list of records: fields (the texts), responses {question: [{value, user_id}]};
               flattened, the texts stand in
               the record and a question has the lists NAME.responses, NAME.responses.users,
               NAME.responses.status

Sources: docs of Label Studio, "Task format" and the tags Pairwise and Choices; Argilla 2, records'
to_list, to_dict and to_json.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from config.errors import DataError, ParamsError
from labelling.votes import Pair, Vote, annotator_name, is_prompt

COLUMNS: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt", "question", "instruction", "dialog"),
    "response1": ("response1", "text1", "answer1", "response-1", "response_a"),
    "response2": ("response2", "text2", "answer2", "response-2", "response_b"),
}
"""Our column -> names to look for, the first match counts; `--column ours=theirs` names another."""

FIRST = ("1", "left", "first", "a")
SECOND = ("2", "right", "second", "b")
TIE = ("0", "tie", "same", "equal", "both")


class Refused(NamedTuple):
    """An entry without a usable vote."""

    reason: str
    """A short name for the kind of problem."""
    detail: str
    number: int
    """Number of the task or record in the file, from 1."""
    original: Any


class _Unreadable(Exception):
    """Raised inside an entry; caught where its number is known."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


Judgement = tuple[Any, Any]
"""Annotator and choice as in the export."""


def read_export(
    path: Path, form: str, columns: Mapping[str, str]
) -> tuple[list[Vote], list[Refused]]:
    """The votes of an export and what was refused, in the order of the file. `columns` maps our
    names to the file's.

    Raises DataError if the file is missing or no JSON list, ParamsError for an unknown format or
    column.
    """
    if form not in FORMATS:
        raise ParamsError(f"--format {form} is not known: it is {' or '.join(FORMATS)}.")
    unknown = next((name for name in columns if name not in COLUMNS), None)
    if unknown is not None:
        raise ParamsError(
            f"--column {unknown}=...: {unknown} is not one of {', '.join(COLUMNS)}. "
            "Write ours=theirs."
        )
    votes: list[Vote] = []
    refused: list[Refused] = []
    for number, entry in enumerate(_entries(path), start=1):
        try:
            texts, judgements = FORMATS[form](entry)
            names = {ours: _name(ours, texts, columns) for ours in COLUMNS}
            pair = _pair(texts, names)
        except _Unreadable as error:
            refused.append(Refused(error.reason, error.detail, number, entry))
            continue
        for annotator, choice in judgements:
            try:
                votes.append(Vote(pair, _annotator(annotator, form), _vote(choice, names)))
            except _Unreadable as error:
                refused.append(Refused(error.reason, error.detail, number, entry))
    return votes, refused


def _entries(path: Path) -> list[Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path} does not exist. Name the exported JSON file.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be read as JSON: {error}. Export it again, as JSON."
        ) from None
    if not isinstance(content, list):
        raise DataError(
            f"{path} holds one {type(content).__name__}, a list of tasks or records is needed. "
            "Export it again, as JSON."
        )
    return content


# ---------------------------------------------------------------- formats


def _label_studio(entry: Any) -> tuple[Mapping[str, Any], list[Judgement]]:
    if (
        not isinstance(entry, dict)
        or not isinstance(entry.get("data"), dict)
        or not isinstance(entry.get("annotations"), list)
    ):
        raise _Unreadable(
            "not_a_task", "no `data` and `annotations`; export as JSON, not as JSON-MIN or CSV"
        )
    return entry["data"], [_annotation(item) for item in entry["annotations"]]


def _annotation(item: Any) -> Judgement:
    if not isinstance(item, dict):
        return None, item
    by = item.get("completed_by")
    annotator = (by.get("email") or by.get("id")) if isinstance(by, dict) else by
    if item.get("was_cancelled"):  # Label Studio's Skip
        return annotator, None
    results = item.get("result")
    for result in results if isinstance(results, list) else []:
        value = result.get("value") if isinstance(result, dict) else None
        if isinstance(value, dict) and result.get("type") == "pairwise":
            return annotator, value.get("selected", "")
        if isinstance(value, dict) and result.get("type") == "choices":
            return annotator, value.get("choices", "")
    return annotator, ""


def _argilla(entry: Any) -> tuple[Mapping[str, Any], list[Judgement]]:
    if not isinstance(entry, dict):
        raise _Unreadable("not_a_record", f"a {type(entry).__name__} where a record is expected")
    if isinstance(entry.get("fields"), dict) and isinstance(entry.get("responses"), dict):
        answers = [
            item for of_question in entry["responses"].values() for item in of_question or []
        ]
        return entry["fields"], [
            (item.get("user_id"), item.get("value")) if isinstance(item, dict) else (None, item)
            for item in answers
        ]
    questions = [name.removesuffix(".responses") for name in entry if name.endswith(".responses")]
    if not questions:
        raise _Unreadable(
            "not_a_record", "neither `fields` and `responses` nor a column `NAME.responses`"
        )
    return entry, [judgement for name in questions for judgement in _flat(entry, name)]


def _flat(entry: Mapping[str, Any], question: str) -> Iterator[Judgement]:
    """Drafts are not answers yet; a discarded pair counts as skipped."""
    values, users, states = (
        entry.get(f"{question}.responses{part}") or [] for part in ("", ".users", ".status")
    )
    for i, value in enumerate(values):
        state = states[i] if i < len(states) else None
        if state != "draft":
            yield users[i] if i < len(users) else None, None if state == "discarded" else value


FORMATS: dict[str, Callable[[Any], tuple[Mapping[str, Any], list[Judgement]]]] = {
    "label-studio": _label_studio,
    "argilla": _argilla,
}


# ---------------------------------------------------------------- values


def _name(ours: str, texts: Mapping[str, Any], columns: Mapping[str, str]) -> str:
    candidates = (columns[ours],) if ours in columns else COLUMNS[ours]
    found = next((name for name in candidates if name in texts), None)
    if found is None:
        there = ", ".join(str(name) for name in texts) or "none"
        raise _Unreadable(
            "missing_column",
            f"no {' or '.join(candidates)} for {ours}; there: {there}. Name it with --column "
            f"{ours}=NAME",
        )
    return found


def _pair(texts: Mapping[str, Any], names: Mapping[str, str]) -> Pair:
    prompt = texts[names["prompt"]]
    if not is_prompt(prompt):
        raise _Unreadable(
            "no_text",
            f"{names['prompt']}={str(prompt)[:60]!r} is neither text nor messages with role and "
            "content",
        )
    first, second = (_text(texts, names[ours]) for ours in ("response1", "response2"))
    if first == second:
        raise _Unreadable("identical_replies", "both responses are the same text")
    return Pair(prompt.strip() if isinstance(prompt, str) else prompt, first, second)


def _text(texts: Mapping[str, Any], name: str) -> str:
    text = texts[name]
    if not isinstance(text, str) or not text.strip():
        raise _Unreadable("no_text", f"{name}={str(text)[:60]!r} is not text")
    return text.strip()


def _annotator(value: Any, form: str) -> str:
    if value is None or value == "":
        raise _Unreadable("no_annotator", "the entry does not say whose vote it is")
    try:
        return annotator_name(
            value if isinstance(value, str) and "@" in value else f"{form} {value}"
        )
    except DataError as error:
        raise _Unreadable("annotator_name", str(error)) from None


def _vote(choice: Any, names: Mapping[str, str]) -> int | None:
    """1, 2, 0 for a tie, None for skipped; of a ranking the first place counts."""
    if choice is None:
        return None
    if isinstance(choice, list):
        return _of_list(choice, names)
    text = "" if isinstance(choice, bool) else str(choice).strip().casefold()
    for vote, words in (
        (1, (*FIRST, "response1", names["response1"])),
        (2, (*SECOND, "response2", names["response2"])),
        (0, TIE),
    ):
        if text in (word.casefold() for word in words):
            return vote
    raise _Unreadable(
        "no_choice" if not text else "not_a_vote",
        f"{str(choice)[:60]!r} is not one of left, right, 1, 2, tie or a response's name",
    )


def _of_list(choice: Sequence[Any], names: Mapping[str, str]) -> int | None:
    if len(choice) == 1 and not isinstance(choice[0], (dict, list)):
        return _vote(choice[0] if choice[0] is not None else "", names)
    ranks: dict[int | None, Any] = {}
    for place, item in enumerate(choice, start=1):
        value, rank = (
            (item.get("value"), item.get("rank")) if isinstance(item, dict) else (item, place)
        )
        ranks[_vote(str(value), names)] = rank
    first, second = ranks.get(1), ranks.get(2)
    if len(ranks) != 2 or not isinstance(first, int) or not isinstance(second, int):
        raise _Unreadable("not_a_vote", f"{str(choice)[:60]!r} does not rank the two responses")
    return 0 if first == second else 1 if first < second else 2
