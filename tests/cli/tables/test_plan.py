"""Each column of each table holds what its heading says, in its unit."""

from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from cli.commands import clean, report
from cli.main import app
from cli.tables import plan as plan_tables
from config.load import load, write
from costs.ledger.ledger import StageCost
from costs.ledger.reconcile import Comparison
from costs.planning.compare import Difference
from costs.planning.explain import explain_params
from costs.planning.planner import plan
from costs.planning.plans import Interval, PhasePlan, Plan, StagePlan, Usd
from costs.planning.target import find_target
from reporting.inputs import Findings, read_findings
from tasks.pipeline.clean import Leftover
from tests.conftest import ROOT
from tests.costs import ledgers
from tests.reporting.plausible_run import write_pipeline_run

GIB = 2**30


def rows(table: Table) -> list[list[str]]:
    return [list(map(str, row)) for row in zip(*(column.cells for column in table.columns), strict=True)]


def headings(table: Table) -> list[str]:
    return [str(column.header) for column in table.columns]


@pytest.fixture
def findings(tmp_path: Path) -> Findings:
    params = load(ROOT / "recipes" / "demo.yaml")
    write(params, tmp_path / "params.yaml")
    write_pipeline_run(tmp_path)
    return read_findings(tmp_path, params)


def stage_cost(stage: str, usd: float, saved_usd: float, retries: int) -> StageCost:
    return ledgers.stage_cost(
        stage,
        seconds=30.0,
        usd=usd,
        waste_seconds=1.0,
        waste_usd=usd / 4,
        memory_retries=retries,
        saved_usd=saved_usd,
        peak_bytes=GIB,
    )


# ---------------------------------------------------------------- rlhf plan


def stage_plan(**changes: Any) -> StagePlan:
    phase = PhasePlan("train", 2.5e12, 7e9, 45.0, "compute", 0.5, GIB)
    content: dict[str, Any] = {
        "stage": "sft",
        "hardware": "cpu",
        "rented": 1,
        "idle_usd": 0.0,
        "gpus": 1,
        "fits": True,
        "shortfall_bytes": 0.0,
        "lever": "",
        "peak_bytes_per_gpu": 2.0 * GIB,
        "device_bytes_per_gpu": 3.0 * GIB,
        "peak_phase": "train",
        "memory": {"policy": {"weights": 64.0 * 2**20, "logits": 8.0 * 2**20}},
        "phases": (phase,),
        "seconds": 60.0,
        "gpu_hours": 0.25,
        "kwh": 0.125,
        "usd": Usd(1.0, 2.0, 3.0),
        "steps": 10.0,
        "tokens": 100.0,
        "mfu": 0.5,
    }
    return StagePlan(**content | changes)


def test_one_stage_that_does_not_fit_is_a_run_that_does_not() -> None:
    short = stage_plan(stage="ppo", fits=False, shortfall_bytes=5.0 * GIB, lever="LoRA")
    table = plan_tables.stage_table(Plan((stage_plan(), short)))
    assert str(table.columns[2].footer) == "no"
    assert rows(table)[1][2] == "[red]no[/red]"
    energy, lack = plan_tables.stage_notes(Plan((stage_plan(), short)))
    assert energy == "  0.5 device-hours, 0.25 kWh"
    assert lack == "  [red]ppo lacks 5.0 GiB a device: LoRA[/red]"


def test_every_stage_has_its_intervals_what_they_rest_on_and_why() -> None:
    planned = stage_plan(
        time_interval=Interval("measured here", 50.0, 90.0, "6 runs of this machine"),
        memory_interval=Interval("formula", 1.0 * GIB, 4.0 * GIB, "40 measurements"),
    )
    data = stage_plan(stage="data", time_interval=Interval("unchecked", 30.0, 120.0, "never checked"))
    result = Plan((data, planned))
    assert rows(plan_tables.interval_table(result)) == [
        ["data", "30 s to 2 min", "", "unchecked"],
        ["sft", "50 s to 1 min 30 s", "1.0 GiB to 4.0 GiB", "measured here, formula"],
    ]
    assert plan_tables.interval_notes(result) == [
        "  unchecked: never checked (data)",
        "  measured here: 6 runs of this machine (sft)",
        "  formula: 40 measurements (sft)",
    ]


