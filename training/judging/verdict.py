"""What the judge of an evaluation says of two models, once it has been judged itself on preferences of people that no
stage trained on.

data/prepared/preference/{test,judge}.jsonl, replies -> the judge's part of metrics/evaluate.json
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from config import jsonl
from config.errors import DataError
from config.inputs import JUDGE_VOTES
from config.schema import Params
from config.sections.judge import (
    EmbeddingJudgeSettings,
    EndpointJudgeSettings,
    PeopleJudgeSettings,
    RewardModelJudgeSettings,
)
from config.work import JUDGE_PAIRS
from training.evaluation.judgement import (
    Agreement,
    Interval,
    agreement,
    clustered_interval,
    length_controlled,
    prediction_powered,
    smallest_effect,
)
from training.judging.embedding import EmbeddingJudge
from training.judging.endpoint import EndpointJudge, Unreadable
from training.judging.judge import Judge, Pair, Verdicts, verdicts
from training.judging.own_reward_model import OwnRewardModelJudge
from training.judging.people import votes_on
from training.judging.reward_model import RewardModelJudge
from training.modeling.tokenizer import Prompt, prompt_text, response_text

PREFERENCES = "data/prepared/preference"
CACHE = Path("evaluation/judge.sqlite")
KEYS = ("judge_accuracy", "judge_accuracy_shorter", "win_rate_judge", "win_rate_judge_length_controlled")
"""Each with _low and _high."""
NOTHING: dict[str, Any] = {f"{key}{end}": None for key in KEYS for end in ("", "_low", "_high")} | {
    "judge_pairs": None, "win_rate_judge_of": None, "judge_longer_wins": None, "position_flip_rate": None,
    "judge_smallest_effect": None,
}  # fmt: skip
FEWEST_VOTES = 10
"""People's votes that are put together with a judge's preferences."""


class Judged(NamedTuple):
    """What a judge says of two models, and what people's preferences say of the judge."""

    name: str
    fault: str | None
    """Why its verdict does not count."""
    preferences: Sequence[float | None] | None
    """Its preference for the first model's reply to each prompt, None where nobody voted; None without a verdict."""
    metrics: dict[str, Any]
    usd: float
    """US dollars paid to the judge."""


def judged(
    root: Path,
    params: Params,
    prompts: Sequence[Prompt],
    ours: Sequence[str],
    theirs: Sequence[str],
    paid: Callable[[int, float], None] = lambda tokens, usd: None,
    project: Path | None = None,
    stop: Callable[[], None] = lambda: None,
) -> Judged:
    """Judge the judge on the preferences prepared below `root`, then the replies. People's votes and an endpoint's
    answers are kept below `project`, by default `root` too. A judge whose verdicts do not count is not asked about the
    replies. Raises DataError, ModelError, EnvironmentFault or OverBudget.
    """
    project = root if project is None else project
    settings, confidence, seed = params.evaluate.judge, params.evaluate.confidence, params.seed
    names = [prompt_text(prompt) for prompt in prompts]
    if isinstance(settings, PeopleJudgeSettings):
        votes = votes_on(project / settings.path, names, ours, theirs)
        return verdict_of_people(votes, names, ours, theirs, settings.fewest, confidence)
    judge = chosen(root, project, params, paid, stop)
    pairs = human_pairs(root, "test")[:JUDGE_PAIRS]
    metrics: dict[str, Any] = NOTHING | {"judge": judge.name}
    try:
        on_people = verdicts(judge, pairs, seed)
        agreed = agreement_with_people(on_people, pairs, confidence)
        metrics = agreement_metrics(judge, agreed) | {"judge_unusable": on_people.unusable}
        if agreed.fault is not None:
            return Judged(judge.name, agreed.fault, None, metrics, judge.usd)
        judgements = verdicts(judge, [Pair(*replies) for replies in zip(prompts, ours, theirs, strict=True)], seed)
    except Unreadable as fault:
        return Judged(judge.name, str(fault), None, metrics | {"judge_fault": str(fault)}, judge.usd)
    usable = [i for i, preference in enumerate(judgements.preferences) if preference is not None]
    preferences = [judgements.preferences[i] or 0.0 for i in usable]
    names, mine, others = ([side[i] for i in usable] for side in (names, ours, theirs))
    metrics |= verdict_metrics(preferences, names, mine, others, confidence)
    metrics["judge_unusable"] += judgements.unusable
    votes = votes_on(project / JUDGE_VOTES, names, mine, others)
    if len(votes) >= FEWEST_VOTES:
        differ = [our != their for our, their in zip(mine, others, strict=True)]
        both = prediction_powered(preferences, votes, differ, confidence)
        metrics |= spread("win_rate_judge_and_votes", both.both)
        metrics |= spread("win_rate_votes", both.votes_alone) | {"judge_votes": both.votes}
    return Judged(judge.name, None, judgements.preferences, metrics, judge.usd)


