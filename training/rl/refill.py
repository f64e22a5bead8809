"""Dynamic sampling: groups of responses that all scored alike teach nothing, and further prompts take their place.

Source: Yu et al. 2025 (DAPO, arXiv:2503.14476), section 3.2. A batch that is not full after `most_batches` of sampling
keeps groups without a difference, so that an update always has as many episodes.

Shapes: B responses, those to the same prompt side by side.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from config.sections.online import Grouped, Online
from training.rollout.engine import Rollout


class Scored(NamedTuple):
    """Responses of an update with their scores, in the order of their prompts."""

    places: list[int]
    """Each response's prompt."""
    rollout: Rollout
    score_B: Tensor
    shaped_B: Tensor
    """What is compared: the score with its penalties."""

    def of(self, rows: Sequence[int]) -> "Scored":
        """A selection of responses."""
        responses, logprobs, values = self.rollout
        chosen = Rollout(
            [responses[i] for i in rows], [logprobs[i] for i in rows], values and [values[i] for i in rows]
        )
        index = torch.tensor(rows)
        return Scored([self.places[i] for i in rows], chosen, self.score_B[index], self.shaped_B[index])


class Batches:
    """What an update has sampled, batch by batch."""

    def __init__(self, settings: Online) -> None:
        refill = settings.refill if isinstance(settings, Grouped) else None
        self._most, self._group = refill.most_batches if refill else 1, settings.responses_per_prompt
        self._revisit = refill.revisit if refill else None
        self._batches: list[Scored] = []

    @property
    def number(self) -> int:
        """Batches until now."""
        return len(self._batches)

    def wants(self) -> bool:
        """Whether another batch is to be sampled."""
        if self.number in (0, self._most):
            return self.number == 0
        return sum(map(len, map(self._differing, self._batches))) < len(self._batches[0].places)

    @property
    def score(self) -> tuple[float, float]:
        """Mean score of the first batch, which was not chosen by its scores, and its squared standard error."""
        score_B = self._batches[0].score_B
        return float(score_B.mean()), float(score_B.var(correction=0)) / len(score_B)

    def add(self, scored: Scored) -> None:
        self._batches.append(scored)

    def resting(self, before: Sequence[tuple[int, int]], update: int) -> list[tuple[int, int]]:
        """The prompts that rest after this update, each with the last update of its rest: those of `before` that still
        do, and those that this update saw solved every time.
        """
        still = [(prompt, last) for prompt, last in before if last > update]
        if self._revisit is None:
            return still
        sampled = _joined(self._batches)
        groups = zip(sampled.places[:: self._group], sampled.shaped_B.view(-1, self._group), strict=True)
        mean = sampled.shaped_B.mean()
        solved = {place for place, score_G in groups if (score_G == score_G[0]).all() and score_G[0] > mean}
        return still + [(prompt, update + self._revisit) for prompt in sorted(solved)]

    def chosen(self) -> tuple[Scored, dict[str, float]]:
        """The responses to learn from, as many as a batch has, and the share of groups without a difference of those
        that were sampled, and of those.
        """
        sampled = chosen = self._batches[0]
        if self.number > 1:
            sampled = _joined(self._batches)
            differing = self._differing(sampled)
            others = sorted({*range(len(sampled.places))} - {*differing})
            chosen = sampled.of([*differing, *others][: len(chosen.places)])
        return chosen, {
            "equal_groups": self._equal_share(sampled), "equal_groups_taken": self._equal_share(chosen),
        }  # fmt: skip

    def _equal_share(self, scored: Scored) -> float:
        return 1 - len(self._differing(scored)) / len(scored.places)

    def _differing(self, scored: Scored) -> list[int]:
        """Responses of groups whose scores differ."""
        score_PG = scored.shaped_B.view(-1, self._group)
        differs_P = (score_PG != score_PG[:, :1]).any(dim=1)
        return torch.nonzero(differs_P.repeat_interleave(self._group)).flatten().tolist()


def _joined(batches: Sequence[Scored]) -> Scored:
    values = [batch.rollout.values for batch in batches]
    return Scored(
        [place for batch in batches for place in batch.places],
        Rollout(
            [row for batch in batches for row in batch.rollout.responses],
            [row for batch in batches for row in batch.rollout.logprobs],
            None if values[0] is None else [row for part in values for row in part or []],
        ),
        torch.cat([batch.score_B for batch in batches]),
        torch.cat([batch.shaped_B for batch in batches]),
    )
