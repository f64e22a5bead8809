"""Conversation trees with ranked sibling replies -> examples. Walked with a stack, so a tree may be of any depth.

Every user message is a prompt, together with the conversation before it; its ranked replies give one pair for every
two of unequal rank, and its best reply a demonstration. Rank 0 is best. A refused message removes those below it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from config.terminal_text import shown
from training.modeling.tokenizer import Message
from training.preparation.cleaning import Origin, Refusal, Refused, TextRules
from training.preparation.formats import Example, message, pairs_of
from training.preparation.sources import SourceRow, Table

LONGEST_NAMED_WAY = 20
"""Deeper messages are named by depth: their path would be longer than they are."""


@dataclass(eq=False)
class _Node:
    item: Any
    parent: "_Node | None"
    index: int
    """Index among its siblings."""
    depth: int
    message: Message | None = None
    """None once refused."""
    chars: int = 0
    """Characters of the conversation up to and including this message."""
    rank: int | None = None
    replies: "list[_Node]" = field(default_factory=list)
    """Accepted assistant replies to this user message."""


@dataclass
class _Walk:
    """One tree being read."""

    table: Table
    row: SourceRow
    root: Any
    columns: Mapping[str, str]
    rules: TextRules
    messages: int = 0
    users: list[_Node] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    unranked: int = 0

    def read(self) -> None:
        stack = [_Node(self.root, None, 0, 0)]
        while stack:
            node = stack.pop()
            self.messages += 1
            try:
                self._accept(node)
            except Refused as refused:
                node.message = None
                self._refuse(node, refused.reason, refused.detail, refused.column)
            stack.extend(reversed(self._children(node)))

    def _accept(self, node: _Node) -> None:
        """Check a message and attach it to its parent.

        Raises Refused.
        """
        if node.parent is not None and node.parent.message is None:
            raise Refused("under_refused_message", "", "a message above it was refused")
        item, names = node.item, self.columns
        turn = message(item, "", self.rules, names["text"], names["role"])
        if item.get("deleted") is True:
            raise Refused("deleted", ".deleted", "the source marks it as deleted")
        if not isinstance(item.get(names["replies"]), (list, type(None))):
            raise Refused("wrong_type", f".{names['replies']}", "replies must be a list")
        node.chars = len(turn["content"]) + (node.parent.chars if node.parent else 0)
        if turn["role"] == "user":
            self.rules.check_prompt_chars(node.chars, f".{names['text']}")
            self.users.append(node)
        elif turn["role"] == "assistant":
            self.rules.clean_response(turn["content"], f".{names['text']}")
            node.rank = _rank(item.get(names["rank"]), f".{names['rank']}")
            if node.parent and node.parent.message and node.parent.message["role"] == "user":
                node.parent.replies.append(node)
                self.unranked += node.rank is None
        node.message = turn

    def _children(self, node: _Node) -> list[_Node]:
        items = node.item.get(self.columns["replies"]) if isinstance(node.item, dict) else None
        return (
            [_Node(item, node, i, node.depth + 1) for i, item in enumerate(items)] if isinstance(items, list) else []
        )

    def _refuse(self, node: _Node, reason: str, detail: str, column: str = "") -> None:
        self.refusals.append(Refusal(reason, detail, self._origin(self._way(node) + column, self._alone(node.item))))

    def _alone(self, item: Any) -> Any:
        """A message without its replies, which are counted separately."""
        return (
            {name: value for name, value in item.items() if name != self.columns["replies"]}
            if isinstance(item, dict)
            else item
        )

    def _origin(self, column: str, original: Any) -> Origin:
        return Origin(self.table.place, self.table.unit, self.row.number, column, original)

    def _way(self, node: _Node) -> str:
        if node.depth > LONGEST_NAMED_WAY:
            return f"message at depth {node.depth}"
        steps = []
        while node.parent is not None:
            steps.append(f".{self.columns['replies']}[{node.index}]")
            node = node.parent
        return self.columns["prompt"] + "".join(reversed(steps))

    def examples(self) -> Iterator[Example]:
        for user in self.users:
            ranked = sorted(
                (reply for reply in user.replies if reply.rank is not None),
                key=lambda reply: (reply.rank, reply.index),
            )
            ranked = self._without_repeats(ranked)
            pairs = pairs_of([(reply.rank, _text(reply)) for reply in ranked])
            # the best of several unranked ones is unknown
            best = ranked[:1] or (user.replies if len(user.replies) == 1 else [])
            origin = self._origin(self._way(user), self._alone(user.item))
            yield Example(origin, _conversation(user), pairs, tuple(_text(reply) for reply in best))

    def _without_repeats(self, ranked: list[_Node]) -> list[_Node]:
        """Keep the best ranked of siblings with the same text and refuse the others."""
        kept: dict[str, _Node] = {}
        for reply in ranked:
            if _text(reply) in kept:
                self._refuse(
                    reply, "identical_replies", "a better ranked reply has the same text", f".{self.columns['text']}"
                )
            else:
                kept[_text(reply)] = reply
        return list(kept.values())


class Tree(NamedTuple):
    """Examples and refusals of a tree."""

    messages: int
    examples: list[Example]
    refusals: list[Refusal]
    unranked: int
    """Replies without a rank, which give no pairs."""


def parse_tree(table: Table, row: SourceRow, root: Any, columns: Mapping[str, str], rules: TextRules) -> Tree:
    """The examples of the tree below the message `root`, and the messages that were refused."""
    walk = _Walk(table, row, root, columns, rules)
    walk.read()
    examples = list(walk.examples())
    return Tree(walk.messages, examples, walk.refusals, walk.unranked)


def _rank(value: Any, column: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value % 1 != 0:
        raise Refused("rank", column, f"{shown(value)} is not a whole number")
    return int(value)


def _text(node: _Node) -> str:
    assert node.message is not None
    return node.message["content"]


def _conversation(node: _Node | None) -> list[Message]:
    messages = []
    while node is not None:
        assert node.message is not None
        messages.append(node.message)
        node = node.parent
    return messages[::-1]