def verdict_metrics(
    preferences: Sequence[float], names: Sequence[str], ours: Sequence[str],
    theirs: Sequence[str], confidence: float,
) -> dict[str, Any]:  # fmt: skip
    """Win rate, at equal length too, and what so many prompts could show."""
    our_chars, their_chars = ([len(text) for text in texts] for texts in (ours, theirs))
    return (
        spread("win_rate_judge", clustered_interval(preferences, names, confidence))
        | spread(
            "win_rate_judge_length_controlled",
            length_controlled(preferences, our_chars, their_chars, names, confidence),
        )
        | {
            "judge_smallest_effect": smallest_effect(preferences, names, confidence),
            "win_rate_judge_of": len(preferences),
            "ties_judge": sum(preference == 0.5 for preference in preferences),
        }
    )


def verdict_of_people(
    votes: Mapping[int, float], names: Sequence[str], ours: Sequence[str],
    theirs: Sequence[str], fewest: int, confidence: float,
) -> Judged:  # fmt: skip
    """The verdict of people; until there are enough votes there is none."""
    fault = None
    if len(votes) < fewest:
        fault = (
            f"{len(votes)} of evaluate.judge.fewest={fewest} prompts have a vote: rlhf label "
            "--judge, then start this again"
        )
    metrics: dict[str, Any] = NOTHING | {"judge": "people", "judge_fault": fault, "judge_votes": len(votes)}
    if fault is None:
        voted, mine, others = ([side[place] for place in votes] for side in (names, ours, theirs))
        metrics |= verdict_metrics(list(votes.values()), voted, mine, others, confidence)
    preferences = [votes.get(place) for place in range(len(names))]
    return Judged("people", fault, None if fault else preferences, metrics, 0.0)


def chosen(
    root: Path, project: Path, params: Params, paid: Callable[[int, float], None], stop: Callable[[], None]
) -> Judge:
    """The judge of `evaluate.judge`, trained where it learns."""
    settings = params.evaluate.judge
    if isinstance(settings, EndpointJudgeSettings):
        return EndpointJudge(settings, project / CACHE, paid, stop)
    if isinstance(settings, RewardModelJudgeSettings):
        if settings.path is not None:
            return RewardModelJudge(settings.path)
        human_pairs(root, "judge")
        return OwnRewardModelJudge(root, params)
    assert isinstance(settings, EmbeddingJudgeSettings)
    judge = EmbeddingJudge(Path(settings.path))
    judge.train(human_pairs(root, "judge"))
    return judge


def human_pairs(root: Path, split: str) -> list[Pair]:
    """Pairs whose first reply people prefer. Raises DataError if there are none."""
    path = root / PREFERENCES / f"{split}.jsonl"
    rows = list(jsonl.plain(path)) if path.exists() else []
    if not rows:
        raise DataError(
            f"{path} has no preferences for the judge to "
            + ("learn from: set data.judge_fraction, such as 0.2." if split == "judge" else
               "be judged on: add prompts, or raise data.test_fraction.")
        )  # fmt: skip
    return [Pair(row["prompt"], response_text(row["chosen"]), response_text(row["rejected"])) for row in rows]


def agreement_with_people(said: Verdicts, pairs: Sequence[Pair], confidence: float) -> Agreement:
    """How often a judge prefers what people prefer, the first reply of each pair, where both orders have an answer."""
    answered = [
        (pair, preference) for pair, preference in zip(pairs, said.preferences, strict=True) if preference is not None
    ]
    return agreement(
        [preference for _, preference in answered],
        said.flips,
        [len(pair.first) for pair, _ in answered],
        [len(pair.second) for pair, _ in answered],
        [prompt_text(pair.prompt) for pair, _ in answered],
        confidence,
    )


def agreement_metrics(judge: Judge, agreed: Agreement) -> dict[str, Any]:
    """The metrics of the judge itself; those of its verdict are null until there is one."""
    return (
        NOTHING
        | spread("judge_accuracy", agreed.accuracy)
        | ({} if agreed.shorter is None else spread("judge_accuracy_shorter", agreed.shorter))
        | {
            "judge": judge.name,
            "judge_fault": agreed.fault,
            "judge_pairs": agreed.pairs,
            "judge_longer_wins": agreed.longer,
            "position_flip_rate": agreed.flip_rate,
        }
    )


def spread(name: str, interval: Interval) -> dict[str, Any]:
    """name, name_low and name_high."""
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}
