"""Votes from the JSON exports of Label Studio and Argilla. An unreadable entry becomes a Refused with its reason,
never an exception.

label-studio   a list of tasks: data (the texts), annotations[] with completed_by, was_cancelled and
               result[]; a result answers the control from_name, of type pairwise by value.selected (left, right), of
               type choices by value.choices (a list of texts)
argilla        a list of records: fields (the texts), responses {question: [{value, user_id}]};
               flattened, the texts stand in the record and a question has the lists NAME.responses,
               NAME.responses.users, NAME.responses.status

Of several questions the one that compares the responses is the vote; ratings and comments are none.

Sources: docs of Label Studio, "Task format" and the tags Pairwise and Choices; Argilla 2, records' to_list, to_dict
and to_json.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from config.errors import DataError, ParamsError
from config.terminal_text import shown
from labelling.votes import Pair, Vote, annotator_name, is_prompt

COLUMNS: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt", "question", "instruction", "dialog"),
    "response1": ("response1", "text1", "answer1", "response-1", "response_a"),
    "response2": ("response2", "text2", "answer2", "response-2", "response_b"),
}
"""Our column -> names to look for, the first match counts; `--column ours=theirs` names another."""

Names = Mapping[str, str]
"""Our columns -> those of an entry."""

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


class Answer(NamedTuple):
    """One person's answer to one question."""

    annotator: Any
    question: str | None
    """None for one who skipped the pair."""
    value: Any
    compares: bool = False
    """Whether the export says that the question compares the two responses."""


def read_export(
    path: Path, form: str, columns: Mapping[str, str], question: str | None = None
) -> tuple[list[Vote], list[Refused]]:
    """The votes of an export and what was refused, in the order of the file. `columns` maps our names to the file's;
    `question` is the one that asks for the preference, if there are several.

    Raises DataError if the file is missing, no JSON list, or has no such question; ParamsError for an unknown format
    or column, or if several questions could be it.
    """
    if form not in FORMATS:
        raise ParamsError(f"--format {form} is not known: it is {' or '.join(FORMATS)}.")
    unknown = next((name for name in columns if name not in COLUMNS), None)
    if unknown is not None:
        raise ParamsError(f"--column {unknown}=...: {unknown} is not one of {', '.join(COLUMNS)}. Write ours=theirs.")
    votes: list[Vote] = []
    refused: list[Refused] = []
    read: list[tuple[int, Any, Pair, dict[str, str], list[Answer]]] = []
    for number, entry in enumerate(_entries(path), start=1):
        try:
            texts, answers = FORMATS[form](entry)
            names = {ours: _name(ours, texts, columns) for ours in COLUMNS}
            read.append((number, entry, _pair(texts, names), names, answers))
        except _Unreadable as error:
            refused.append(Refused(error.reason, error.detail, number, entry))
    preference = _preference([(names, answers) for *_, names, answers in read], question, path)
    for number, entry, pair, names, answers in read:
        for annotator, choice in _choices(answers, preference, form == "label-studio"):
            try:
                votes.append(Vote(pair, _annotator(annotator, form), _vote(choice, names)))
            except _Unreadable as error:
                refused.append(Refused(error.reason, error.detail, number, entry))
    return votes, sorted(refused, key=lambda refusal: refusal.number)


def _preference(read: Sequence[tuple[Names, Sequence[Answer]]], question: str | None, path: Path) -> str | None:
    """The question that asks which response is better: the one named, the only one that compares them by its type, or
    the only one whose answers are all votes.
    """
    answers_by_question: dict[str, list[tuple[Names, Answer]]] = {}
    for names, answers in read:
        for answer in answers:
            if answer.question is not None:
                answers_by_question.setdefault(answer.question, []).append((names, answer))
    if question is not None:
        if question not in answers_by_question:
            raise ParamsError(
                f"--question {question}: {path} has no such question, but {', '.join(answers_by_question)}."
            )
        return question
    compare = [name for name, answers in answers_by_question.items() if any(answer.compares for _, answer in answers)]
    vote = [
        name
        for name, answers in answers_by_question.items()
        if any(_is_vote(answer.value, names) for names, answer in answers)
    ]
    candidates = compare or vote
    if len(candidates) > 1:
        raise ParamsError(
            f"{path} asks for a preference in {' and in '.join(candidates)}: name the one to take with --question."
        )
    if answers_by_question and not candidates:
        raise DataError(
            f"{path}: no answer to {', '.join(answers_by_question)} says which response is better (left, right, "
            "1, 2, tie, or a response's name). Name the question with --question."
        )
    return candidates[0] if candidates else None


