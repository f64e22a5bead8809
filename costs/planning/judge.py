"""The judge of an evaluation (evaluate.judge): its time, and what an endpoint is paid."""

from dataclasses import replace
from typing import NamedTuple

from config.schema import Params
from config.sections.judge import EmbeddingJudgeSettings, EndpointJudgeSettings, RewardModelJudgeSettings
from config.work import JUDGE_PAIRS
from costs.formulas.compute import Work, forward_pass
from costs.formulas.time import duration
from costs.planning.models import base_shape, named_shape
from costs.planning.plans import PhasePlan, StagePlan, Usd, lasting
from costs.planning.rows import Rows
from costs.planning.settings import held_out_prompts, response_tokens, setting_of
from costs.planning.stages import plan_stage
from costs.planning.target import Target

EMBEDDING_START_SECONDS = 4.0
"""Imports of scikit-learn and the encoder's weights."""
EMBEDDING_TOKEN_SECONDS = 1.3e-4
"""A token of a text through all-MiniLM-L6-v2: 16 s for PandaLM's 2,000 texts of 60 tokens, on two cores of an AMD
EPYC.
"""
ENDPOINT_SECONDS = 1.0
"""One answer of an endpoint, which writes a single letter: an assumption."""
QUESTION_TOKENS = 60.0
"""Tokens of a question beside the prompt and the two replies (training/judging/endpoint.py)."""
ANSWER_TOKENS = 2.0


class JudgePlan(NamedTuple):
    """The phase `judge` of an evaluation."""

    seconds: float
    usd: float
    """Paid to the endpoint, besides the devices."""
    assumption: str


def with_judge(evaluation: StagePlan, params: Params, target: Target, rows: Rows) -> StagePlan:
    """The plan of an evaluation with its judge, if it has one that takes time."""
    judge = judge_plan(params, target, rows)
    if judge is None:
        return evaluation
    price = target.of(params, "evaluate").price
    hours = judge.seconds / 3600 * evaluation.rented
    phase = PhasePlan(
        "judge", 0.0, 0.0, judge.seconds, "fixed", hours * price.expected + judge.usd, paid_usd=judge.usd
    )
    longer = lasting(evaluation, evaluation.seconds + judge.seconds)
    return replace(
        longer,
        phases=(*evaluation.phases, phase),
        usd=longer.usd + Usd(judge.usd, judge.usd, judge.usd),
        assumptions=(*evaluation.assumptions, judge.assumption),
    )


def judge_plan(params: Params, target: Target, rows: Rows) -> JudgePlan | None:
    """Time and money of the judge: it compares held-out pairs of people first, then the replies. People take no time
    of the run's. Planned as if its verdict counts.
    """
    settings, prompts = params.evaluate.judge, held_out_prompts(params, rows)
    human_pairs = min(rows.preference_held_out, 1.0 * JUDGE_PAIRS)
    learnt = rows.preference * params.data.judge_fraction / (1 - sum(params.data.fractions))
    reply = response_tokens(rows, params.evaluate.max_new_tokens)
    reply_tokens = max(0.0, rows.preference_tokens - rows.prompt_tokens)
    pairs = human_pairs + prompts
    replies = 2 * (human_pairs * reply_tokens + prompts * reply)
    if isinstance(settings, EmbeddingJudgeSettings):
        tokens = replies + 2 * learnt * reply_tokens + (pairs + learnt) * rows.prompt_tokens
        seconds = EMBEDDING_START_SECONDS + tokens * EMBEDDING_TOKEN_SECONDS
        return JudgePlan(seconds, 0.0, f"the judge embeds {tokens:,.0f} tokens")
    if isinstance(settings, EndpointJudgeSettings):
        read = 2 * (pairs * (QUESTION_TOKENS + rows.prompt_tokens) + replies)
        usd = 1e-6 * (
            read * settings.usd_per_million_prompt_tokens
            + 2 * pairs * ANSWER_TOKENS * settings.usd_per_million_reply_tokens
        )
        limited = usd if settings.max_usd is None else min(usd, settings.max_usd)
        return JudgePlan(
            2 * pairs / settings.parallel * ENDPOINT_SECONDS,
            limited,
            f"the endpoint answers {2 * pairs:,.0f} questions, {ENDPOINT_SECONDS:g} s and "
            f"${usd / (2 * pairs):.2g} each",
        )
    if isinstance(settings, RewardModelJudgeSettings):
        trained = 0.0
        if settings.path is None:
            judge_rows = replace(rows, preference=learnt)
            model = base_shape(params, target.root)
            reward = setting_of(params, target, "reward", judge_rows, model)
            trained = plan_stage(reward, target.of(params, "reward").price, False).seconds
            shape = reward.model
        else:
            shape = named_shape(settings.path, target.root).scored
        evaluation = setting_of(params, target, "evaluate", rows, base_shape(params, target.root))
        batch, mean = evaluation.levers.micro_batch, evaluation.workload.mean_tokens
        once: Work = forward_pass(evaluation, shape, evaluation.levers, batch, mean, 0.0)
        seconds = trained + duration(once, evaluation).seconds * 2 * pairs / batch
        return JudgePlan(seconds, 0.0, f"the judge scores {2 * pairs:,.0f} replies")
    return None
