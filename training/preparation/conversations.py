"""Conversations as files spell them -> messages {role, content}, with the true reason where that cannot be done.

a list of messages     {role, content} or {from, value}; one message stands for a list of one
a list spelt as text   in a cell of a table: JSON, or a Python literal
a transcript           text with turns that begin with "Human:" and "Assistant:" (hh-rlhf)
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from config.terminal_text import shown
from training.modeling.tokenizer import Message
from training.preparation.cleaning import Refused, type_name

ROLES: Mapping[str, Sequence[str]] = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "bot", "model", "chatgpt", "chatbot", "ai"),
}
"""Our roles -> how they are spelt, in any case of letters."""
ROLE_OF = {spelt: role for role, spellings in ROLES.items() for spelt in spellings}
TOOLS = ("tool", "function", "ipython", "observation", "tool_call", "function_call", "tool_response")
"""Roles of turns that a tool takes or is called by."""

SPELT = re.compile(r"\s*[\[{]\s*[\[{'\"\d-]")
"""How a list or an object begins where it is spelt as text."""
TURN = re.compile(r"(?:\A|\n\n)\s*(Human|Assistant):[ \t]*")
RENDERED = re.compile(
    r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|\[INST\]|<\|user\|>|<extra_id_1>"
    r"|### Instruction:"
)
"""Marks of chat templates."""


def turn(item: Any, column: str, text: str = "content", role: str = "role") -> Message:
    """A message with one of our roles; its text is not checked. `text` and `role` are the source's names.

    Raises Refused.
    """
    if not isinstance(item, dict):
        raise Refused("wrong_type", column, f"{type_name(item)} where a message is expected")
    if text not in item and {"from", "value"} <= item.keys():
        text, role = "value", "from"
    for name in (text, role):
        if name not in item:
            raise Refused("missing_column", f"{column}.{name}", "this message has no such field")
    speaker = item[role].strip().lower() if isinstance(item[role], str) else item[role]
    if item.get("tool_calls") or item.get("function_call") or speaker in TOOLS:
        raise Refused("tool_turn", column, "calls of tools and their answers cannot be learnt from")
    if not isinstance(speaker, str) or speaker not in ROLE_OF:
        raise Refused("role", f"{column}.{role}", f"{shown(item[role])} is not one of {', '.join(ROLE_OF)}")
    return {"role": ROLE_OF[speaker], "content": _content(item[text], f"{column}.{text}")}


def _content(value: Any, column: str) -> Any:
    """The text of a message, also of one in parts; anything else is left to the check of texts."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type", "text") != "text" or "text" not in part:
            kind = part.get("type") if isinstance(part, dict) else type_name(part)
            raise Refused("not_text", column, f"a part is {kind}, only text can be learnt from")
    return "".join(part["text"] for part in value if isinstance(part["text"], str))


def turns(value: Any, column: str) -> list[Message]:
    """The messages of a conversation in any spelling but a transcript. Raises Refused."""
    value = parsed(value, column)
    items = [value] if isinstance(value, dict) else value
    if not isinstance(items, list):
        raise Refused("wrong_type", column, f"{type_name(value)} where messages are expected")
    if not items:
        raise Refused("empty", column, "a conversation without messages")
    return [turn(item, f"{column}[{i}]") for i, item in enumerate(items)]


def parsed(value: Any, column: str) -> Any:
    """`value`, or the list or object that it spells. Raises Refused for one that is damaged."""
    if not isinstance(value, str) or not SPELT.match(value):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(value.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise Refused("spelt_list", column, "a list spelt as text that is neither JSON nor a Python literal") from None


def is_conversation(value: Any) -> bool:
    """Whether a value is meant as messages: a list or an object, or text that spells one of them with messages in
    it.
    """
    if isinstance(value, str):
        return bool(SPELT.match(value)) and bool(re.search(r"['\"](?:role|from)['\"]\s*:", value))
    return isinstance(value, list | dict)


def transcript(value: str, column: str) -> list[Message]:
    """The turns of a transcript; what stands before the first is a system turn. Raises Refused for text without
    turns.
    """
    before, *parts = TURN.split(value)
    if not parts:
        raise Refused("no_prompt", column, "there is no column of prompts, and no Human: and Assistant: turns")
    messages = [
        {"role": ROLE_OF[speaker.lower()], "content": text}
        for speaker, text in zip(parts[::2], parts[1::2], strict=True)
    ]
    return [{"role": "system", "content": before}, *messages] if before.strip() else messages


def last_reply(messages: Sequence[Message], column: str) -> tuple[list[Message], str]:
    """The conversation before the assistant's last message, and its text. Raises Refused if it does not end with
    one.
    """
    *before, last = messages
    if last["role"] != "assistant":
        raise Refused(f"ends_with_{last['role']}", column, "the last message is no reply")
    return before, last["content"]


def same_turns(first: Sequence[Message], second: Sequence[Message]) -> bool:
    """Whether two conversations have the same roles and texts, outer white space aside."""
    return [(message["role"], _bare(message)) for message in first] == [
        (message["role"], _bare(message)) for message in second
    ]


def _bare(message: Message) -> Any:
    content = message["content"]
    return content.strip() if isinstance(content, str) else content
