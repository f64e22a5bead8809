"""Text to token ids and back, exactly as in training: the front tokenises, so an engine's own
tokenizer does not matter.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from config.errors import ModelError
from serving.limits import BadRequest

Message = dict[str, str]
"""A role and a content."""


def _raise(message: str) -> None:
    raise TemplateError(message)


class Prompt(NamedTuple):
    """A chat as the model receives it."""

    text: str
    """Rendered by the chat template, with special tokens."""
    ids: list[int]


class Prompts:
    """The tokenizer and the chat template of an export."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError if `folder` has neither or they are damaged."""
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
            template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
            model = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except Exception as error:  # tokenizers raises a plain Exception
            reason = " ".join(str(error).split())[:200]
            raise ModelError(
                f"{folder} is not a complete export: {reason}. Remove it, and write it again with "
                "rlhf export."
            ) from error
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise
        self._template = environment.from_string(template)
        self._names = {name: config.get(name) for name in ("bos_token", "eos_token", "pad_token")}
        eos = self._tokenizer.token_to_id(str(config["eos_token"]))
        if eos is None:
            raise ModelError(f"{folder}: eos_token is not in the vocabulary. Export it again.")
        self.eos: int = eos
        self.context_length = int(model["max_position_embeddings"])

    def of_chat(self, messages: Sequence[Message]) -> Prompt:
        """Render and tokenise a chat. Raises BadRequest if the template refuses it."""
        try:
            text = self._template.render(
                messages=messages, add_generation_prompt=True, **self._names
            )
        except TemplateError as error:
            raise BadRequest(
                "messages", f"the model's chat template refuses them: {error}"
            ) from None
        return Prompt(text, self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text_for(self, prompt: Prompt) -> str:
        """The text that gives the prompt's ids once special tokens are added.

        Raises BadRequest if there is none.
        """
        for text in (prompt.text, prompt.text.removeprefix(str(self._names["bos_token"]))):
            if self._tokenizer.encode(text).ids == prompt.ids:
                return text
        raise BadRequest(
            "messages", "this engine takes text, and no text gives the tokens of these messages."
        )

    def text(self, ids: Sequence[int]) -> str:
        """The reply decoded from token ids, without special tokens."""
        found: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return found
