"""What a run does that has diverged, and the one that goes on from where it went back to."""

from collections.abc import Callable
from pathlib import Path

import pytest

from config import jsonl
from config.errors import EXIT_CRASHED, EXIT_DIVERGED, RolledBack, TrainingDiverged
from tests.training.support.processes import metric_rows
from tests.training.support.tiny import files, open_stage, params, work
from training import ppo as loop
from training.rl.report import UpdateStatistics

RATES = ("learning_rate", "value_learning_rate")


@pytest.mark.parametrize("saved_before", [True, False], ids=["after a checkpoint", "before one"])
def test_a_diverged_run_goes_back_once_with_half_the_rate_and_keeps_its_batch(
    project: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, saved_before: bool
) -> None:
    """And ends as a run that began there with half the rate."""
    every = 1 if saved_before else 9
    settings = {"schedule": "constant", "checkpoint_every_updates": every, "updates": 3}
    root = project("ppo", ppo=settings | {"on_divergence": "roll_back"})
    check, breaks_at = loop.check_update, {2}

    def breaking(learnt: UpdateStatistics, update: int, section: str) -> None:
        check(learnt, update, section)
        if update in breaks_at:
            raise TrainingDiverged(f"entropy is 0 nats in update {update}.")

    monkeypatch.setattr(loop, "check_update", breaking)
    stage, run = open_stage(root, "ppo")
    back_to = 1 if saved_before else 0
    with pytest.raises(RolledBack) as said:
        run(stage)
    assert said.value.exit_code == EXIT_CRASHED, "tried again"
    assert str(said.value) == (
        "entropy is 0 nats in update 2. Its batch is in runs/ppo/diverged.jsonl. The next attempt "
        f"goes on after update {back_to} with half the learning rates."
    )
    kept = list(jsonl.plain(root / "runs/ppo/diverged.jsonl"))
    assert len(kept) == params().ppo.batch_size
    assert {row["step"] for row in kept} == {2}
    assert all(len(row["logprobs"]) == len(row["advantages"]) > 0 for row in kept)
    stage, run = open_stage(root, "ppo")
    with pytest.raises(TrainingDiverged, match=r"diverged\.jsonl\.$") as again:
        run(stage)  # once and no more
    assert again.value.exit_code == EXIT_DIVERGED
    breaks_at.clear()
    work(root, "ppo")
    rates = [row.values["learning_rate"] for row in metric_rows(root, "ppo")]
    whole = params().ppo.learning_rate
    before, after = rates[:1], rates[-(3 - back_to) :]
    assert before == [whole]
    assert after == [whole / 2] * (3 - back_to)
    if not saved_before:
        halved = {name: getattr(params().ppo, name) / 2 for name in RATES}
        twin = project("ppo", name="twin", ppo=settings | halved)
        work(twin, "ppo")
        assert files(root / "models/ppo") == files(twin / "models/ppo")
