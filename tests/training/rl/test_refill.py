"""Which of the groups that were sampled are learnt from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import training.ppo as loop
from tests.training.support.processes import metric_rows
from tests.training.support.tiny import open_stage, params
from training.rl.episodes import choose_prompts
from training.rl.refill import Batches, Scored
from training.rollout.engine import Rollout


def batch(number: int, *scores: float) -> Scored:
    """Responses that say which they are: of batch 1 10, 11 and so on."""
    names = [10 * number + i for i in range(len(scores))]
    rollout = Rollout([[name] for name in names], [torch.tensor([1.0 * name]) for name in names], None)
    return Scored([name // 2 for name in names], rollout, torch.tensor(scores), torch.tensor(scores))


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