def test_a_comparison_goes_from_before_to_after() -> None:
    row = Difference("sft", (40.0, 50.0), (2.0, 3.0), (4.0, 3.0), (True, False))
    assert rows(plan_tables.difference_table([row])) == [
        ["sft", "$2.00", "$3.00", "+50.0%", "+25.0%", "-25.0%", "yes -> no"]
    ]


# ---------------------------------------------------------------- rlhf compare


# ---------------------------------------------------------------- rlhf clean


@pytest.mark.parametrize(("days", "goes"), [("4", True), ("6", False)])
def test_clean_counts_in_days_and_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: str, goes: bool) -> None:
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    monkeypatch.chdir(tmp_path)
    first = Leftover("checkpoints", tmp_path / "a", tmp_path, 3 * GIB, 5 * 86400.0, "")
    monkeypatch.setattr(clean, "leftovers", lambda root: [first])
    for most, also in (("4", False), ("2", True)):
        done = CliRunner().invoke(app, ["clean", "--older-than", days, "--max-gib", most])
        assert ("1 of 1 would go, 3.00 GiB" in done.stdout) is (goes or also)
    table = clean._table(tmp_path, [first])
    assert rows(table)[0][:4] == ["checkpoints", "a", "3.00 GiB", "5.0 days ago"]


def test_what_is_shown_can_be_printed(findings: Findings) -> None:
    console = Console(width=200, record=True)
    console.print(report.phase_table(findings.ledger), plan_tables.plan_view(Plan((stage_plan(),))))
    assert "based on" in console.export_text()


def test_a_search_shows_what_was_before_what_is_better() -> None:
    start, best = (
        SimpleNamespace(usd=usd, seconds=seconds, device_bytes=gib * GIB)
        for usd, seconds, gib in ((4.0, 120.0, 8), (1.0, 60.0, 2))
    )
    lora = {"rank": 16, "modules": ["q", "v"]}
    choices = [
        SimpleNamespace(key=key, before=before, after=after, reason="less memory")
        for key, before, after in (("micro_batch_size", 8, 1), ("packing", False, True), ("lora", None, lora))
    ]
    result = SimpleNamespace(start=start, best=best, tried=7, choices=choices)
    lines = [str(line) for line in plan_tables.search_view({"ppo": result}).renderables]  # type: ignore[dict-item]
    assert lines == [
        "[bold]ppo[/bold], 7 combinations: $4.00 -> $1.00, 2 min -> 1 min",
        "  8.0 GiB -> 2.0 GiB a device",
        "  micro_batch_size: 8 -> 1",
        "    less memory",
        "  packing: false -> true",
        "    less memory",
        "  lora: null -> rank 16 on q, v",
        "    less memory",
    ]


RECIPES = sorted(path.name for path in (ROOT / "recipes").glob("*.yaml") if path.name != "base.yaml")


@pytest.mark.parametrize("recipe", RECIPES)
def test_plans_and_explanations_fit_80_columns_and_a_phase_60_lines(recipe: str) -> None:
    params = load(ROOT / "recipes" / recipe)
    target = find_target(params, None, None, None, Path("nowhere"))
    planned = plan(params, target, params.stages)
    shown = [plan_tables.stage_table(planned), plan_tables.interval_table(planned),
             plan_tables.phase_table(planned), plan_tables.memory_table(planned)]  # fmt: skip
    for view in shown:
        assert_whole(view)
    for stage in planned.stages:
        whole = explain_params(params, target, params.stages, stage.stage)
        assert_whole(plan_tables.explain_view(whole))
        for phase in stage.phases:
            part = f"{stage.stage}.{phase.phase}"
            result = explain_params(params, target, params.stages, part)
            assert len(assert_whole(plan_tables.explain_view(result))) <= 60


def assert_whole(view: object) -> list[str]:
    """The lines of a view on a terminal of 80 columns, in which nothing was cut off."""
    console = Console(width=80, file=StringIO(), force_terminal=False)
    console.print(view)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = text.splitlines()
    assert "…" not in text
    assert max(map(len, lines)) <= 80
    return list(lines)


def test_planned_beside_measured_fits_80_columns(tmp_path: Path) -> None:
    long = Comparison(200 * 3600.0, 199 * 3600.0, 12345.67, 12345.67, 80.0 * GIB, 81.0 * GIB)
    stage = SimpleNamespace(stage="evaluate", phases={"reference": long}, total=long)
    reconciled = SimpleNamespace(stages=[stage], total=long)
    for table in report.plan_tables(reconciled, wide=False):  # type: ignore[arg-type]
        assert_whole(table)
