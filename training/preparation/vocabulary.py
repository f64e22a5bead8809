"""Trains the tokenizer of a randomly initialised model on the data's train split."""

from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from config.schema import Params
from training.modeling.duplicates import digest
from training.modeling.tokenizer import rendering, trained_tokenizer
from training.preparation.cleaning import same_prompt_key
from training.preparation.formats import replies_of
from training.preparation.prepared import Accepted
from training.preparation.splits import split_of

MOST_CHARACTERS = 50_000_000
"""Text that a tokenizer learns from: of more, a sample is taken by the digests of the prompts. Its distinct words are
in memory while it learns.
"""


def train_tokenizer(
    sources: Sequence[Accepted], params: Params, vocab_size: int | None = None
) -> PreTrainedTokenizerBase:
    """A tokenizer of `model.random.vocab_size` entries, or of the given size, trained on the train split."""
    assert params.model.random is not None
    characters = sum(source.characters for source in sources)
    share = min(1.0, MOST_CHARACTERS / max(1, characters))
    render = rendering(params.data.prompt_template)

    def texts() -> Iterator[str]:
        for source in sources:
            for example in source:
                if split_of(example.prompt, *params.data.fractions) != "train":
                    continue
                if share == 1 or digest(same_prompt_key(example.prompt)) < share * 2**64:
                    yield render(example.prompt)
                    yield from replies_of(example)

    vocab_size = vocab_size or params.model.random.vocab_size
    return trained_tokenizer(texts(), vocab_size, params.data.prompt_template)
