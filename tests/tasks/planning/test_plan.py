"""What a run will cost from here on, and whether its budget allows that: over real files and a real DVC."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from dvc.repo import Repo

from config import jsonl
from config.errors import CostError, ParamsError
from config.load import load
from config.records import CHANGED_CODE_VARIABLE, AttemptRow, UsageRow, stages_of
from config.schema import Params
from config.stage_code import CODE
from costs.ledger.budget import total
from costs.planning.planner import plan
from costs.planning.target import find_target
from tasks.dvc.status import StageAtWork, is_unchanged
from tasks.planning.budget_gate import gate, needs_approval
from tasks.planning.plan_text import markdown, summary
from tasks.planning.prepared import Prepared, Unplannable, done_share, keep, prepare
from tasks.planning.retraining import with_cycle
from tasks.run.run import Run, begin_run
from tasks.run.stop import StopRequest
from tasks.stage.runner import run_stage
from tests.support.stage_project import copy_of, make_project, stale_stages

pytestmark = pytest.mark.integration

STAGES = stages_of("ppo")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path / "project", tmp_path / "remote", STAGES)


def params(project: Path, *changes: str) -> Params:
    return load(project / "params.yaml", ["prices.usd_per_device_hour=3.6", *changes])


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project and its remote after a run of all stages."""
    folder = tmp_path_factory.mktemp("done")
    root = make_project(folder / "project", folder / "remote", STAGES)
    run = begin_run(root, "earlier", params(root), {})
    for stage in STAGES:
        run_stage(run, stage, StopRequest(), lambda _: None)
    run.record("end", state="completed")
    return folder


