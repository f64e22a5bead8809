"""The layouts of published data, as records: how each is recognised, and the function that turns its rows into ours
(training/preparation/formats.py).

What fits no record is read by a function of one's own: `kind: python` in data.source.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from config.terminal_text import shown
from training.modeling.tokenizer import Message
from training.preparation.cleaning import Refused, type_name
from training.preparation.conversations import is_conversation, last_reply, parsed, same_turns, transcript, turns
from training.preparation.formats import Row
from training.preparation.sources import SourceRow, Table
from training.preparation.thumbs import is_good
from training.preparation.votes import annotator_columns, in_own_layout, votes_by_pair
from training.preparation.winners import convention_of, winner

Columns = Mapping[str, str]
"""Our columns -> the source's."""
Read = tuple[SourceRow, "Row | Refused"]
"""A row of the source with one of ours, or why it gives none."""
Reader = Callable[[Table, Columns, "str | None"], Iterator[Read]]
"""Table, columns, and the convention of its winners if the user names it."""
Test = Callable[[Any], bool]

MESSAGES = ("messages", "conversations", "conversation")
REPLIES = ("responses", "completions", "replies", "answers", "outputs", "generations")
ORDERS = ("ranks", "ranking", "rank", "scores", "score", "ratings", "rating", "overall_score", "fine-grained_score")
"""Columns, or fields of a reply, that order replies: ranks from lowest, others from highest."""
TEXTS = ("text", "content", "response", "answer", "completion", "output")
"""Fields of a reply with its text."""


class Layout(NamedTuple):
    """A published layout: a format with names for its columns."""

    name: str
    card: str
    """Where it is described."""
    about: str
    form: str
    needs: Mapping[str, Test]
    """Columns that every table of this layout has -> whether a value is of it."""
    columns: Columns
    vote: str | None = None


# ---------------------------------------------------------------- readers


def by_row(change: Callable[[Row, Columns], Iterable[Row]]) -> Reader:
    """A reader that takes every row by itself."""

    def read(table: Table, columns: Columns, vote: str | None = None) -> Iterator[Read]:
        for row in table.rows:
            try:
                yield from ((row, changed) for changed in change(_object(row.content), columns))
            except Refused as refused:
                yield row, refused

    return read


def _object(content: Any) -> Row:
    if not isinstance(content, dict):
        raise Refused("wrong_type", "", f"{type_name(content)} where an object with columns is expected")
    if None in content:
        raise Refused("field_count", "", content[None])
    return content


def cell(row: Row, name: str) -> Any:
    """Raises Refused if the row has no such column."""
    if name not in row:
        raise Refused("missing_column", name, "this row has no such column")
    return row[name]


def prompt_of(row: Row, columns: Columns) -> Any:
    """The prompt, with the system turn, earlier turns and input of columns that are named."""
    value = cell(row, columns["prompt"])
    if is_conversation(value):
        return [*_before(row, columns), *turns(value, columns["prompt"])]
    more = row.get(columns.get("input", ""))
    if isinstance(value, str) and isinstance(more, str) and more.strip():
        value = f"{value.rstrip()}\n\n{more}"
    before = _before(row, columns)
    return [*before, {"role": "user", "content": value}] if before else value


def _before(row: Row, columns: Columns) -> list[Message]:
    system = row.get(columns.get("system", ""))
    messages = [] if system is None or system == "" else [{"role": "system", "content": system}]
    name = columns.get("history", "")
    for turn in parsed(row.get(name), name) or []:
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise Refused("wrong_type", name, "a turn that is not a question with its answer")
        roles = ("user", "assistant")
        messages += [{"role": r, "content": text} for r, text in zip(roles, turn, strict=True)]
    return messages


def _pair(row: Row, columns: Columns) -> Iterator[Row]:
    names = (columns["chosen"], columns["rejected"])
    prompt = prompt_of(row, columns) if columns["prompt"] in row else None
    chosen, rejected = (cell(row, name) for name in names)
    if names[0] == names[1]:  # both in a list, the better one first
        if not isinstance(chosen, list) or len(chosen) != 2:
            raise Refused("wrong_type", names[0], "not a list of two replies")
        chosen, rejected = chosen
    yield from pair(prompt, chosen, rejected, names)


