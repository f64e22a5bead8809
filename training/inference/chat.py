"""Chat with the models of a run in the terminal, streamed.

python -m training.inference.chat --folder FOLDER --models aligned [sft base ...]
    a line of standard input is a message; an empty line starts anew, the end of input ends it
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TextIO

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from config import jsonl
from config.errors import ModelError, ParamsError
from config.load import read
from config.sections.model import Model
from training.modeling.models import autocast, base_model, load_policy
from training.modeling.tokenizer import Message, Prompt, decode_response, encode_prompt, load_tokenizer
from training.process.command import run_command
from training.process.device import device

MODELS = ("base", "sft", "aligned", "student")


class Sampling(NamedTuple):
    temperature: float
    """0 is greedy."""
    max_new_tokens: int
    seed: int


class Conversation:
    """The conversation with one model; each model continues from its own replies."""

    def __init__(self, several_turns: bool) -> None:
        self.several_turns = several_turns
        self.messages: list[Message] = []

    def prompt(self, text: str) -> Prompt:
        """The messages for the model's next reply. A model trained on single prompts gets only the last."""
        if not self.several_turns:
            return text
        return [*self.messages, {"role": "user", "content": text}]

    def add(self, text: str, reply: str) -> None:
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": reply}]

    def forget_oldest(self) -> bool:
        """Drop the oldest turn; returns whether there was one."""
        has_messages = bool(self.messages)
        del self.messages[:2]
        return has_messages


class Speaker:
    """A model of a run and its conversation."""

    def __init__(self, name: str, folder: Path, tokenizer: PreTrainedTokenizerBase, several_turns: bool) -> None:
        self.name, self.tokenizer = name, tokenizer
        content = read(folder / "params.yaml")  # other sections may have an earlier schema
        self.settings = Model.model_validate(content["model"])
        if name == "base":
            base = base_model(self.settings, tokenizer, int(content["seed"]))
        else:
            stages = {"aligned": str(content["align"]["method"]), "student": "distill"}
            place = folder / "models" / stages.get(name, name)
            base = load_policy(place, self.settings, tokenizer)
        self.model: PreTrainedModel = base.to(device()).eval()
        self.conversation = Conversation(several_turns)

    def reply(self, text: str, sampling: Sampling, out: TextIO) -> str:
        """Reply to `text`, streaming to `out`.

        Raises ModelError if it leaves no room for a reply.
        """
        ids = self._fitting(text, sampling.max_new_tokens)
        torch.manual_seed(sampling.seed)
        sampled = sampling.temperature > 0
        with torch.no_grad(), autocast(self.settings, self.model.device):
            input_ids = torch.tensor([ids], device=self.model.device)
            tokens = self.model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                streamer=_Streamer(self.tokenizer, out),
                max_new_tokens=sampling.max_new_tokens,
                do_sample=sampled,
                temperature=sampling.temperature if sampled else None,
                top_k=0 if sampled else None,
                pad_token_id=self.tokenizer.pad_token_id,
                eos_token_id=self.tokenizer.eos_token_id,
            )[0, len(ids) :]
        reply = decode_response(self.tokenizer, tokens.tolist())
        self.conversation.add(text, reply)
        return reply

    def _fitting(self, text: str, max_new_tokens: int) -> list[int]:
        """Token ids of the conversation, dropping oldest turns until it fits."""
        room = self.settings.context_length - max_new_tokens
        while True:
            ids = encode_prompt(self.tokenizer, self.conversation.prompt(text))
            if len(ids) <= room:
                return ids
            if not self.conversation.forget_oldest():
                raise ModelError(
                    f"that is {len(ids)} tokens, and {room} leave room for a reply of "
                    f"{max_new_tokens} in model.context_length={self.settings.context_length}. "
                    "Shorten it, or take a smaller --max-new-tokens."
                )


class _Streamer(TextStreamer):
    """Streams to our own file, without special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, out: TextIO) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.out = out

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called by Transformers with complete words."""
        print(text, end="\n" if stream_end else "", file=self.out, flush=True)


def speakers(folder: Path, names: Iterable[str]) -> list[Speaker]:
    """The models of the run in `folder`. Raises ModelError if one is missing or damaged."""
    tokenizer = load_tokenizer(folder / "data/tokenizer")
    rows = folder / "data/prepared/sft/train.jsonl"
    first = next(iter(jsonl.plain(rows)), {}) if rows.exists() else {}
    talks = isinstance(first.get("prompt"), list)
    return [Speaker(name, folder, tokenizer, talks) for name in names]


def talk(those: list[Speaker], sampling: Sampling, lines: Iterable[str], out: TextIO, ask: Callable[[], None]) -> None:
    """Answer each of `lines`; by every model in turn, with its name if there are several. `ask` is called before a
    line is read.
    """
    width = max(len(model.name) for model in those)
    ask()
    for line in lines:
        text = line.strip()
        if not text:
            for model in those:
                model.conversation.messages.clear()
        for model in those if text else ():
            print(f"{model.name:>{width}}: " if len(those) > 1 else "", end="", file=out, flush=True)
            try:
                model.reply(text, sampling, out)
            except ModelError as error:
                print(error, file=out)
        ask()


def main() -> None:
    """Entry point of `rlhf chat`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=MODELS, required=True)
    parser.add_argument("--temperature", type=float, required=True)
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    for name, value, least in (("temperature", options.temperature, 0), ("max-new-tokens", options.max_new_tokens, 1)):
        if not least <= value < float("inf"):
            raise ParamsError(f"--{name} {value}: it must be {least} or more.")
    sampling = Sampling(options.temperature, options.max_new_tokens, options.seed)
    person = sys.stdin.isatty()

    def ask() -> None:
        if person:
            sys.stdout.write("\n> ")
            sys.stdout.flush()

    talk(speakers(options.folder, options.models), sampling, sys.stdin, sys.stdout, ask)


if __name__ == "__main__":
    sys.exit(run_command(main, "chat"))
