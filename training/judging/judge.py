"""What a judge is, and its verdicts in both orders of the replies."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from training.modeling.tokenizer import Prompt


class Pair(NamedTuple):
    """Two replies to a prompt."""

    prompt: Prompt
    first: str
    second: str

    @property
    def swapped(self) -> "Pair":
        return Pair(self.prompt, self.second, self.first)


class Judge(Protocol):
    """Prefers one of two replies."""

    name: str
    usd: float
    """What it was paid so far, in US dollars."""

    def prefer(self, pairs: Sequence[Pair]) -> list[float | None]:
        """For each pair 1 if the first reply is better, 0 if the second is, 0.5 for a tie; None
        where it gave no usable answer.
        """
        ...


class Verdicts(NamedTuple):
    """Preferences for the first replies, asked in both orders."""

    preferences: list[float]
    """A tie where the two orders disagree, or neither gave an answer."""
    flips: int
    """Pairs on which the two orders disagree."""
    unusable: int
    """Answers that were none, of two to a pair."""


def verdicts(judge: Judge, pairs: Sequence[Pair]) -> Verdicts:
    """Ask the judge about every pair in both orders: a bias to the first place makes ties of what
    it decides.
    """
    straight = judge.prefer(pairs)
    turned = judge.prefer([pair.swapped for pair in pairs])
    preferences, flips, unusable = [], 0, 0
    for first, second in zip(straight, turned, strict=True):
        unusable += (first is None) + (second is None)
        back = None if second is None else 1 - second
        answers = [answer for answer in (first, back) if answer is not None]
        if len(answers) == 2 and answers[0] != answers[1]:
            flips += 1
            preferences.append(0.5)
        else:
            preferences.append(answers[0] if answers else 0.5)
    return Verdicts(preferences, flips, unusable)
