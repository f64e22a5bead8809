"""The tokenizer every stage shares: trained on the data or taken from the base model, kept in data/tokenizer.

Prompt and response are tokenised separately, so the boundary between them is the same in SFT, reward, PPO and
evaluation. The prompt template is stored with the tokenizer (`prompt_template`); rows, reports and gold scores see the
bare prompt.
"""

import datetime
import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from jinja2 import TemplateError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from config.errors import ModelError
from config.sections.model import Model
from config.terminal_text import shown
from training.modeling.duplicates import first_of_each

logger = logging.getLogger(__name__)

Message = dict[str, str]
"""{role, content}"""
Prompt = str | list[Message]
Response = str | list[Message]
"""Plain text, or a list of one assistant message: TRL's conversational form."""

PAD, BOS, EOS, SPARE = SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<spare>")
"""Special tokens of a trained tokenizer, ids 0 to 3."""
SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)
"""Entries of a trained tokenizer before any merge: bytes and special tokens."""

PLAIN_TEMPLATE = "{prompt}"

PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Roles as lines of plain text, for tokenizers without a chat template."""


# ---------------------------------------------------------------- creating one


def trained_tokenizer(
    texts: Iterable[str], vocab_size: int, prompt_template: str = PLAIN_TEMPLATE
) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `vocab_size` entries learnt from replies and prompts as `rendering` gives them, each
    text once.

    Deterministic, without unknown tokens. Too few merges give a smaller vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        first_of_each(texts),
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, SPECIAL_TOKENS.index(BOS))]
    )
    size = tokenizer.get_vocab_size()
    if size < vocab_size:
        logger.info(
            "the training text repeats fewer merges than model.random.vocab_size=%d has room for: "
            "the tokenizer has %d entries",
            vocab_size,
            size,
        )
    return _wrapped(tokenizer, prompt_template)


def rendering(prompt_template: str = PLAIN_TEMPLATE) -> Callable[[Prompt], str]:
    """How a trained tokenizer renders prompts, without the token at their start."""
    templates = _wrapped(Tokenizer(models.BPE()), prompt_template)
    return lambda prompt: render_prompt(templates, prompt).removeprefix(BOS)


def _wrapped(tokenizer: Tokenizer, prompt_template: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[SPARE],
        clean_up_tokenization_spaces=False,
        chat_template="{{ bos_token }}" + PLAIN_CHAT_TEMPLATE,
        prompt_template=prompt_template,
    )


def pretrained_tokenizer(settings: Model, prompt_template: str = PLAIN_TEMPLATE) -> PreTrainedTokenizerBase:
    """The tokenizer of `model.path` at `model.revision`, padding with `model.pad_token`; remote code is never run.

    Raises ModelError if it cannot be loaded, has no end-of-sequence token, or no pad token distinct from it.
    """
    assert settings.path is not None
    if settings.path.startswith((".", "/", "~")) and not Path(settings.path).is_dir():
        raise ModelError(
            f"model.path={settings.path} is not a folder. Put the model there, or fix model.path in params.yaml."
        )
    tokenizer = tokenizer_of(settings.path, settings.revision, "model.path")
    if settings.pad_token is not None:
        if settings.pad_token not in tokenizer.get_vocab():
            raise ModelError(
                f"model.pad_token={shown(settings.pad_token)} is not in the vocabulary of "
                f"{settings.path}.{_pad_hint(tokenizer)} Change it in params.yaml."
            )
        tokenizer.pad_token = settings.pad_token
    check_special_tokens(tokenizer, str(settings.path))
    if tokenizer.chat_template is None:
        start = "{{ bos_token }}" if _starts_with_bos(tokenizer) else ""
        tokenizer.chat_template = start + PLAIN_CHAT_TEMPLATE
        logger.info("%s has no chat template: conversations are put to it as lines of `role: text`", settings.path)
    else:
        tokenizer.chat_template = portable(tokenizer.chat_template, settings.template_date)
        if (end := end_of_turn(tokenizer)) not in (None, tokenizer.eos_token):
            logger.warning(
                "%s: the chat template ends a turn with %s, replies are trained to end with %s. "
                "Both stop a served reply; set eos_token in its tokenizer_config.json to have one.",
                settings.path, end, tokenizer.eos_token,
            )  # fmt: skip
    tokenizer.init_kwargs["prompt_template"] = prompt_template
    return tokenizer


_DATE = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
_GENERATION = re.compile(r"({%-?\s*)(end)?generation(\s*-?%})")


def portable(template: str, date: str | None) -> str:
    """A chat template that every engine renders alike: it gets `date` (such as 2026-01-31) for today's, and has no
    tags of Transformers' own, which mark the assistant's turns.
    """
    template = _GENERATION.sub(lambda tag: tag[1] + ("endif" if tag[2] else "if true") + tag[3], template)
    if date is None:
        return template
    day = datetime.date.fromisoformat(date)
    pinned = _DATE.sub(lambda call: json.dumps(day.strftime(call[2])), template)
    return pinned.replace("strftime_now is defined", "true")


def tokenizer_of(place: str, revision: str | None, named: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or a hub model, named by the parameter `named`. Raises ModelError if it cannot
    be loaded.
    """
    from transformers import AutoTokenizer  # knows all models, which takes a second

    try:
        return AutoTokenizer.from_pretrained(place, revision=revision or "main", trust_remote_code=False)
    except Exception as error:  # a damaged or foreign tokenizer surfaces as almost any type
        raise ModelError(
            f"{named}={place} gives no tokenizer: {_first_line(error)} "
            "Name a folder with tokenizer files or a reachable hub model in params.yaml."
        ) from error


