"""Trains the tokenizer of a randomly initialised model on the data's train split."""

from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

from config.schema import Params
from training.modeling.tokenizer import trained_tokenizer
from training.preparation.formats import Example
from training.preparation.splits import split_of


def train_tokenizer(
    examples: Iterable[Example], params: Params, vocab_size: int | None = None
) -> PreTrainedTokenizerBase:
    """A tokenizer of `model.random.vocab_size` entries, or of the given size, trained on the train
    split.
    """
    assert params.model.random is not None
    train = [
        example
        for example in examples
        if split_of(example.prompt, *params.data.fractions) == "train"
    ]
    replies = (
        text
        for example in train
        for text in (*example.completions, *(text for pair in example.pairs for text in pair[:2]))
    )
    prompts = (example.prompt for example in train)
    return trained_tokenizer(
        replies, vocab_size or params.model.random.vocab_size, params.data.prompt_template, prompts
    )
