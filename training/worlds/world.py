"""The sentences of a helpdesk world: a small one written by hand, and a family of others generated from a seed.

The worlds of the family have the grammar of the hand-written one (`training/worlds/helpdesk.py`) and other words,
as many items, problems and wordings as their parameters say, and facts that a good reply repeats:

kelu bemo , sato NAME OF ITEM goda suni . ...
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from config.sections.data import HelpdeskSource, HelpdeskWorld


class Fact(NamedTuple):
    """A fact that the customer mentions and a good reply repeats."""

    stated: str
    """Word of the prompt before the value."""
    repeated: str
    """Word of the reply before it."""


class World(NamedTuple):
    """The words and sentences of a world. A sentence ends in its own mark: `.`, `,` or `?`."""

    items: tuple[str, ...]
    problems: Mapping[str, tuple[str, ...]]
    """Remedy -> what the customer may say."""
    remedies: Mapping[str, str]
    """Remedy -> the sentence of the reply."""
    upset: tuple[str, ...]
    calm: tuple[str, ...]
    greetings: tuple[str, ...]
    fillers: tuple[str, ...]
    apology: str
    ask: str
    close: str
    mine: str = "my"
    """Words before the item in a prompt."""
    about: str = "about your"
    """Words before the item in a reply."""
    order_number: str = "order number"
    facts: tuple[Fact, ...] = ()
    fact_values: tuple[str, ...] = ()
    fact_words: int = 0
    """Possible values."""
    stated_in: tuple[int, ...] = (0, 1)
    """Order of what follows the problem in a prompt: mood, order number, facts."""
    replied_in: tuple[int, ...] = (0, 1, 2)
    """Order of what follows the item in a reply: apology, remedy, order number, facts."""

    @property
    def words(self) -> frozenset[str]:
        """All words, digits and marks included."""
        sentences = [
            *(" ".join(wordings) for wordings in self.problems.values()),
            *self.remedies.values(),
            *(*self.upset, *self.calm, *self.greetings, *self.fillers),
            *(self.apology, self.ask, self.close, self.mine, self.about, self.order_number),
            *(f"{fact.stated} {fact.repeated}" for fact in self.facts),
            *(*self.items, *self.fact_values),
            "0 1 2 3 4 5 6 7 8 9 : . ,",
        ]
        return frozenset(word for sentence in sentences for word in sentence.split())

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each criterion in the gold score; they sum to 1."""
        weights = WEIGHTS | {f"fact_{i}": FACT_WEIGHT for i in range(len(self.facts))}
        total = sum(weights.values()) if self.facts else 1.0
        return {criterion: weight / total for criterion, weight in weights.items()}


WEIGHTS = {"item": 0.10, "apology": 0.15, "remedy": 0.30, "order_number": 0.20, "brevity": 0.10, "close": 0.15}
"""Weight of each criterion in a world without facts; they sum to 1."""
FACT_WEIGHT = 0.10
"""Weight of each fact beside them."""

BY_HAND = World(
    items=("lamp", "phone", "kettle", "jacket", "camera", "bike"),
    problems={
        "replace": ("arrived broken", "is cracked"),
        "trace": ("has not arrived", "is very late"),
        "exchange": ("is the wrong size", "has the wrong colour"),
        "refund": ("was charged twice", "cost too much"),
    },
    remedies={
        "replace": "we will replace it .",
        "trace": "we will trace the parcel .",
        "exchange": "we will exchange it .",
        "refund": "we will refund you .",
    },
    upset=("i am really angry .", "this is so annoying .", "i am very upset ."),
    calm=("no hurry .", "thanks for your help .", "i hope you can help ."),
    greetings=("hello ,", "hi ,", "good morning ,", "dear team ,"),
    fillers=("we value your business .", "our team is busy today .", "please visit our shop again ."),
    apology="we are sorry .",
    ask="what is your order number ?",
    close="kind regards .",
)
"""The world of the demo: 87 words and digits."""


def world_of(source: HelpdeskSource) -> World:
    """The world of a source."""
    return BY_HAND if source.world is None else generated_world(source.world)


@lru_cache(maxsize=8)
def generated_world(shape: HelpdeskWorld) -> World:
    """The generated world of `shape`, the same on every call."""
    rng = random.Random(f"world {shape.seed}")
    words = _words(rng)

    def take(count: int) -> tuple[str, ...]:
        return tuple(next(words) for _ in range(count))

    items, values = take(shape.items), take(shape.fact_values if shape.facts else 0)
    facts = tuple(Fact(*take(2)) for _ in range(shape.facts))
    mine, about, order = take(3)
    sentence = _sentences(take(shape.vocabulary - shape.named_words), shape.sentence_words, rng)
    names = [f"remedy {i}" for i in range(shape.problems)]
    # mood, order number and facts in the prompt; apology, remedy, order number and facts in replies
    stated, replied = list(range(2 + shape.facts)), list(range(3 + shape.facts))
    rng.shuffle(stated)
    rng.shuffle(replied)
    return World(
        items=items,
        problems={name: tuple(next(sentence) for _ in range(shape.wordings)) for name in names},
        remedies={name: f"{next(sentence)} ." for name in names},
        upset=tuple(f"{next(sentence)} ." for _ in range(shape.wordings)),
        calm=tuple(f"{next(sentence)} ." for _ in range(shape.wordings)),
        greetings=tuple(f"{next(sentence)} ," for _ in range(shape.wordings)),
        fillers=tuple(f"{next(sentence)} ." for _ in range(FILLERS)),
        apology=f"{next(sentence)} .",
        ask=f"{next(sentence)} ?",
        close=f"{next(sentence)} .",
        mine=mine,
        about=about,
        order_number=order,
        facts=facts,
        fact_values=values,
        fact_words=shape.fact_words,
        stated_in=tuple(stated),
        replied_in=tuple(replied),
    )


FILLERS = 3
"""Sentences of a generated world that fit no customer."""


def _words(rng: random.Random) -> Iterator[str]:
    """Distinct words of two or three syllables."""
    syllables = ["".join(pair) for pair in product("bdfgklmnprstvz", "aeiou")]
    seen: set[str] = set()
    while True:
        word = "".join(rng.choice(syllables) for _ in range(rng.randint(2, 3)))
        if word not in seen:
            seen.add(word)
            yield word


def _sentences(words: Sequence[str], longest: int, rng: random.Random) -> Iterator[str]:
    """Distinct sentences of 2 to `longest` of `words`, none part of another; words are reused only after all were
    used.
    """
    seen: list[str] = []
    unused: list[str] = []
    while True:
        length = rng.randint(2, longest)
        if len(unused) < length:
            unused = rng.sample(words, len(words))
        text = " ".join(unused[:length])
        if not any(f" {text} " in f" {other} " or f" {other} " in f" {text} " for other in seen):
            seen.append(text)
            yield text
            unused = unused[length:]
        else:
            rng.shuffle(unused)
