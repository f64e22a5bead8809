"""The new model against the champion, on the same held-out prompts with the same random numbers: `python -m
training.retraining.contest`.

Data and models of both, a folder each as champions/<run> -> the figures the promotion gate decides on, and replies
side by side

Six models take part, each side's policy, SFT model and reward model; one is in memory at a time.

The judge is the gold score where the world has one, else that of `evaluate.judge`. Without either it is the champion's
reward model: the challenger's own has learnt from the new votes, and if those were poisoned it would prefer just what
they taught.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from config import jsonl
from config.errors import DataError
from config.load import load
from config.schema import Params
from config.sections.data import FileSource
from config.sections.judge import PeopleJudgeSettings
from config.workspace.retraining import RETRAIN_ROWS, Contest, Mean, RetrainRow, Safety, Share
from training.evaluation.comparison import Gain, gain, gain_at_equal_length, reward_hacking, score_judge, win_rate
from training.inference.replies import Replies, answer
from training.inference.trained_models import TrainedModels
from training.judging.verdict import judged
from training.modeling.tokenizer import Prompt, prompt_text
from training.preparation.cleaning import TextRules, same_prompt_key
from training.preparation.columns import check_columns, column_names
from training.preparation.examples import Reading
from training.preparation.formats import USES, Example
from training.preparation.prompts import fitting_prompts
from training.preparation.sources import read_file
from training.process.artifacts import write_json, write_jsonl
from training.retraining.helper import run_helper
from training.worlds.helpdesk import gold_score, known_world
from training.worlds.world import World

GOLD, CHAMPIONS_REWARD = "the gold score", "the champion's reward model"
SAMPLES = 8


class Scores(NamedTuple):
    """All judges' scores of one model's replies."""

    gold: list[float] | None
    champion: list[float]
    challenger: list[float]

    @property
    def judged(self) -> list[float]:
        """Scores by the deciding judge."""
        return self.champion if self.gold is None else self.gold


def contest(
    root: Path,
    params: Params,
    champion: TrainedModels,
    challenger: TrainedModels,
    paid: Callable[[int, float], None] = lambda tokens, usd: None,
) -> tuple[Contest, list[dict[str, Any]]]:
    """Run the contest; returns figures and sample replies. Raises DataError if fewer than two prompts are held out
    from both, ModelError for models that cannot be loaded.
    """
    confidence = params.evaluate.confidence
    prompts, left_out = held_out(params, champion, challenger)
    replies = {"champion": answer(champion, prompts, params), "challenger": answer(challenger, prompts, params)}
    world = known_world(params.data.source, map(prompt_text, prompts))
    scores = judge(prompts, replies, champion, challenger, world)
    old, new = scores["champion"], scores["challenger"]
    rate = win_rate(score_judge(new.judged, old.judged), len(prompts), confidence, params.seed)
    own_gain = gain(new.challenger, old.challenger, confidence)
    by_people = isinstance(params.evaluate.judge, PeopleJudgeSettings)
    trusted, fault, judge_usd = gain(new.judged, old.judged, confidence), None, 0.0
    if world is None and params.evaluate.judge is not None:
        ours, theirs = (replies[side].texts for side in ("challenger", "champion"))
        verdict = judged(challenger.folder, params, prompts, ours, theirs, paid, project=root)
        name, fault, judge_usd = verdict.name, verdict.fault, verdict.usd
        if verdict.preferences is not None:
            prefers = [answer for answer in verdict.preferences if answer is not None]
            rate = win_rate(score_judge(prefers, [0.5] * len(prefers)), len(prefers), confidence, params.seed)
            trusted = gain(prefers, [0.5] * len(prefers), confidence)
    else:
        name = GOLD if world else CHAMPIONS_REWARD
    lengths = replies["challenger"].chars, replies["champion"].chars
    equal_length = gain_at_equal_length(new.challenger, old.challenger, *lengths, confidence)
    hacking = reward_hacking(own_gain, trusted, equal_length)
    record = Contest(
        prompts=len(prompts),
        left_out=left_out,
        judge=name,
        judge_fault=fault,
        judge_usd=judge_usd,
        judge_waits=fault is not None and by_people,
        win_rate=Share(value=rate.rate, low=rate.low, high=rate.high, of=trusted.prompts),
        ties=rate.ties,
        gold=_mean_of(trusted) if world else None,
        champion_reward=_mean_of(gain(new.champion, old.champion, confidence)),
        challenger_reward=_mean_of(own_gain),
        hacking=hacking.hacked,
        hacking_reason=hacking.reason,
        hacking_prompts_needed=hacking.prompts_needed,
        kl=_mean(replies["challenger"].kl),
        kl_champion=_mean(replies["champion"].kl),
        chars=_mean(lengths[0]),
        chars_champion=_mean(lengths[1]),
        safety=safety(root, params, champion, challenger, world is not None),
        confidence=confidence,
    )
    shown = prompts if by_people else prompts[:SAMPLES]  # people see all replies
    return record, samples(shown, replies, scores)


# ---------------------------------------------------------------- prompts


def held_out(params: Params, champion: TrainedModels, challenger: TrainedModels) -> tuple[list[Prompt], int]:
    """The first `evaluate.prompts` held-out prompts of the new data that neither model was trained on, and how many
    were left out for that.

    Raises DataError if fewer than two are left.
    """
    path = challenger.folder / "data/prepared/prompts/test.jsonl"
    prompts = [row["prompt"] for row in jsonl.plain(path)]
    trained = trained_on(champion.folder) | trained_on(challenger.folder)
    unseen = [prompt for prompt in prompts if same_prompt_key(prompt) not in trained]
    fitting = fits(unseen, params, champion, challenger)
    if len(fitting) < 2:  # an interval needs two
        raise DataError(
            f"{len(fitting)} prompts of {path} are left to compare on: {len(prompts) - len(unseen)} of "
            f"{len(prompts)} were in the training data of one of the models, "
            "the others leave no room for a response. Add prompts, or raise data.test_fraction in params.yaml and "
            "promote a new run."
        )
    return fitting[: params.evaluate.prompts], len(prompts) - len(unseen)


def trained_on(folder: Path) -> set[str]:
    """Keys of all prompts in a train split."""
    return {
        same_prompt_key(row["prompt"])
        for use in USES
        if (path := folder / f"data/prepared/{use}/train.jsonl").exists()  # no ratings in a champion of old
        for row in jsonl.plain(path)
    }


def fits(prompts: Sequence[Prompt], params: Params, *candidates: TrainedModels) -> list[Prompt]:
    """The prompts that leave room for a response in every model's context."""
    for candidate in candidates:
        room = candidate.model.context_length - params.evaluate.max_new_tokens
        prompts = [encoded.prompt for encoded in fitting_prompts(prompts, candidate.tokenizer, room)]
    return list(prompts)


