"""Every sum of `rlhf plan` against an auditor's own, and what may move when one lever is moved."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app
from config.load import load, write
from tests.audit.ledgers import CHANGES, SECOND
from tests.audit.page import read, says
from tests.conftest import ROOT

STAGES = ("data", "sft", "reward", "ppo", "evaluate")
POOL_WATTS = 400.0
"""Of an a100-80, by its data sheet."""
RATE = 1.3 + 0.170 * 0.31


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Params whose stages have prices and devices of their own, in a project without a run."""
    path = tmp_path_factory.mktemp("plan") / "params.yaml"
    path.with_name("dvc.yaml").write_text("stages: {}\n")
    write(load(ROOT / "recipes" / "demo.yaml", CHANGES[SECOND]), path)
    return path


def printed(file: Path, *arguments: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(file.parent)
        done = CliRunner().invoke(
            app, ["plan", "--params", str(file), *arguments], env={"COLUMNS": "200"}, catch_exceptions=False
        )
    assert done.exit_code == 0
    return done.stdout


def planned(file: Path, *arguments: str) -> dict[str, Any]:
    return dict(json.loads(printed(file, "--json", *arguments)))


def by_stage(plan: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {stage["stage"]: stage for stage in plan["stages"]}


def check_sums(plan: dict[str, Any], places: dict[str, tuple[int, int, float, float]]) -> None:
    """Hours, dollars and energy of each stage from its seconds and its (devices, devices rented, price, watts); the
    total from the stages.
    """
    assert list(by_stage(plan)) == list(places)
    for name, stage in by_stage(plan).items():
        gpus, rented, price, watts = places[name]
        assert (stage["gpus"], stage["rented"]) == (gpus, rented), name
        assert stage["seconds"] == pytest.approx(sum(item["seconds"] for item in stage["phases"]))
        hours = stage["seconds"] / 3600
        assert stage["gpu_hours"] == pytest.approx(hours * gpus)
        assert stage["kwh"] == pytest.approx(hours * gpus * watts / 1000), name
        assert stage["usd"]["expected"] == pytest.approx(hours * rented * price), name
        assert stage["idle_usd"] == pytest.approx(hours * (rented - gpus) * price, abs=1e-12)
        assert stage["usd"]["low"] <= stage["usd"]["expected"] <= stage["usd"]["high"]
        for phase in stage["phases"]:
            assert phase["usd"] == pytest.approx(phase["seconds"] / 3600 * rented * price)
            assert phase["peak_bytes"] <= stage["peak_bytes_per_gpu"]
        assert stage["time_interval"]["low"] <= stage["seconds"] <= stage["time_interval"]["high"]
        if stage["memory"]:
            held = sum(size for parts in stage["memory"].values() for size in parts.values())
            assert held == pytest.approx(stage["peak_bytes_per_gpu"])
    total, stages = plan["total"], plan["stages"]
    for key in ("seconds", "gpu_hours", "kwh", "idle_usd"):
        assert total[key] == pytest.approx(sum(stage[key] for stage in stages)), key
    for end in ("low", "high"):
        bounds = sum(stage["time_interval"][end] for stage in stages)
        assert total[f"seconds_{end}"] == pytest.approx(bounds)
    for end in ("low", "expected", "high"):
        assert total["usd"][end] == pytest.approx(sum(stage["usd"][end] for stage in stages))
    for key in ("flops", "bytes_moved"):
        work = sum(phase[key] for stage in stages for phase in stage["phases"])
        assert total[key] == pytest.approx(work), key
    assert total["peak_bytes_per_gpu"] == max(stage["peak_bytes_per_gpu"] for stage in stages)
    assert total["fits"] is all(stage["fits"] for stage in stages)


def test_each_stage_is_priced_where_it_is_placed(file: Path) -> None:
    local, pool = (1, 2, RATE, 170.0), (4, 4, 4.7, POOL_WATTS)
    plan = planned(file)
    check_sums(plan, dict.fromkeys(STAGES, local) | {"reward": pool, "ppo": (2, 2, RATE, 170.0)})
    devices = {name: stage["hardware"] for name, stage in by_stage(plan).items()}
    assert devices.pop("reward") == "a100-80"
    assert len(set(devices.values())) == 1


def test_a_price_on_the_command_line_is_that_of_every_stage(file: Path) -> None:
    plan = planned(file, "--usd-per-gpu-hour", "9.5")
    local, pool = (1, 2, 9.5, 170.0), (4, 4, 9.5, POOL_WATTS)
    check_sums(plan, dict.fromkeys(STAGES, local) | {"reward": pool, "ppo": (2, 2, 9.5, 170.0)})


def test_a_device_on_the_command_line_is_that_of_every_stage(file: Path) -> None:
    plan = planned(file, "--hardware", "a100-80", "--usd-per-gpu-hour", "2.25", "--gpus", "4")
    check_sums(plan, dict.fromkeys(STAGES, (4, 4, 2.25, POOL_WATTS)))
    catalogue = planned(file, "--hardware", "a100-80", "--gpus", "4")
    hours = sum(stage["seconds"] / 3600 * 4 for stage in catalogue["stages"])
    prices = {end: catalogue["total"]["usd"][end] / hours for end in ("low", "expected", "high")}
    assert 0 < prices["low"] < prices["expected"] < prices["high"]
    for stage in catalogue["stages"]:
        for end, price in prices.items():
            assert stage["usd"][end] == pytest.approx(stage["seconds"] / 3600 * 4 * price)


COST, ENERGY = {"usd", "idle_usd"}, {"kwh"}
TIME = {"seconds", "gpu_hours", *COST, *ENERGY}
MEMORY = {"peak_bytes_per_gpu"}
LOCAL = {"data", "sft", "ppo", "evaluate"}
MOVES = [
    ("prices.usd_per_device_hour=2.6", dict.fromkeys(LOCAL, COST)),
    ("prices.usd_per_device_hour_by_pool={gpus: 9.4}", {"reward": COST}),
    ("prices.watts=340", dict.fromkeys(LOCAL, COST | ENERGY)),
    ("prices.usd_per_kwh=0.62", dict.fromkeys(LOCAL, COST)),
    ("prices.device_by_pool={gpus: h100-sxm}", {"reward": TIME}),
    ("budget.max_usd=99", {}),
    ("retrain.monthly_usd=99", {}),
    ("budget.monthly_usd=99", {}),
    ("seed=9", {}),
    ("sft.max_steps=7", {"sft": TIME}),
    ("reward.max_steps=7", {"reward": TIME}),
    ("ppo.updates=48", {"ppo": TIME}),
    ("evaluate.prompts=200", {"evaluate": TIME | MEMORY}),
    ("evaluate.max_new_tokens=24", {"evaluate": TIME | MEMORY}),
    ("sft.micro_batch_size=16", {"sft": TIME | MEMORY}),  # more passes are launched
    ("reward.activation_checkpointing=true", {"reward": TIME | MEMORY}),
    ("ppo.layout=shared_trunk", {"ppo": TIME | MEMORY}),
    ("data.source.sft_rows=24000", {"data": TIME, "sft": TIME}),
    ("where.ppo.processes=4", {name: TIME | MEMORY if name == "ppo" else COST for name in LOCAL}),
]


@pytest.mark.parametrize(("change", "moved"), MOVES, ids=[change for change, _ in MOVES])
def test_a_lever_moves_its_figures_and_no_others(file: Path, change: str, moved: dict[str, set[str]]) -> None:
    before, after = by_stage(planned(file)), by_stage(planned(file, "--set", change))
    for name in STAGES:
        a, b = before[name], after[name]
        different = {key for key in TIME | MEMORY if a[key] != b[key]}
        assert different <= moved.get(name, set()), name
        needed = moved.get(name, set()) - {"idle_usd"}
        assert needed <= different, name


def test_dollars_follow_the_price_and_nothing_else(file: Path) -> None:
    changed = planned(file, "--set", "prices.usd_per_device_hour=7.0")
    for name, stage in by_stage(planned(file)).items():
        price = 1.0 if name == "reward" else (7.0 + 0.170 * 0.31) / RATE
        other = by_stage(changed)[name]
        assert other["seconds"] == stage["seconds"]
        assert other["usd"]["expected"] == pytest.approx(price * stage["usd"]["expected"])


def test_the_tables_show_the_plan(file: Path) -> None:
    plan, shown = planned(file), printed(file).splitlines()
    rows: dict[tuple[str, ...], str] = {}
    for line in shown:
        rows.setdefault(tuple(line.split()[:2]), line)
    for name, stage in by_stage(plan).items():
        (first, *_) = (line for line in shown if line.split()[:1] == [name])
        held = [stage["peak_bytes_per_gpu"]] if stage["peak_bytes_per_gpu"] else []
        expected = [*held, stage["seconds"], stage["usd"]["expected"]]
        words = first.split(None, 1)[1]
        assert says(words, expected), words
        interval = next(line for line in shown if line.split()[:1] == [name] and line.count(" to ") >= 1)
        time, memory = stage["time_interval"], stage["memory_interval"]
        bounds = [time["low"], time["high"]]
        bounds += [memory["low"], memory["high"]] if memory["high"] else []
        shown_basis = next(basis for basis in ("measured here", "formula", "unchecked") if basis in interval)
        assert says(interval.split(None, 1)[1].partition(shown_basis)[0].rstrip(), bounds), interval
        assert shown_basis == time["basis"]
        for phase in stage["phases"]:
            row = rows[name, phase["phase"]].split(None, 2)[2]
            share = phase["seconds"] / stage["seconds"]
            amounts = [phase["seconds"], share, phase["usd"]]
            assert says(" ".join(row.split()[:-2]), amounts), row
            assert float(row.split()[-2].replace(",", "")) == pytest.approx(phase["flops"] / 1e12, rel=6e-3)
            assert row.split()[-1] == phase["bound"]
    total = next(line for line in shown if line.split()[:1] == ["total"])
    sums = plan["total"]
    expected = [sums["peak_bytes_per_gpu"], sums["seconds"], sums["usd"]["expected"]]
    assert says(total.split(None, 1)[1], expected), total
    energy = shown[shown.index(total) + 1]
    assert says(energy, [sums["gpu_hours"], sums["kwh"]]), energy


def test_the_page_shows_the_plan(file: Path, tmp_path: Path) -> None:
    plan = planned(file)
    target = tmp_path / "plan.html"
    printed(file, "--html", str(target))
    page = read(target)
    shown = {key: figure.words for key, figure in page.figures.items()}
    total, longest = plan["total"], max(stage["seconds"] for stage in plan["stages"])
    largest = max(plan["stages"], key=lambda stage: stage["peak_bytes_per_gpu"])
    assert says(shown["", "", "time"], [total["seconds"], total["gpu_hours"]])
    assert says(shown["", "", "cost"], [total["usd"]["expected"]])
    assert says(shown["", "", "peak_memory"], [total["peak_bytes_per_gpu"]])
    assert f"in stage {largest['stage']}" in shown["", "", "peak_memory"]
    assert says(shown["", "", "energy"].replace("kWh", ""), [total["kwh"]])
    assert longest > 0
    for name, stage in by_stage(plan).items():
        time, held = stage["time_interval"], stage["memory_interval"]
        cells = {
            "time": [stage["seconds"], time["low"], time["high"]],
            "cost": [stage["usd"]["expected"]],
            "use_of_the_peak_rate": [stage["mfu"] or None],
            "peak_memory": [stage["peak_bytes_per_gpu"], held["low"], held["high"]] if held["high"] else [None],
        }
        for column, values in cells.items():
            words = shown["stages", "", f"{name}.{column}"]
            assert says(words, list(values)), (name, column, words)
        assert shown["stages", "", f"{name}.fits"] == ("yes" if stage["fits"] else "no")
        slowest = max(phase["seconds"] for phase in stage["phases"])
        for phase in stage["phases"]:
            bar = page.figures[name, "Time of each phase", phase["phase"]]
            assert says(bar.words, [phase["seconds"], phase["usd"]]), bar.words
            assert bar.places() == pytest.approx([phase["seconds"] / slowest], abs=1e-4)
            for column, value in {
                "time": phase["seconds"], "cost": phase["usd"],
                "bytes_moved": phase["bytes_moved"] or None,
                "peak_memory": phase["peak_bytes"] or None,
            }.items():  # fmt: skip
                words = shown[name, "", f"{phase['phase']}.{column}"]
                assert says(words, [value]), (name, phase["phase"], column, words)
        for role, parts in stage["memory"].items():
            bar = page.figures[name, "Memory of one device at the peak", role]
            assert says(bar.words, [sum(parts.values())]), bar.words
    totals = {"time": total["seconds"], "cost": total["usd"]["expected"]}
    totals["peak_memory"] = total["peak_bytes_per_gpu"]
    for column, value in totals.items():
        assert says(shown["stages", "", f"total.{column}"], [value])
