import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from config.errors import ParamsError, TrainingDiverged
from tests.training.support.one_step import step_of_the_loop
from tests.training.support.processes import metric_rows
from tests.training.support.tiny import (
    files,
    open_stage,
    params,
    policy,
    prompts,
    random_responses,
    reward_model,
    stop_after_a_step,
    work,
)
from training.distributed.collectives import Backoff
from training.modeling.sequences import sequence_logprobs
from training.ppo import advantages
from training.process.usage import Work
from training.rl import rollout_phase
from training.rl.roles import Models, Roles
from training.rl.rollout_phase import own_logprobs, roll_out
from training.rollout.engine import Limits, Rollout, sampling_noise

Project = Callable[..., Path]
ENGINES = ("static", "paged")


def roles(settings: Any = None) -> SimpleNamespace:
    """A policy and what is asked of it, without the other three roles."""
    model = policy()

    def logprobs(rows: list[list[int]], starts: list[int], budget: int) -> list[torch.Tensor]:
        return sequence_logprobs(model, rows, starts, 1.0, budget)

    return SimpleNamespace(settings=settings, policy=model, trunk_value_head=None, logprobs=logprobs)


def pieces_of(size: int) -> Backoff:
    return lambda work: work(size)


@pytest.mark.parametrize("engine", ENGINES)
def test_responses_stand_beside_their_prompts(engine: str) -> None:
    chosen = params(ppo={"rollout_engine": engine, "responses_per_prompt": 2}).ppo
    batch = [prompt for prompt in prompts(4) for _ in range(2)]
    noise = sampling_noise(8, 6, 1)
    rollout = roll_out(pieces_of(3), roles().policy, batch, noise, chosen, Limits(6, -1, 0))  # type: ignore[arg-type]
    for i in (0, 5):
        alone = roll_out(pieces_of(3), roles().policy, [batch[i]] * 2, noise[[i, i]], chosen, Limits(6, -1, 0))  # type: ignore[arg-type]
        assert alone.responses[0] == rollout.responses[i]
        torch.testing.assert_close(alone.logprobs[0], rollout.logprobs[i], atol=1e-5, rtol=0)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_gap_is_the_distance_of_the_engines_logprobs_from_the_trainers(recompute: bool) -> None:
    chosen = params(ppo={"recompute_logprobs": recompute}).ppo
    starts = [4] * 40
    sequences = [[5, 6, 7, 8, *response] for response in random_responses([3] * 40)]
    trainer_logprobs = roles().logprobs(sequences, starts, 4096)
    off = [row + 0.25 for row in trainer_logprobs]
    off[0] = trainer_logprobs[0] - torch.tensor([0.25, 0.25, 0.5])
    counted = Work()
    learnt_from, weights, gap = own_logprobs(
        pieces_of(4096),
        roles(chosen),
        off,
        sequences,
        starts,
        counted,  # type: ignore[arg-type]
    )
    assert weights is None
    compared = 40 if recompute else 20  # every second one of 40 makes at least 16
    assert (counted.tokens, counted.sequences) == (7 * compared, compared)
    assert gap["rollout_logprob_gap"] == pytest.approx(0.25 + 0.25 / (3 * compared), abs=1e-5)
    assert gap["rollout_logprob_gap_max"] == pytest.approx(0.5, abs=1e-5)
    for row, same in zip(learnt_from, trainer_logprobs if recompute else off, strict=True):
        torch.testing.assert_close(row, same, atol=1e-5, rtol=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_with_recomputation_the_first_ratio_is_one_whatever_the_engine_says(
    project: Project, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    exact = rollout_phase.ENGINES[engine]

    def coarse(*arguments: object) -> Rollout:
        rollout = exact(*arguments)  # type: ignore[arg-type]
        return rollout._replace(logprobs=[row + 0.1 for row in rollout.logprobs])

    monkeypatch.setitem(rollout_phase.ENGINES, engine, coarse)
    for recompute, error in ((True, 0.0), (False, 1 - 2.718281828**-0.1)):
        root = project(
            "ppo",
            f"{engine}-{recompute}",
            ppo={"rollout_engine": engine, "recompute_logprobs": recompute, "updates": 1},
        )
        work(root, "ppo")
        values = metric_rows(root, "ppo")[0].values
        assert values["first_ratio_error"] == pytest.approx(error, abs=1e-4)
        assert values["rollout_logprob_gap"] == pytest.approx(0.1, abs=1e-4)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_sampler_whose_logprobs_are_off_stops_the_run_with_its_batch(
    project: Project, monkeypatch: pytest.MonkeyPatch, recompute: bool
) -> None:
    exact = rollout_phase.ENGINES["static"]

    def stale(*arguments: object) -> Rollout:
        rollout = exact(*arguments)  # type: ignore[arg-type]
        return rollout._replace(logprobs=[row - 5.0 for row in rollout.logprobs])

    monkeypatch.setitem(rollout_phase.ENGINES, "static", stale)
    root = project("ppo", ppo={"recompute_logprobs": recompute, "updates": 1})
    stage, run = open_stage(root, "ppo")
    with pytest.raises(TrainingDiverged, match=r"differ by 5 nats per token"):
        run(stage)
    assert metric_rows(root, "ppo")[-1].values["rollout_logprob_gap"] == pytest.approx(5, abs=1e-3)
    assert (root / "runs/ppo/diverged.jsonl").exists()


def test_both_engines_train_alike_and_the_paged_one_resumes_to_the_same_bits(project: Project) -> None:
    def trained(name: str, engine: str, updates: int) -> Path:
        root = project("ppo", name, ppo={"rollout_engine": engine, "updates": updates, "schedule": "constant"})
        work(root, "ppo")
        return root

    static, first = trained("static", "static", 2), trained("paged", "paged", 2)
    stopped = project("ppo", "stopped", ppo={"rollout_engine": "paged", "updates": 2, "schedule": "constant"})
    stop_after_a_step(stopped, "ppo")
    work(stopped, "ppo")
    assert files(first / "models/ppo") == files(stopped / "models/ppo")
    for row, other in zip(metric_rows(static, "ppo"), metric_rows(first, "ppo"), strict=True):
        assert row.values["score"] == pytest.approx(other.values["score"], abs=1e-4)
        assert other.values["rollout_logprob_gap_max"] < 1e-4


def test_values_from_the_rollout_need_the_static_engine() -> None:
    with pytest.raises(ParamsError, match=r"ppo\.rollout_engine=paged computes no values"):
        params(ppo={"rollout_engine": "paged", "layout": "shared_trunk"})


@pytest.mark.parametrize(("likelier", "weight"), [(1.5, 1.5), (0.5, 0.5), (3.0, 2.0)])
def test_tokens_that_vllm_sampled_weigh_what_they_are_likelier_to_the_policy(
    monkeypatch: pytest.MonkeyPatch, likelier: float, weight: float
) -> None:
    batch, responses = prompts(6), random_responses([3, 5, 4, 6, 2, 5])
    sequences = [[*prompt, *response] for prompt, response in zip(batch, responses, strict=True)]
    trainer_logprobs = roles().logprobs(sequences, [len(prompt) for prompt in batch], 4096)
    gradients = {}
    for engine in ("static", "vllm"):
        rloo = {"rollout_engine": engine, "recompute_logprobs": True, "responses_per_prompt": 2}
        chosen = params(rloo=rloo, align={"method": "rloo"}).rloo
        models = Models(policy(), policy(2), reward_model(), None, None)
        trained = Roles(models, chosen)
        step_of_the_loop(
            monkeypatch, trained, chosen, advantages("rloo"), batch, responses,
            [row - math.log(likelier) for row in trainer_logprobs], torch.arange(6.0), range(6),
        )  # fmt: skip
        gradients[engine] = {name: parameter.grad for name, parameter in trained.trainable().items()}
    for name, plain in gradients["static"].items():
        assert plain is not None
        torch.testing.assert_close(gradients["vllm"][name], weight * plain, rtol=1e-4, atol=1e-6)