def pair(prompt: Any, chosen: Any, rejected: Any, names: Sequence[str] = ("chosen", "rejected")) -> Iterator[Row]:
    """A row for a pair, or for each of several rejected texts. Both sides are texts or end with the reply; without
    `prompt` one of them repeats it, as messages, or both as transcripts.
    """
    if isinstance(rejected, list) and rejected and all(isinstance(r, str) for r in rejected):
        for text in rejected:
            yield from pair(prompt, chosen, text, names)
        return
    alone = prompt is None and not (is_conversation(chosen) or is_conversation(rejected))
    before, good = _side(chosen, names[0], alone)
    other, bad = _side(rejected, names[1], alone)
    if before and other and not same_turns(before, other):
        parts = sum(same_turns([a], [b]) for a, b in zip(before, other, strict=False))
        raise Refused(
            "conversations_part", names[1], f"the two conversations part at turn {parts + 1}, before the last reply"
        )
    yield {"prompt": _shared(prompt, before or other, names[0]), "chosen": good, "rejected": bad}


def _side(value: Any, column: str, holds_prompt: bool) -> tuple[list[Message], Any]:
    """The conversation before a reply, and its text."""
    if is_conversation(value):
        return last_reply(turns(value, column), column)
    if holds_prompt and isinstance(value, str):
        return last_reply(transcript(value, column), column)
    return [], value


def _shared(prompt: Any, before: list[Message], column: str) -> Any:
    """The prompt, or the conversation that the replies repeat, which holds it."""
    if not before:
        if prompt is None:
            raise Refused("no_prompt", column, "there is nothing before the reply")
        return prompt
    question = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or before
    if same_turns(question, before):
        return before if prompt is None else prompt
    if any(same_turns(question, before[i : i + len(question)]) for i in range(len(before))):
        return before
    raise Refused("other_prompt", column, "the conversation before the reply is not the prompt")


def _demonstration(row: Row, columns: Columns) -> Iterator[Row]:
    name = next((name for name in MESSAGES if name in row), None)
    if columns["prompt"] not in row and name is not None:
        before, last = last_reply(turns(row[name], name), name)
        if not before:
            raise Refused("no_prompt", name, "there is nothing before the reply")
        yield {"prompt": before, "completion": last}
        return
    prompt, name = prompt_of(row, columns), columns["completion"]
    before, last = _side(cell(row, name), name, False)
    yield {"prompt": _shared(prompt, before, name), "completion": last}


def _rating(row: Row, columns: Columns) -> Iterator[Row]:
    good = is_good(cell(row, columns["label"]), columns["label"])
    yield from ({**demonstration, "good": good} for demonstration in _demonstration(row, columns))


def _prompts(table: Table, columns: Columns, vote: str | None = None) -> Iterator[Read]:
    """A row may be a bare text."""
    for row in table.rows:
        bare = {columns["prompt"]: row.content} if isinstance(row.content, str) else row.content
        try:
            yield row, {"prompt": prompt_of(_object(bare), columns)}
        except Refused as refused:
            yield row, refused


def _votes(table: Table, columns: Columns, vote: str | None = None) -> Iterator[Read]:
    is_own_layout = in_own_layout(table, columns)
    table, columns = votes_by_pair(table, columns)
    names, voters = (columns["response1"], columns["response2"]), annotator_columns(columns)

    def said(row: Row, name: str) -> tuple[Any, ...]:
        value = cell(row, name)
        return value if isinstance(value, tuple) else (value,)

    def replies(row: Row) -> list[Any]:
        return [cell(row, name) for name in names]

    all_votes = (
        (value, replies(row.content))
        for row in table.rows
        if isinstance(row.content, dict) and {*names, *voters} <= row.content.keys()
        for name in voters
        for value in said(row.content, name)
    )
    convention = vote or (
        "index1" if is_own_layout else convention_of(all_votes, names, table.place, ", ".join(voters))
    )

    def change(row: Row, columns: Columns) -> Iterator[Row]:
        texts, won = replies(row), []
        for name in voters:
            try:
                won += [winner(value, convention, names, texts) for value in said(row, name)]
            except Refused as refused:
                raise Refused(refused.reason, name, refused.detail) from None
        prompt = prompt_of(row, columns) if columns["prompt"] in row else None
        yield _voted(prompt, texts, won, names)

    return by_row(change)(table, columns, vote)