@pytest.fixture
def finished(done: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return copy_of(done, tmp_path / "finished")


LONG = ("sft.epochs=100.0", "sft.max_steps=600")


def stopped_in_sft(project: Path, seconds: float, *changes: str) -> Run:
    """A run that spent `seconds` on sft, whose checkpoint is that of step 150, and was then stopped."""
    run = begin_run(project, "stopped", params(project, *changes), {})
    folder = project / "runs" / "sft"
    common = {"time": 1000.0, "run_id": "stopped", "attempt": 1, "device": "cpu", "world_size": 1}
    jsonl.append(folder / "attempts.jsonl", AttemptRow(event="start", fingerprint="f1", pid=1, step=0, **common))
    jsonl.append(
        folder / "usage.jsonl",
        UsageRow(step=150, phase="train", seconds=seconds, tokens=1, sequences=1, peak_bytes=1, **common),
    )
    jsonl.append(
        folder / "attempts.jsonl", AttemptRow(event="end", fingerprint="f1", pid=1, step=150, exit_code=75, **common)
    )
    manifest = project / "checkpoints" / "sft" / "f1" / "step-00000150" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    run.record("end", state="stopped")
    return run


# ---------------------------------------------------------------- what is still to be done


def test_paid_work_that_other_params_leave_aside_is_named(project: Path) -> None:
    stopped_in_sft(project, 40.0)
    assert not any("left aside" in line for line in summary(prepare(project, params(project, "ppo.updates=99"))))
    prepared = prepare(project, params(project, "sft.max_steps=900"))
    [line] = [line for line in summary(prepared) if "left aside" in line]
    assert line.startswith("sft: $0.040 and 40 s are left aside: its checkpoint after step 150 has sft.max_steps ")
    assert line in markdown(prepared)


def test_every_stage_is_ahead_of_the_first_run_and_none_of_an_unchanged_one(project: Path, finished: Path) -> None:
    assert stale_stages(project, params(project), STAGES) == list(STAGES)
    project = finished
    before = {path: path.read_bytes() for path in (project / "params.yaml", project / "dvc.lock")}
    assert (
        stale_stages(project, params(project, "prices.watts=9", "budget.max_usd=3", "tracking.experiment=x"), STAGES)
        == []
    )
    assert stale_stages(project, params(project, "reward.epochs=9.0"), STAGES) == ["reward", "ppo", "evaluate"]
    (project / "sft.out").write_text("changed by hand")
    assert stale_stages(project, params(project), STAGES) == [], "what dvc.lock has comes back from DVC's cache"
    shutil.rmtree(project / ".dvc/cache/files")
    assert stale_stages(project, params(project), STAGES) == list(STAGES)
    assert {path: path.read_bytes() for path in before} == before
    prepared = prepare(project, params(project, "evaluate.prompts=7"))
    assert list(prepared.ahead) == list(STAGES)


def test_a_plan_needs_no_lock_of_dvc(finished: Path) -> None:
    project = finished
    with Repo(str(project)) as repo, repo.lock:
        with pytest.raises(StageAtWork, match="another process works on the files of ppo"):
            is_unchanged(project, "ppo")
        assert stale_stages(project, params(project), STAGES) == []


def test_a_plan_of_what_is_ahead_is_that_of_its_stages(project: Path) -> None:
    prepared = prepare(project, params(project))
    assert prepared.plan is not None
    assert prepared.ahead_total.usd == pytest.approx(prepared.plan.total["usd"]["expected"])
    assert prepared.ahead_total.seconds == pytest.approx(prepared.plan.total["seconds"])
    assert 0 < prepared.fixed.usd < prepared.ahead_total.usd
    assert prepared.continues is None


def test_a_stopped_run_is_gone_on_from_with_what_it_spent_and_what_it_did(project: Path) -> None:
    fresh = prepare(project, params(project, *LONG))
    stopped_in_sft(project, 40.0, *LONG)
    assert done_share(project, params(project, *LONG), "sft") == 0.25
    going_on = prepare(project, params(project, *LONG, "budget.max_usd=9"))
    assert going_on.continues == "stopped"
    assert total(going_on.spent) == pytest.approx((0.040, 40.0))
    assert fresh.plan is not None
    (sft,) = (stage for stage in fresh.plan.stages if stage.stage == "sft")
    trained = sum(phase.seconds for phase in sft.phases if phase.bound != "fixed")
    assert fresh.ahead["sft"].seconds - going_on.ahead["sft"].seconds == pytest.approx(0.25 * trained)
    assert going_on.ahead["ppo"] == fresh.ahead["ppo"]
    other = prepare(project, params(project, "sft.epochs=99.0", "sft.max_steps=601"))
    assert (other.continues, total(other.spent)) == (None, (0.0, 0.0))


# ---------------------------------------------------------------- the gate


def refusal(project: Path, *changes: str) -> str:
    with pytest.raises(CostError) as refused:
        gate(project, prepare(project, params(project, *changes)))
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_without_a_limit_or_below_it_a_run_may_start(project: Path) -> None:
    planned = prepare(project, params(project)).ahead_total
    assert gate(project, prepare(project, params(project))) is None
    assert gate(project, prepare(project, params(project, f"budget.max_usd={planned.usd * 1.01}"))) is None
    assert (
        gate(project, prepare(project, params(project, f"budget.max_hours={planned.seconds / 3600 * 1.01}"))) is None
    )


def test_an_hour_of_a_stage_may_not_cost_more_than_it_may(project: Path) -> None:
    dear = ("where.ppo={processes: 2}", "prices.usd_per_device_hour=3.0", "prices.device=rtx4090")
    said = refusal(project, *dear, "budget.max_usd_per_hour=5")
    assert "data is planned above its budget: 6 USD/h are planned" in said  # rented together
    assert "budget.max_usd_per_hour=5 does not allow it. Give data fewer or cheaper devices" in said
    allowed = params(project, *dear, "budget.max_usd_per_hour=6")
    assert gate(project, prepare(project, allowed)) is None
    warned = params(project, *dear, "budget.max_usd_per_hour=5", "budget.gate=warn")
    assert (gate(project, prepare(project, warned)) or "").endswith("the run starts.")


def test_all_runs_of_a_month_share_its_budget(project: Path) -> None:
    stopped_in_sft(project, 40.0, *LONG)  # 0.04 USD this month
    planned = prepare(project, params(project)).ahead_total.usd
    said = refusal(project, f"budget.monthly_usd={planned + 0.03}")
    assert "0.04 USD are spent and " in said
    assert f"budget.monthly_usd={planned + 0.03:g} does not allow it" in said
    enough = params(project, f"budget.monthly_usd={planned + 0.05}")
    assert gate(project, prepare(project, enough)) is None


def test_a_plan_above_the_budget_is_refused_with_the_cheapest_that_fits(project: Path) -> None:
    slow = ("sft.micro_batch_size=1", "reward.micro_batch_size=1", "reward.activation_checkpointing=true")
    planned = prepare(project, params(project, *slow)).ahead_total.usd
    said = refusal(project, *slow, f"budget.max_usd={planned * 0.95}")
    assert "budget.max_usd=" in said
    assert "The cheapest plan that fits needs" in said
    changes = [word for before, word in zip(said.split(), said.split()[1:], strict=False) if before == "--set"]
    assert "reward.activation_checkpointing=false." in changes or "reward.activation_checkpointing=false" in changes
    better = [change.rstrip(".") for change in changes]
    assert gate(project, prepare(project, params(project, *slow, *better, f"budget.max_usd={planned * 0.95}"))) is None


def test_where_the_cheapest_levers_do_not_fit_the_refusal_says_what_they_need(project: Path) -> None:
    slow = ("reward.activation_checkpointing=true",)
    planned = prepare(project, params(project, *slow)).ahead_total.usd
    said = refusal(project, *slow, f"budget.max_usd={planned * 0.5}")
    assert "Even the cheapest levers need" in said
    assert "--set reward.activation_checkpointing=false" in said


def test_where_no_lever_helps_the_refusal_says_how_much_of_the_training_fits(project: Path) -> None:
    prepared = prepare(project, params(project))
    training = prepared.ahead_total.usd - prepared.fixed.usd
    said = refusal(project, f"budget.max_usd={prepared.fixed.usd + training / 4}")
    assert "No lever makes it cheaper" in said
    assert "about 25% of the training fits" in said


def test_a_budget_below_the_fixed_cost_says_so(project: Path) -> None:
    assert "The fixed cost alone is" in refusal(project, "budget.max_usd=0.0001")
    assert "The fixed cost alone is" in refusal(project, "budget.max_hours=0.0001")


def test_a_limit_of_one_stage_and_one_on_hours_are_kept_too(project: Path) -> None:
    assert refusal(project, "budget.max_usd_by_stage.reward=0.01").startswith("reward is planned above its budget")
    assert "budget.max_hours_by_stage.ppo=0.001" in refusal(project, "budget.max_hours_by_stage.ppo=0.001")
    assert "budget.max_hours=0.02" in refusal(project, "budget.max_hours=0.02")


def test_what_was_spent_before_counts(project: Path) -> None:
    planned = prepare(project, params(project)).ahead_total.usd
    budget = f"budget.max_usd={planned + 0.1}"
    assert gate(project, prepare(project, params(project, budget))) is None
    stopped_in_sft(project, 200.0)
    assert "0.2 USD are spent" in refusal(project, budget)


def test_a_gate_that_warns_lets_the_run_start(project: Path) -> None:
    warning = gate(project, prepare(project, params(project, "budget.max_usd=0.0001", "budget.gate=warn")))
    assert warning is not None
    assert "stops there" in warning


# ---------------------------------------------------------------- what cannot be planned


def test_an_unknown_model_can_be_run_without_a_budget_and_not_with_one(project: Path) -> None:
    unknown = ("model.path=someone/unheard-of", "model.random=null")
    prepared = prepare(project, params(project, *unknown))
    assert isinstance(prepared, Unplannable)
    assert "unheard-of" in summary(prepared)[0]
    for limit in ("budget.max_usd=5", "budget.approval_usd=5"):
        with pytest.raises(CostError, match="unheard-of"):
            prepare(project, params(project, *unknown, limit))


# ---------------------------------------------------------------- approval, and what is kept


def test_only_what_is_ahead_needs_approval(project: Path, finished: Path) -> None:
    threshold = prepare(project, params(project)).ahead_total.usd

    def ask(factor: float) -> Prepared:
        return prepare(project, params(project, f"budget.approval_usd={threshold * factor}"))

    assert needs_approval(ask(0.99))
    assert not needs_approval(ask(1.01))
    assert not needs_approval(prepare(project, params(project)))
    assert not needs_approval(prepare(finished, params(finished, "budget.approval_usd=0")))


def test_the_plan_is_kept_with_the_run_and_can_be_read_by_people(project: Path, tmp_path: Path) -> None:
    prepared = prepare(project, params(project, "budget.max_usd=9"))
    keep(tmp_path, prepared)
    kept = json.loads((tmp_path / "plan.json").read_text())
    assert [stage["stage"] for stage in kept["stages"]] == list(STAGES)
    assert kept["total"]["usd"]["expected"] == pytest.approx(prepared.ahead_total.usd)
    assert (kept["usd_per_device_hour"], kept["gpus"], kept["budget"]["max_usd"]) == (3.6, 1, 9)
    page = markdown(prepared)
    assert all(f"| {stage} |" in page for stage in STAGES)
    assert "`budget.max_usd`: 9 USD" in page


def test_the_gate_asks_for_what_rlhf_plan_shows_wherever_stages_are_placed(project: Path) -> None:
    placed = params(
        project,
        "where.sft.pool=gpus",
        "where.reward.processes=2",
        "prices.device=rtx4090",
        "prices.device_by_pool={gpus: a100-80}",
        "prices.usd_per_device_hour_by_pool={gpus: 36.0}",
    )
    prepared = prepare(project, placed)
    shown = plan(placed, find_target(placed, None, None, None, project))
    assert {stage.stage: stage.usd.expected for stage in shown.stages} == pytest.approx(
        {stage: cost.usd for stage, cost in prepared.ahead.items()}
    )
    assert prepared.ahead_total.usd == pytest.approx(shown.total["usd"]["expected"])
    # the second device of the reward model waits while the others of this machine run
    assert shown.total["idle_usd"] > 0
    assert {stage.stage: stage.rented for stage in shown.stages} == {
        "data": 2, "sft": 1, "reward": 2, "ppo": 2, "evaluate": 2,
    }  # fmt: skip


def test_a_cycle_is_planned_with_its_own_processes_and_approved_of_as_a_whole(project: Path) -> None:
    run = prepare(project, params(project))
    cycle = with_cycle(run)
    assert run.plan is not None
    assert cycle.plan is not None
    examination, *stages, contest = cycle.plan.stages
    assert (examination.stage, tuple(stages), contest.stage) == ("examine", run.plan.stages, "contest")
    assert list(cycle.ahead) == ["examine", *run.ahead, "contest"]
    cycle_usd = [examination.usd.expected, contest.usd.expected]
    assert min(cycle_usd) > 0
    whole = run.ahead_total.usd + sum(cycle_usd)
    assert cycle.ahead_total.usd == pytest.approx(whole)
    for by_own in cycle_usd:
        above = params(project, f"budget.approval_usd={whole - by_own / 2}")
        assert not needs_approval(prepare(project, above))
        assert needs_approval(with_cycle(prepare(project, above)))
    assert all(f"| {name} |" in markdown(cycle) for name in ("examine", "contest"))
    assert all(name in summary(cycle)[0] for name in ("examine", "contest"))


def test_what_has_been_examined_is_not_planned_to_be_paid_again(project: Path) -> None:
    run = prepare(project, params(project))
    before, after = with_cycle(run), with_cycle(run, examined=True)
    assert before.plan is not None
    assert after.plan is not None
    assert after.plan.stages == before.plan.stages[1:]
    assert after.ahead == {name: cost for name, cost in before.ahead.items() if name != "examine"}


# ---------------------------------------------------------------- checkpoints of other code


STEPS = "sft.max_steps=300"


def depend_on_code(project: Path) -> None:
    """sft depends on stage.py, which is another one now than when its checkpoint was made."""
    pipeline = yaml.safe_load((project / "dvc.yaml").read_text())
    pipeline["stages"]["sft"]["deps"].append("stage.py")
    (project / "dvc.yaml").write_text(yaml.safe_dump(pipeline))
    checkpoint = project / "checkpoints/sft/f1/step-00000150"
    (checkpoint / CODE).write_text(json.dumps({"stage.py": "0" * 64}))


def test_where_code_has_changed_a_run_is_planned_to_start_over_and_says_so(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CHANGED_CODE_VARIABLE, raising=False)
    stopped_in_sft(project, 100.0, STEPS)
    as_it_was = prepare(project, params(project, STEPS))
    depend_on_code(project)
    over = prepare(project, params(project, STEPS))
    (changed,) = over.changed
    assert (changed.stage, changed.step, changed.files) == ("sft", 150, ["stage.py"])
    assert changed.cost == pytest.approx((100 / 3600 * 3.6, 100.0))
    assert over.plan is not None
    (sft,) = (stage for stage in over.plan.stages if stage.stage == "sft")
    trained = sum(phase.seconds for phase in sft.phases if phase.bound != "fixed")
    assert over.ahead["sft"].seconds - as_it_was.ahead["sft"].seconds == pytest.approx(trained / 2)
    assert any("stage.py changed since" in line and "Starting over." in line for line in summary(over))
    monkeypatch.setenv(CHANGED_CODE_VARIABLE, "continue")
    on = prepare(project, params(project, STEPS))
    assert on.ahead == as_it_was.ahead
    assert any("Going on from it." in line for line in summary(on))
    monkeypatch.setenv(CHANGED_CODE_VARIABLE, "maybe")
    with pytest.raises(ParamsError, match="RLHF_CHANGED_CODE=maybe must be continue or restart"):
        prepare(project, params(project, STEPS))


def test_starting_over_needs_its_budget(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CHANGED_CODE_VARIABLE, raising=False)
    stopped_in_sft(project, 100.0, STEPS)
    limit = total(prepare(project, params(project, STEPS)).ahead).usd + 0.1 + 0.001
    bounded = params(project, STEPS, f"budget.max_usd={limit}")
    assert gate(project, prepare(project, bounded)) is None
    depend_on_code(project)
    with pytest.raises(
        CostError, match=r"stage\.py changed since.*To go on instead: --changed-code continue.*max_usd"
    ) as said:
        gate(project, prepare(project, bounded))
    assert "\n" not in str(said.value)
    monkeypatch.setenv(CHANGED_CODE_VARIABLE, "continue")
    assert gate(project, prepare(project, bounded)) is None