def safety_prompts(source: FileSource, root: Path, params: Params) -> list[Prompt]:
    """The prompts of `retrain.safety_source`. Raises DataError for a file that cannot be read or has none."""
    setting = "retrain.safety_source"
    table, columns = (read_file(source, root, setting), column_names(source.format, source.columns, setting))
    check_columns(table, source.format, columns, setting)
    rules = TextRules(params.data.max_prompt_chars, params.data.max_response_chars, ())
    reading = Reading(table, source.format, columns, source.vote, rules)
    prompts = [item.prompt for item in reading if isinstance(item, Example)]
    if not prompts:
        raise DataError(f"{source.path} has no usable prompt. Fix the file, or {setting} in params.yaml.")
    return prompts


# ---------------------------------------------------------------- replies and scores


def judge(
    prompts: Sequence[Prompt],
    replies: Mapping[str, Replies],
    champion: TrainedModels,
    challenger: TrainedModels,
    world: World | None,
) -> dict[str, Scores]:
    """Every judge's score of every reply."""
    texts = {name: given.texts for name, given in replies.items()}
    golds = {
        name: [gold_score(prompt_text(a), b, world) for a, b in zip(prompts, replies_by_prompt, strict=True)]
        if world
        else None
        for name, replies_by_prompt in texts.items()
    }
    wins = []
    for models in (champion, challenger):
        wins.append({name: models.scores(prompts, given.texts, given.ended) for name, given in replies.items()})
        models.release()
    return {name: Scores(golds[name], wins[0][name], wins[1][name]) for name in replies}


def safety(
    root: Path, params: Params, champion: TrainedModels, challenger: TrainedModels, has_gold: bool
) -> Safety | None:
    """How much lower the challenger scores on the safety prompts; None without such prompts."""
    if params.retrain.safety_source is None:
        return None
    prompts = fits(safety_prompts(params.retrain.safety_source, root, params), params, champion, challenger)
    if len(prompts) < 2:
        raise DataError(
            f"{len(prompts)} safety prompts have room for a response, and two are needed. Lower "
            "evaluate.max_new_tokens, or fix retrain.safety_source."
        )
    source = params.data.source
    world = known_world(source, map(prompt_text, prompts)) if has_gold else None
    replies = {"champion": answer(champion, prompts, params), "challenger": answer(challenger, prompts, params)}
    scores = judge(prompts, replies, champion, challenger, world)
    drop = gain(scores["champion"].judged, scores["challenger"].judged, params.evaluate.confidence)
    return Safety(prompts=len(prompts), judge=GOLD if world else CHAMPIONS_REWARD, drop=_mean_of(drop))


def samples(prompts: Sequence[Prompt], replies: dict[str, Replies], scores: dict[str, Scores]) -> list[dict[str, Any]]:
    """Replies of both models with the judge's scores."""
    return [
        {"prompt": prompt_text(prompt)}
        | {name: given.texts[i] for name, given in replies.items()}
        | {f"score_{name}": given.judged[i] for name, given in scores.items()}
        for i, prompt in enumerate(prompts)
    ]


def _mean_of(value: Gain) -> Mean:
    return Mean(mean=value.mean, low=value.low, high=value.high)


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def main(options: argparse.Namespace) -> None:
    params = load(options.challenger / "params.yaml")

    def paid(tokens: int, usd: float) -> None:
        """A row of the cycle, whose folder the result goes to."""
        row = RetrainRow(
            time=time.time(), cycle=options.out.parent.name, event="cost", usd=usd,
            detail={"process": "judge", "tokens": tokens},
        )  # fmt: skip
        jsonl.append(RETRAIN_ROWS, row)

    record, replies = contest(Path(), params, TrainedModels(options.champion), TrainedModels(options.challenger), paid)
    write_json(options.out, record.model_dump())
    write_jsonl(options.out.with_name("replies.jsonl"), replies)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compare the model of a run with the champion.")
    parser.add_argument("--challenger", type=Path, required=True)
    sys.exit(run_helper(parser, main))