def _voted(prompt: Any, texts: Sequence[Any], votes: list[int], names: Sequence[str]) -> Row:
    """A row of votes on two replies, which may be whole conversations."""
    first, second = texts
    row = next(pair(prompt, first, second, names))
    return {"prompt": row["prompt"], "response1": row["chosen"], "response2": row["rejected"], "votes": votes}


def _trees(row: Row, columns: Columns) -> Iterator[Row]:
    root = row.get(columns["prompt"])
    if root is None:
        raise Refused("missing_column", "", f"no column {shown(columns['prompt'])} with the tree's first message")
    yield {"prompt": root}


def _ranked(row: Row, columns: Columns) -> Iterator[Row]:
    name = next((name for name in REPLIES if name in row), None)
    if name is None:
        raise Refused("missing_column", REPLIES[0], "this row has no such column")
    yield ranked(prompt_of(row, columns), row, name)


def ranked(prompt: Any, row: Row, name: str, orders: Sequence[str] = ORDERS) -> Row:
    """A row with the replies of column `name` and their ranks, 0 the best. Raises Refused."""
    replies = parsed(row[name], name)
    if not isinstance(replies, list) or not replies:
        raise Refused("wrong_type", name, f"{type_name(replies)} where replies are expected")
    for order in orders:
        values = parsed(row.get(order), order)
        if not isinstance(values, list):
            values = [reply.get(order) if isinstance(reply, dict) else None for reply in replies]
        if any(value is not None for value in values):
            break
    else:
        raise Refused("no_order", name, f"nothing orders them: none of {', '.join(orders)}")
    if len(values) != len(replies):
        raise Refused("no_order", order, f"{len(values)} for {len(replies)} replies")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise Refused("not_a_number", order, f"{shown(value)} orders no replies")
    sign = 1 if order.startswith("rank") else -1
    places = sorted({sign * value for value in values})
    texts = [
        next((reply[field] for field in TEXTS if field in reply), None) if isinstance(reply, dict) else reply
        for reply in replies
    ]
    return {"prompt": prompt, "replies": texts, "ranks": [places.index(sign * v) for v in values]}


