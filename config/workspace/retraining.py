"""What the two processes of a retrain cycle find out, and what the cycle remembers: records that
both halves of the project share.

runs/retrain.jsonl                     RetrainRow   when a cycle began, what its own processes cost,
                                       how it ended
runs/retrain/<cycle>/examination.json  Examination  the data against the champion's: python -m
                                       training.retraining.examine
runs/retrain/<cycle>/contest.json      Contest      the new model against the champion: python -m
                                       training.retraining.contest
"""

from pathlib import Path
from typing import Any, Literal

from config.records import Record

RETRAIN_ROWS = Path("runs/retrain.jsonl")
RETRAIN_FOLDER = Path("runs/retrain")


class Share(Record):
    """An observed share, its interval, and of how many."""

    value: float
    low: float
    high: float
    of: int


class LengthDrift(Record):
    """Two distributions of prompt lengths, in tokens of the champion's tokenizer."""

    distance: float
    """Kolmogorov-Smirnov: the largest difference of the two cumulative distributions."""
    critical: float
    """What chance alone exceeds once in 1 / (1 - confidence) cases."""
    mean_before: float
    mean_new: float


class Examination(Record):
    """The data as it is now against the champion's."""

    added: dict[str, int]
    """dataset/split -> rows that the champion's data has not."""
    removed: dict[str, int]
    """dataset/split -> rows that it had and that are gone."""
    refused: int
    """Rows in quarantine."""
    length_drift: LengthDrift | None
    """Prompts of the added rows against the champion's; None without added rows."""
    new_words: Share | None
    """Words in the prompts of added rows that no prompt of the champion's data has."""
    accuracy: Share | None
    """The champion's reward model on the added pairs; None without any."""
    accuracy_before: float | None
    """The same on the held-out pairs that it was evaluated on."""

    @property
    def changed_rows(self) -> int:
        """Rows added or changed, and rows taken away: an edited row is one of each and counts
        once.
        """
        names = self.added.keys() | self.removed.keys()
        return sum(max(self.added.get(name, 0), self.removed.get(name, 0)) for name in names)


class Mean(Record):
    """A mean difference, challenger minus champion, and its interval."""

    mean: float
    low: float
    high: float


class Safety(Record):
    prompts: int
    judge: str
    drop: Mean
    """How much lower the challenger scores: champion minus challenger."""


class Contest(Record):
    """Champion and challenger on the same held-out prompts, with the same random numbers."""

    prompts: int
    left_out: int
    """Held-out prompts not asked, because one of the two was trained on them."""
    judge: str
    """gold score, or the champion's reward model."""
    win_rate: Share
    """Of the challenger, a tie counting half; `of` prompts."""
    ties: int
    gold: Mean | None
    champion_reward: Mean
    """By the champion's reward model."""
    challenger_reward: Mean
    """By the challenger's own reward model, which may have learnt from bad votes."""
    hacking: bool | None
    """None where the prompts are too few to say."""
    hacking_reason: str
    hacking_prompts_needed: int | None = None
    """Where it is None: how many prompts would decide it."""
    kl: float
    """Of the challenger from its SFT model, nats per response."""
    kl_champion: float
    chars: float
    """Mean length of the challenger's responses, in characters."""
    chars_champion: float
    safety: Safety | None
    confidence: float


class RetrainRow(Record):
    time: float
    """Seconds since the epoch."""
    cycle: str
    event: Literal["begin", "reserved", "cost", "end"]
    usd: float = 0.0
    """At `cost`: what a process of the cycle cost besides the pipeline run. At `reserved`: what the
    contest is planned to cost, which the run leaves.
    """
    run_id: str | None = None
    """At `end`: the pipeline run, if there was one."""
    outcome: str = ""
    """At `end`: promoted, kept, skipped, stopped or failed."""
    data_key: str | None = None
    """At `end`: what the data was made from, for the next cycle to see whether anything is new."""
    said: str = ""
    """At `end`: the outcome and its reason in a line."""
    detail: dict[str, Any] = {}
