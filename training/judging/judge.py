"""What a judge is, and its verdicts in both orders of the replies."""

import random
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from training.modeling.tokenizer import Prompt, prompt_text


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
    """US dollars paid so far."""

    def prefer(self, pairs: Sequence[Pair]) -> list[float | None]:
        """Verdict on each pair: 1 if the first reply is better, 0 if the second is, 0.5 for a tie, None without a
        usable answer.
        """
        ...


class Verdicts(NamedTuple):
    """Preferences for the first replies, asked in both orders."""

    preferences: list[float | None]
    """A tie where the two orders disagree; None unless both gave an answer."""
    flips: int
    """Pairs on which the two orders disagree."""
    unusable: int
    """Answers that were none, of two to a pair."""


def verdicts(judge: Judge, pairs: Sequence[Pair], seed: int) -> Verdicts:
    """Ask the judge about every pair in both orders, so that a bias to the first place becomes a tie; `seed` draws
    which order of a pair is asked first.
    """
    rng = random.Random(seed)
    swapped = [rng.random() < 0.5 for _ in pairs]
    first, second = (
        judge.prefer([pair.swapped if turn != is_second else pair for pair, turn in zip(pairs, swapped, strict=True)])
        for is_second in (False, True)
    )
    preferences: list[float | None] = []
    flips = unusable = 0
    for turn, *answers in zip(swapped, first, second, strict=True):
        unusable += answers.count(None)
        straight, turned = reversed(answers) if turn else answers
        if straight is None or turned is None:
            preferences.append(None)
            continue
        flips += straight != 1 - turned
        preferences.append(straight if straight == 1 - turned else 0.5)
    return Verdicts(preferences, flips, unusable)


class ByScore:
    """A judge that prefers the reply with the higher score. It scores a reply once, in whatever place and pair it
    stands.
    """

    name = "score"
    usd = 0.0

    def __init__(self) -> None:
        self._scores: dict[tuple[str, str], float] = {}

    def scores(self, prompts: Sequence[Prompt], replies: Sequence[str]) -> list[float]:
        """Score of each reply to its prompt."""
        raise NotImplementedError

    def prefer(self, pairs: Sequence[Pair]) -> list[float | None]:
        replies = {
            (prompt_text(pair.prompt), text): pair.prompt for pair in pairs for text in (pair.first, pair.second)
        }
        new = {key: prompt for key, prompt in replies.items() if key not in self._scores}
        scores = self.scores(list(new.values()), [text for _, text in new])
        self._scores |= dict(zip(new, scores, strict=True))
        return [self._preference(pair) for pair in pairs]

    def _preference(self, pair: Pair) -> float:
        prompt = prompt_text(pair.prompt)
        first, second = self._scores[prompt, pair.first], self._scores[prompt, pair.second]
        return 0.5 if first == second else float(first > second)