def _arena_table(row: Row, columns: Columns) -> Iterator[Row]:
    """Lists of turns spelt as text, and a column of 0 and 1 for each result."""
    questions, *reply_columns = (parsed(cell(row, name), name) for name in ("prompt", "response_a", "response_b"))
    results = [str(row.get(f"winner_{name}")) in ("1", "1.0", "True", "true")
               for name in ("tie", "model_a", "model_b")]  # fmt: skip
    if sum(results) != 1:
        raise Refused("not_a_vote", "winner_model_a", f"{sum(results)} of the three results hold")
    talks = [
        [
            {"role": role, "content": text}
            for turn in zip(questions, replies, strict=False)
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        if isinstance(questions, list) and isinstance(replies, list)
        else [{"role": "user", "content": questions}, {"role": "assistant", "content": replies}]
        for replies in reply_columns
    ]
    yield _voted(None, talks, [results.index(True)], ("response_a", "response_b"))


def _nectar(row: Row, columns: Columns) -> Iterator[Row]:
    conversation = transcript(str(row["prompt"]), "prompt")
    if not conversation[-1]["content"].strip():
        conversation = conversation[:-1]
    yield ranked(conversation, row, "answers", ("rank",))


def _rated(table: Table, columns: Columns, vote: str | None = None) -> Iterator[Read]:
    """Replies to one prompt may be in any rows."""
    groups: dict[str, list[SourceRow]] = {}
    for row in table.rows:
        prompt_value = row.content.get(columns["prompt"]) if isinstance(row.content, dict) else row.number
        groups.setdefault(repr(prompt_value), []).append(row)
    for rows in groups.values():
        try:
            contents = [_object(row.content) for row in rows]
            scores = [cell(row, columns["score"]) for row in contents]
            sides = [_side(cell(row, columns["completion"]), columns["completion"], False) for row in contents]
            prompt = _shared(prompt_of(contents[0], columns), sides[0][0], columns["completion"])
            texts = [text for _, text in sides]
            if all(isinstance(score, bool) for score in scores) and len(set(scores)) == 1:
                demonstrations: list[Row] = [{"prompt": prompt, "completion": text} for text in texts]
                yield from ((rows[0], row) for row in (demonstrations if scores[0] else [{"prompt": prompt}]))
            elif len(texts) == 1:
                yield rows[0], {"prompt": prompt}
            else:
                group = {"replies": texts, "scores": [+score for score in scores]}
                yield rows[0], ranked(prompt, group, "replies")
        except Refused as refused:
            yield rows[0], refused


def _flat_trees(table: Table, columns: Columns, vote: str | None = None) -> Iterator[Read]:
    rows = [row for row in table.rows if isinstance(row.content, dict)]
    nodes = {row.content.get("message_id"): {**row.content, "replies": []} for row in rows}
    for node in nodes.values():
        if (parent := nodes.get(node.get("parent_id"))) is not None:
            parent["replies"].append(node)
    for row in table.rows:
        try:
            node = nodes[cell(_object(row.content), "message_id")]
        except Refused as refused:
            yield row, refused
            continue
        parent_id = node.get("parent_id")
        if parent_id is None:
            yield row, {"prompt": node}
        elif parent_id not in nodes:
            yield row, Refused("no_parent", "parent_id", f"{shown(parent_id)} is not in this file")


def _canonical(row: Row, columns: Columns) -> Iterator[Row]:
    """A row that a reader of one's own gives, in the format whose columns it has."""
    fields, same_names = row.keys() - {"prompt"}, {name: name for name in row}
    if "prompt" in row and fields == {"response1", "response2", "votes"}:
        names = ("response1", "response2")
        votes = [winner(value, "index1", names, ()) for value in row["votes"]]
        yield _voted(prompt_of(row, same_names), [row[name] for name in names], votes, names)
    elif "prompt" in row and fields == {"replies", "ranks"}:
        yield ranked(prompt_of(row, same_names), row, "replies", ("ranks",))
    elif fields == {"chosen", "rejected"}:
        yield from _pair(row, {**same_names, "prompt": "prompt"})
    elif "prompt" in row and fields == {"completion"}:
        yield from _demonstration(row, same_names)
    elif "prompt" in row and fields == {"completion", "label"}:
        yield from _rating(row, same_names)
    elif "prompt" in row and not fields:
        yield {"prompt": prompt_of(row, same_names)}
    else:
        raise Refused(
            "other_columns",
            "",
            f"{', '.join(sorted(map(str, row))) or 'none'} are not the columns of a row: prompt "
            "with chosen and rejected, with replies and ranks, with response1, response2 and "
            "votes, with completion, with completion and label, or alone",
        )


# ---------------------------------------------------------------- the records

PYTHON = "python"
FORMATS: Mapping[str, tuple[str, Reader]] = {
    "pairs": ("pairs", by_row(_pair)),
    "votes": ("votes", _votes),
    "ranked": ("ranked", by_row(_ranked)),
    "rated": ("ranked", _rated),
    "ratings": ("ratings", by_row(_rating)),
    "trees": ("trees", by_row(_trees)),
    "instructions": ("instructions", by_row(_demonstration)),
    "prompts": ("prompts", _prompts),
    "nectar": ("ranked", by_row(_nectar)),
    "arena-table": ("votes", by_row(_arena_table)),
    "oasst-messages": ("trees", _flat_trees),
    PYTHON: ("any", by_row(_canonical)),
}
"""Values of `format` -> what their rows are once read (training/preparation/formats.py), and the reader."""


def text(value: Any) -> bool:
    return isinstance(value, str)


def messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def anything(value: Any) -> bool:
    return True


def one_of(*values: Any) -> Test:
    return lambda value: value in values


def two_texts(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(text, value))


def objects_with(*fields: str) -> Test:
    """A list of objects with these fields."""
    return lambda value: messages(value) and set(fields) <= value[0].keys()


HUB = "https://huggingface.co/datasets/"
SWIFT = "https://swift.readthedocs.io/en/latest/Customization/Custom-dataset.html"

UNPAIRED = "TRL, unpaired"
LAYOUTS = (
    Layout(
        "PKU-SafeRLHF", f"{HUB}PKU-Alignment/PKU-SafeRLHF",
        "`better_response_id` is the number of the reply, 0 or 1", "votes",
        {"response_0": text, "response_1": text, "better_response_id": one_of(0, 1)},
        {"response1": "response_0", "response2": "response_1", "annotators": "better_response_id"},
        "index0",
    ),
    Layout(
        "SHP", f"{HUB}stanfordnlp/SHP", "`labels` is 1 where `human_ref_A` is preferred", "votes",
        {"history": text, "human_ref_A": text, "human_ref_B": text, "labels": one_of(0, 1)},
        {"prompt": "history", "response1": "human_ref_B", "response2": "human_ref_A",
         "annotators": "labels"}, "index0",
    ),
    Layout(
        "Chatbot Arena", f"{HUB}lmsys/chatbot_arena_conversations",
        "two conversations and a winner; those that part before the last reply are refused",
        "votes", {"conversation_a": messages, "conversation_b": messages, "winner": text},
        {"response1": "conversation_a", "response2": "conversation_b", "annotators": "winner"},
    ),
    Layout(
        "Chatbot Arena, as a table", f"{HUB}lmsys/lmsys-arena-human-preference-55k",
        "lists of turns in cells, and a column for each result", "arena-table",
        {"prompt": text, "response_a": text, "winner_model_a": anything, "winner_tie": anything},
        {},
    ),
    Layout(
        "HelpSteer3", f"{HUB}nvidia/HelpSteer3", "a preference below 0 is for the first reply",
        "votes", {"context": messages, "response1": text, "overall_preference": number},
        {"prompt": "context", "annotators": "overall_preference"}, "negative-first",
    ),
    Layout(
        "HelpSteer2, preferences", f"{HUB}nvidia/HelpSteer2",
        "a strength below 0 is for the first reply", "votes",
        {"response_1": text, "response_2": text, "preference_strength": number},
        {"response1": "response_1", "response2": "response_2",
         "annotators": "preference_strength"}, "negative-first",
    ),
    Layout(
        "HelpSteer2", f"{HUB}nvidia/HelpSteer2",
        "the replies to one prompt, ranked by `helpfulness`", "rated",
        {"prompt": text, "response": text, "helpfulness": number, "verbosity": number},
        {"completion": "response", "score": "helpfulness"},
    ),
    Layout(
        "UltraFeedback", f"{HUB}openbmb/UltraFeedback", "replies ranked by `overall_score`",
        "ranked", {"instruction": text, "completions": objects_with("response", "overall_score")},
        {"prompt": "instruction"},
    ),
    Layout(
        "Nectar", f"{HUB}berkeley-nest/Nectar",
        "replies with ranks from 1, and a prompt of Human: and Assistant: turns", "nectar",
        {"prompt": text, "answers": objects_with("answer", "rank")}, {},
    ),
    Layout(
        "ms-swift", SWIFT, "`messages` end with the reply that `rejected_response` is worse than",
        "pairs", {"messages": messages, "rejected_response": anything},
        {"chosen": "messages", "rejected": "rejected_response"},
    ),
    Layout(
        "ms-swift, two conversations", SWIFT, "`messages` and `rejected_messages`", "pairs",
        {"messages": messages, "rejected_messages": messages},
        {"chosen": "messages", "rejected": "rejected_messages"},
    ),
    Layout(
        "LLaMA-Factory's ranking", "https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md",
        "`output` is the better reply and the worse one", "pairs",
        {"instruction": text, "output": two_texts},
        {"prompt": "instruction", "chosen": "output", "rejected": "output", "input": "input",
         "system": "system", "history": "history"},
    ),
    Layout(
        UNPAIRED, "https://huggingface.co/docs/trl/dataset_formats",
        "replies that are desirable or not: every two of one prompt are a pair; where each prompt has one, ratings",
        "rated",
        {"completion": anything, "label": one_of(True, False)}, {"score": "label"},
    ),
    Layout(
        "OpenAssistant, a message a row", f"{HUB}OpenAssistant/oasst1",
        "`parent_id` says what a message answers", "oasst-messages",
        {"message_id": text, "parent_id": anything, "text": text, "role": text}, {},
    ),
)  # fmt: skip

LOOKED_AT = 1000
"""Rows that a layout is recognised by."""


def published(rows: Iterable[Any]) -> Layout | None:
    """The published layout that most of these rows are in."""
    mappings = [row for row in rows if isinstance(row, dict)]

    def fits(layout: Layout, row: Row) -> bool:
        return layout.needs.keys() <= row.keys() and all(test(row[column]) for column, test in layout.needs.items())

    return next((layout for layout in LAYOUTS if 2 * sum(fits(layout, row) for row in mappings) > len(mappings)), None)