def check_special_tokens(tokenizer: PreTrainedTokenizerBase, place: str) -> None:
    """Raise an error for a tokenizer without EOS, or whose padding is EOS: the model would learn to ignore the end."""
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"{place}: the tokenizer has no end-of-sequence token, so no reply could end. "
            "Set eos_token in its tokenizer_config.json, or another model.path in params.yaml."
        )
    if tokenizer.pad_token_id is None:
        raise ModelError(
            f"{place}: the tokenizer has no pad token. Set model.pad_token in params.yaml to a token of its "
            f"vocabulary other than {tokenizer.eos_token!r}.{_pad_hint(tokenizer)}"
        )
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise ModelError(
            f"{place}: the tokenizer pads with its end-of-sequence token {tokenizer.eos_token!r}, "
            "so a model could not learn to end. Set model.pad_token in params.yaml to another token of its "
            f"vocabulary.{_pad_hint(tokenizer)}"
        )


def _pad_hint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Tokens of the vocabulary made for padding."""
    special = {tokenizer.eos_token, tokenizer.bos_token, None}
    marked = [token for token in sorted(tokenizer.get_vocab()) if token[:1] in "<[" and token not in special]
    fitting = [token for word in ("pad", "reserved", "unused", "spare") for token in marked if word in token.lower()]
    return f" It has {', '.join(fitting[:3])}." if fitting else ""


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer saved in a local folder.

    Raises ModelError if there is none, it is damaged, or it lacks an end-of-sequence or a pad token of its own.
    """
    if not (folder / "tokenizer_config.json").is_file():
        raise ModelError(f"{folder} holds no tokenizer. Run the data stage first: python -m training.data.")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged file surfaces as almost any type
        raise ModelError(
            f"{folder} holds a damaged tokenizer: {_first_line(error)} Run the stage that made it again."
        ) from error
    check_special_tokens(tokenizer, str(folder))
    return tokenizer


def _first_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text.split(". ")[0].rstrip(".") + "."


# ---------------------------------------------------------------- using it


