"""Whether llama.cpp puts a chat to the model as training did, by its own answers."""

import random
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from config.terminal_text import shown
from training.export.aligned import as_messages
from training.export.llama_cpp import Server
from training.modeling.tokenizer import Message, Prompt, TemplateRefusal, encode_prompt, special_tokens

CHECKED = 200
"""Held-out prompts to compare."""
TEXTS = ("  indented\n\ttwice\n", "naïve 😀 日本語", "1234567 3.14", "a  b\n\n\nc ", "it's IT'S")


def differences(server: Server, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> list[str]:
    """Differences between llama.cpp and training in rendering and tokenising, one line each: of held-out prompts, of
    texts and turns that those may lack, and of control tokens that are spelt out.
    """
    is_plain = isinstance(prompts[0], str)
    held_out = random.Random(0).sample(list(prompts), min(CHECKED, len(prompts)))
    texts = [*TEXTS, *(f"a {token} b{token}" for token in special_tokens(tokenizer))]
    user, reply = {"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}
    system = {"role": "system", "content": "e f"}
    chats = [
        *(as_messages(prompt) for prompt in [*held_out, *texts]),
        [system, user], [user, reply, user], [system, user, reply, user],
    ]  # fmt: skip
    lines = []
    for chat in chats:
        expected = _trained(tokenizer, chat, is_plain)
        rendered = server.post("/apply-template", {"messages": chat}).get("prompt")
        ids = None
        if rendered is not None:
            ids = server.post("/tokenize", {"content": rendered, "add_special": True})["tokens"]
        if ids != expected:
            text = "; ".join(f"{message['role']}: {message['content']}" for message in chat)
            counts = " and ".join("a refusal" if row is None else f"{len(row)} tokens" for row in (ids, expected))
            lines.append(f"{shown(text)} gives {counts} in training.")
    return lines


def _trained(tokenizer: PreTrainedTokenizerBase, chat: Sequence[Message], is_plain: bool) -> list[int] | None:
    """The ids of training; None if it had no such chats."""
    if is_plain:
        return encode_prompt(tokenizer, chat[0]["content"]) if len(chat) == 1 else None
    try:
        return encode_prompt(tokenizer, list(chat))
    except TemplateRefusal:
        return None
