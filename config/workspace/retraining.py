"""Records of a retrain cycle: results of its two processes, and the history of cycles.

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
    """An observed share, its interval, and the sample size."""

    value: float
    low: float
    high: float
    of: int


class LengthDrift(Record):
    """Two distributions of prompt lengths, in tokens of the champion's tokenizer."""

    distance: float
    """Kolmogorov-Smirnov: the largest difference of the two cumulative distributions."""
    critical: float
    """Exceeded by chance alone once in 1 / (1 - confidence) cases."""
    mean_before: float
    mean_new: float


class Examination(Record):
    """Today's data compared with the champion's."""

    added: dict[str, int]
    """dataset/split -> rows not in the champion's data."""
    removed: dict[str, int]
    """dataset/split -> rows removed since."""
    refused: int
    """Rows in quarantine."""
    length_drift: LengthDrift | None
    """Prompts of the added rows compared with the champion's; None without added rows."""
    new_words: Share | None
    """Words in prompts of added rows that no prompt of the champion's data has."""
    accuracy: Share | None
    """Accuracy of the champion's reward model on the added pairs; None without any."""
    accuracy_before: float | None
    """The same on the held-out pairs of its evaluation."""

    @property
    def changed_rows(self) -> int:
        """Rows added or changed, and rows removed: an edited row is one of each and counts once."""
        names = self.added.keys() | self.removed.keys()
        return sum(max(self.added.get(name, 0), self.removed.get(name, 0)) for name in names)

    @property
    def new_ratings(self) -> int:
        """Rated replies among the rows added."""
        return sum(rows for name, rows in self.added.items() if name.startswith("ratings/"))


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
    """Held-out prompts left out because one of the two was trained on them."""
    judge: str
    """Judge: gold score, that of evaluate.judge, or the champion's reward model."""
    judge_fault: str | None = None
    """Why the judge gives no verdict: the figures are then the champion's reward model's."""
    judge_usd: float = 0.0
    """US dollars paid to an endpoint."""
    judge_waits: bool = False
    """It has no verdict until people have voted."""
    win_rate: Share
    """Win rate of the challenger, a tie counting half; `of` prompts."""
    ties: int
    gold: Mean | None
    champion_reward: Mean
    """Judged by the champion's reward model."""
    challenger_reward: Mean
    """Judged by the challenger's own reward model, which may have learnt from bad votes."""
    hacking: bool | None
    """None if the prompts are too few to decide."""
    hacking_reason: str
    hacking_prompts_needed: int | None = None
    """If it is None: how many prompts would decide it."""
    kl: float
    """KL of the challenger to its SFT model, nats per response."""
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
    """At `cost`: the cost of a process of the cycle beside the pipeline run. At `reserved`: the planned cost of the
    contest, which the run must leave.
    """
    run_id: str | None = None
    """At `end`: the pipeline run, if there was one."""
    outcome: str = ""
    """At `end`: promoted, kept, waiting (for people's votes), trial (users decide), skipped, stopped or failed."""
    data_key: str | None = None
    """At `end`: digest of the data's inputs, so that the next cycle can tell whether anything is new."""
    said: str = ""
    """At `end`: the outcome and its reason in one line."""
    detail: dict[str, Any] = {}