def _is_vote(value: Any, names: Names) -> bool:
    """Whether an answer is a text or a ranking that says who is better; a number is a rating."""
    if value is None or isinstance(value, int | float):
        return False
    try:
        return _vote(value, names) is not None
    except _Unreadable:
        return False


def _choices(answers: Sequence[Answer], question: str | None, one_sheet: bool) -> Iterator[tuple[Any, Any]]:
    """The annotator and the answer to the question. On `one_sheet` with all questions it is empty for those who left
    it out; elsewhere they said nothing.
    """
    for annotator in dict.fromkeys(repr(answer.annotator) for answer in answers):
        by_annotator = [answer for answer in answers if repr(answer.annotator) == annotator]
        answered = [answer for answer in by_annotator if answer.question in (question, None)]
        if not answered and one_sheet:
            answered = [by_annotator[0]._replace(value="")]
        yield from ((answer.annotator, answer.value) for answer in answered)


def _entries(path: Path) -> list[Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path} does not exist. Name the exported JSON file.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}. Export it again, as JSON.") from None
    if not isinstance(content, list):
        raise DataError(
            f"{path} holds one {type(content).__name__}, a list of tasks or records is needed. "
            "Export it again, as JSON."
        )
    return content


# ---------------------------------------------------------------- formats


def _label_studio(entry: Any) -> tuple[Mapping[str, Any], list[Answer]]:
    if (
        not isinstance(entry, dict)
        or not isinstance(entry.get("data"), dict)
        or not isinstance(entry.get("annotations"), list)
    ):
        raise _Unreadable("not_a_task", "no `data` and `annotations`; export as JSON, not as JSON-MIN or CSV")
    return entry["data"], [answer for item in entry["annotations"] for answer in _annotation_answers(item)]


def _annotation_answers(item: Any) -> list[Answer]:
    if not isinstance(item, dict):
        return [Answer(None, None, item)]
    by = item.get("completed_by")
    annotator = (by.get("email") or by.get("id")) if isinstance(by, dict) else by
    if item.get("was_cancelled"):  # Label Studio's Skip
        return [Answer(annotator, None, None)]
    results = item.get("result")
    answers = []
    for result in results if isinstance(results, list) else []:
        kind = result.get("type") if isinstance(result, dict) else None
        value = result.get("value") if isinstance(result, dict) else None
        if isinstance(value, dict) and kind in CONTROLS:
            said = value.get(CONTROLS[kind], "")
            name = str(result.get("from_name", kind))
            answers.append(Answer(annotator, name, said, kind in ("pairwise", "ranker")))
    return answers or [Answer(annotator, None, "")]


CONTROLS = {
    "pairwise": "selected", "ranker": "ranker", "choices": "choices", "rating": "rating",
    "textarea": "text", "number": "number",
}  # fmt: skip
"""Label Studio's controls -> the field of their value."""


