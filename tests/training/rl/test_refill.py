"""Which of the groups that were sampled are learnt from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import training.ppo as loop
from tests.training.support.processes import metric_rows
from tests.training.support.tiny import files, open_stage, params, stop_after_a_step, work
from training.rl.episodes import choose_prompts
from training.rl.refill import Batches, Scored
from training.rollout.engine import Rollout


def batch(number: int, *scores: float) -> Scored:
    """Responses that say which they are: of batch 1 10, 11 and so on."""
    names = [10 * number + i for i in range(len(scores))]
    rollout = Rollout([[name] for name in names], [torch.tensor([1.0 * name]) for name in names], None)
    score_B = torch.tensor(scores, dtype=torch.float32)
    return Scored([name // 2 for name in names], rollout, score_B, score_B)


def batches(most: int | None, *given: Scored) -> Batches:
    refill = None if most is None else {"most_batches": most}
    result = Batches(params(grpo={"responses_per_prompt": 2, "refill": refill}).grpo)
    for scored in given:
        assert result.wants()
        result.add(scored)
    return result


def names(scored: Scored) -> list[int]:
    return [response[0] for response in scored.rollout.responses]


def test_without_refill_a_batch_is_taken_as_it_is() -> None:
    given = batch(1, 1, 1, 0, 1)
    result = batches(None, given)
    assert not result.wants()
    taken, shares = result.chosen()
    assert taken is given
    assert shares == {"equal_groups": 0.5, "equal_groups_taken": 0.5}


def test_groups_without_a_difference_are_replaced_by_later_ones() -> None:
    result = batches(3, batch(1, 1, 1, 0, 1), batch(2, 0, 0, 1, 0))
    assert not result.wants()
    taken, shares = result.chosen()
    assert names(taken) == [12, 13, 22, 23]
    assert taken.places == [6, 6, 11, 11]
    assert taken.score_B.tolist() == [0, 1, 1, 0]
    assert [float(row) for row in taken.rollout.logprobs] == [12, 13, 22, 23]
    assert shares == {"equal_groups": 0.5, "equal_groups_taken": 0.0}


def test_a_batch_that_does_not_fill_up_keeps_groups_of_the_first() -> None:
    result = batches(3, batch(1, 1, 1, 0, 0), batch(2, 0, 0, 1, 0), batch(3, 1, 1, 1, 1))
    assert not result.wants()
    taken, shares = result.chosen()
    assert names(taken) == [22, 23, 10, 11]
    assert shares["equal_groups"] == pytest.approx(5 / 6)
    assert shares["equal_groups_taken"] == 0.5


def test_no_more_is_taken_than_a_batch_has() -> None:
    taken, _ = batches(2, batch(1, 1, 1, 0, 1), batch(2, 0, 1, 1, 0)).chosen()
    assert names(taken) == [12, 13, 20, 21]


def test_further_batches_have_an_order_of_their_own() -> None:
    settings = params(grpo={"responses_per_prompt": 2}).grpo
    chosen = [choose_prompts(range(1000), settings, 3, 5, further) for further in (0, 1, 2, 1)]
    assert chosen[1] == chosen[3]
    assert chosen[0] != chosen[1] != chosen[2]
    assert chosen[0] == choose_prompts(range(1000), settings, 3, 5)


def test_a_resting_prompt_is_replaced_by_another_of_the_pass() -> None:
    settings = params(grpo={"responses_per_prompt": 2, "batch_size": 8}).grpo
    usual = choose_prompts(range(1000), settings, 3, 5)
    rests = {usual[2], usual[6], 999}
    chosen = choose_prompts(range(1000), settings, 3, 5, 0, rests)
    assert chosen == choose_prompts(range(1000), settings, 3, 5, 0, rests)
    assert (chosen[:2], chosen[4:6]) == (usual[:2], usual[4:6])
    assert not rests & {*chosen}
    assert len({*chosen}) == 4
    assert chosen[2] == chosen[3]


def test_where_all_prompts_rest_they_are_sampled_all_the_same() -> None:
    settings = params(grpo={"responses_per_prompt": 2, "batch_size": 8}).grpo
    usual = choose_prompts(range(6), settings, 3, 5)
    assert choose_prompts(range(6), settings, 3, 5, 0, {*range(6)}) == usual


def test_prompts_rest_that_were_solved_every_time_until_they_come_back() -> None:
    settings = params(grpo={"responses_per_prompt": 2, "refill": {"most_batches": 2, "revisit": 3}}).grpo
    result = Batches(settings)
    result.add(batch(1, 1, 1, 0, 0))
    result.add(batch(2, 1, 0, 1, 1))
    # of the prompts 5, 6, 10 and 11 the first and the last were solved
    assert result.resting([(7, 4), (8, 5)], 4) == [(8, 5), (5, 7), (11, 7)]
    assert batches(2, batch(1, 1, 1, 0, 0)).resting([(7, 5)], 4) == [(7, 5)]
    same = Batches(settings)
    same.add(batch(1, 0, 0, 0, 0))
    assert same.resting([], 4) == []


def test_a_run_with_resting_prompts_resumes_to_the_bit(
    project: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "scores", lambda _, __, rows: torch.tensor([1.0 * (len(ids) % 3 > 0) for ids in rows]))
    section = {"responses_per_prompt": 2, "checkpoint_every_updates": 1, "updates": 6,
               "refill": {"most_batches": 2, "revisit": 4}}  # fmt: skip
    straight, interrupted = (project("grpo", name, grpo=section) for name in ("straight", "interrupted"))
    rested = []

    def choose(prompts: Any, settings: Any, seed: int, update: int, further: int, resting: set[int]) -> list[int]:
        rested.append((update, further, sorted(resting)))
        chosen: list[int] = choose_prompts(prompts, settings, seed, update, further, resting)
        assert not resting & {*chosen}
        return chosen

    monkeypatch.setattr(loop, "choose_prompts", choose)
    work(straight, "grpo")
    first, rested[:] = list(rested), []
    for _ in range(3):
        stop_after_a_step(interrupted, "grpo")
    work(interrupted, "grpo")
    assert rested == first
    assert any(prompts for _, _, prompts in first)
    assert files(interrupted / "models/grpo") == files(straight / "models/grpo")


@pytest.mark.parametrize("most", [None, 4])
def test_the_loop_learns_from_groups_that_differ(
    project: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, most: int | None
) -> None:
    refill = None if most is None else {"most_batches": most}
    root = project("grpo", grpo={"updates": 3, "responses_per_prompt": 2, "refill": refill})
    monkeypatch.setattr(loop, "scores", lambda _, __, rows: torch.tensor([1.0 * (len(ids) % 2) for ids in rows]))
    stage, run = open_stage(root, "grpo")
    run(stage)
    rows: list[dict[str, Any]] = [row.values for row in metric_rows(root, "grpo")]
    assert all(row["equal_groups"] > 0 for row in rows)
    if most is None:
        assert all(row["equal_groups_taken"] == row["equal_groups"] for row in rows)
    else:
        assert all(row["equal_groups_taken"] < row["equal_groups"] for row in rows)
        assert min(row["equal_groups_taken"] for row in rows) == 0