def render_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    """The text the model continues: a plain prompt in the prompt template, a conversation in the chat template.

    Raises TemplateRefusal for a conversation that the chat template refuses, and ModelError for a template that asks
    for today's date.
    """
    if isinstance(prompt, str):
        return str(tokenizer.init_kwargs.get("prompt_template", PLAIN_TEMPLATE)).replace("{prompt}", prompt)
    if "strftime_now" in str(tokenizer.chat_template):
        raise ModelError(
            "the chat template of model.path puts today's date into conversations: the same run "
            "would be another one tomorrow. Set model.template_date: '2026-01-31' in params.yaml."
        )
    try:
        return str(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise TemplateRefusal(_first_line(error)) from error


class TemplateRefusal(ValueError):
    """A chat template that cannot be put around a conversation, with its own words."""


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Token ids of one rendered prompt; see `encode_prompts`."""
    return encode_prompts(tokenizer, [prompt])[0]


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of rendered prompts.

    A plain prompt starts with BOS if the tokenizer adds one; a chat template has its own special tokens.
    """
    ids = _encode(tokenizer, [render_prompt(tokenizer, prompt) for prompt in prompts])
    if not _starts_with_bos(tokenizer):
        return ids
    bos = tokenizer.bos_token_id
    return [
        [bos, *row] if isinstance(prompt, str) and row[:1] != [bos] else row
        for prompt, row in zip(prompts, ids, strict=True)
    ]


def encode_response(tokenizer: PreTrainedTokenizerBase, response: Response) -> list[int]:
    """Token ids of one response; see `encode_responses`."""
    return encode_responses(tokenizer, [response])[0]


def encode_responses(tokenizer: PreTrainedTokenizerBase, responses: Sequence[Response]) -> list[list[int]]:
    """Token ids of responses, each ending with EOS, none with a BOS. Special tokens spelt out in the text stay plain
    text.
    """
    texts = [response_text(response) for response in responses]
    return [[*row, tokenizer.eos_token_id] for row in _encode(tokenizer, texts, split_special_tokens=True)]


def decode_response(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of generated token ids up to the first EOS, without special tokens, as `trimmed` leaves it."""
    ids = list(ids)
    if tokenizer.eos_token_id in ids:
        ids = ids[: ids.index(tokenizer.eos_token_id)]
    return trimmed(str(tokenizer.decode(ids, skip_special_tokens=True)))


_BEFORE_TEXT = re.compile(r"\A(?:\s*\n)? ?(?=[\S\t])|\A\s*\n")


def trimmed(text: str) -> str:
    """`text` without empty lines before it, and without white space at its end. Its indentation is content; a single
    space is none, as tokenizers put one before a text themselves.
    """
    return _BEFORE_TEXT.sub("", text.rstrip())


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Every special token, also those that have no role of their own, such as <|im_start|>."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return tuple(dict.fromkeys([*tokenizer.all_special_tokens, *added]))


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The special token that the chat template puts after a reply; None if it is none."""
    reply = "the reply"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": reply}]
    try:
        rendered = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except (TemplateError, TypeError, ValueError, KeyError):  # made for single prompts
        return None
    after = rendered.rpartition(reply)[2].lstrip()
    return next((token for token in special_tokens(tokenizer) if after.startswith(token)), None)


def response_text(response: Response) -> str:
    """The bare text of a response in either form."""
    return response if isinstance(response, str) else response[-1]["content"]


def prompt_text(prompt: Prompt) -> str:
    """A prompt as people read it: the text itself, or one line per message of a conversation."""
    return (
        prompt
        if isinstance(prompt, str)
        else "\n".join(f"{message['role']}: {message['content']}" for message in prompt)
    )


ENCODED_AT_ONCE = 2000
"""Texts encoded at once: an encoding holds offsets and strings beside its ids."""

Item = TypeVar("Item")


def token_counts(
    encode: Callable[[PreTrainedTokenizerBase, Sequence[Item]], list[list[int]]],
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[Item],
) -> list[int]:
    """How many ids `encode` gives for each item, without keeping the ids."""
    parts = (items[i : i + ENCODED_AT_ONCE] for i in range(0, len(items), ENCODED_AT_ONCE))
    return [len(ids) for part in parts for ids in encode(tokenizer, part)]


def _encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], split_special_tokens: bool = False
) -> list[list[int]]:
    """Ids alone: what the tokenizer's own call does, without the offsets, masks and strings beside them."""
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = split_special_tokens
    backend.no_truncation()
    backend.no_padding()
    rows: list[list[int]] = []
    for start in range(0, len(texts), ENCODED_AT_ONCE):
        part = texts[start : start + ENCODED_AT_ONCE]
        rows += [encoding.ids for encoding in backend.encode_batch_fast(part, add_special_tokens=False)]
    return rows


def _starts_with_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    return tokenizer.bos_token_id is not None and list(tokenizer("a")["input_ids"])[:1] == [tokenizer.bos_token_id]