def _argilla(entry: Any) -> tuple[Mapping[str, Any], list[Answer]]:
    if not isinstance(entry, dict):
        raise _Unreadable("not_a_record", f"a {type(entry).__name__} where a record is expected")
    if isinstance(entry.get("fields"), dict) and isinstance(entry.get("responses"), dict):
        return entry["fields"], [
            Answer(item.get("user_id"), name, item.get("value"), _is_ranking(item.get("value")))
            if isinstance(item, dict)
            else Answer(None, name, item)
            for name, items in entry["responses"].items()
            for item in items or []
        ]
    questions = [name.removesuffix(".responses") for name in entry if name.endswith(".responses")]
    if not questions:
        raise _Unreadable("not_a_record", "neither `fields` and `responses` nor a column `NAME.responses`")
    return entry, [answer for name in questions for answer in _flat(entry, name)]


def _is_ranking(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1


def _flat(entry: Mapping[str, Any], question: str) -> Iterator[Answer]:
    """Drafts are not answers yet; a discarded pair counts as skipped."""
    values, users, states = (entry.get(f"{question}.responses{part}") or [] for part in ("", ".users", ".status"))
    for i, value in enumerate(values):
        state, user = (listed[i] if i < len(listed) else None for listed in (states, users))
        if state == "discarded":
            yield Answer(user, question, None)
        elif state != "draft":
            yield Answer(user, question, value, _is_ranking(value))


FORMATS: dict[str, Callable[[Any], tuple[Mapping[str, Any], list[Answer]]]] = {
    "label-studio": _label_studio,
    "argilla": _argilla,
}


# ---------------------------------------------------------------- values


def _name(ours: str, texts: Mapping[str, Any], columns: Mapping[str, str]) -> str:
    candidates = (columns[ours],) if ours in columns else COLUMNS[ours]
    match = next((name for name in candidates if name in texts), None)
    if match is None:
        named = ", ".join(str(name) for name in texts) or "none"
        raise _Unreadable(
            "missing_column",
            f"no {' or '.join(candidates)} for {ours}; there: {named}. Name it with --column {ours}=NAME",
        )
    return match


def _pair(texts: Mapping[str, Any], names: Names) -> Pair:
    prompt = texts[names["prompt"]]
    if not is_prompt(prompt):
        raise _Unreadable(
            "no_text", f"{names['prompt']}={shown(prompt)} is neither text nor messages with role and content"
        )
    first, second = (_text(texts, names[ours]) for ours in ("response1", "response2"))
    if first == second:
        raise _Unreadable("identical_replies", "both responses are the same text")
    return Pair(prompt.strip() if isinstance(prompt, str) else prompt, first, second)


def _text(texts: Mapping[str, Any], name: str) -> str:
    text = texts[name]
    if not isinstance(text, str) or not text.strip():
        raise _Unreadable("no_text", f"{name}={shown(text)} is not text")
    return text.strip("\n").rstrip()


def _annotator(value: Any, form: str) -> str:
    if value is None or value == "":
        raise _Unreadable("no_annotator", "the entry does not say whose vote it is")
    try:
        return annotator_name(value if isinstance(value, str) and "@" in value else f"{form} {value}")
    except DataError as error:
        raise _Unreadable("annotator_name", str(error)) from None


def _vote(choice: Any, names: Names) -> int | None:
    """1, 2, 0 for a tie, None for skipped; of a ranking the first place counts."""
    if choice is None:
        return None
    if isinstance(choice, list):
        return _ranked_choice(choice, names)
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
        f"{shown(choice)} is not one of left, right, 1, 2, tie or a response's name",
    )


def _ranked_choice(choice: Sequence[Any], names: Names) -> int | None:
    if len(choice) == 1 and not isinstance(choice[0], (dict, list)):
        return _vote(choice[0] if choice[0] is not None else "", names)
    ranks: dict[int | None, Any] = {}
    for place, item in enumerate(choice, start=1):
        value, rank = (item.get("value"), item.get("rank")) if isinstance(item, dict) else (item, place)
        ranks[_vote(str(value), names)] = rank
    first, second = ranks.get(1), ranks.get(2)
    if len(ranks) != 2 or not isinstance(first, int) or not isinstance(second, int):
        raise _Unreadable("not_a_vote", f"{shown(choice)} does not rank the two responses")
    return 0 if first == second else 1 if first < second else 2
