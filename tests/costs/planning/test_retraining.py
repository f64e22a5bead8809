"""The plan of a contest against that of the evaluation, whose formulas are held against measurements, and the plan of
an examination against one that was measured.
"""

import json
from pathlib import Path

import pytest

from config.load import load, write
from config.schema import Params
from config.work import EXAMINED_PAIRS
from config.workspace.champions import Champion, ChampionRecord, champion_folder, write_record
from costs.planning.planner import plan
from costs.planning.plans import StagePlan
from costs.planning.retraining import plan_contest, plan_cycle, plan_examination
from costs.planning.target import find_target
from tests.conftest import ROOT

ASKED = ["evaluate.prompts=400", "evaluate.batch_size=200", "data.source.prompt_rows=40000"]


def params(*changes: str, recipe: str = "demo") -> Params:
    return load(ROOT / "recipes" / f"{recipe}.yaml", [*ASKED, *changes] if recipe == "demo" else [])


def contest(params: Params, root: Path) -> StagePlan:
    return plan_contest(params, find_target(params, None, None, None, root))


def evaluation(params: Params, root: Path) -> StagePlan:
    return plan(params, find_target(params, None, None, None, root), ("evaluate",)).stages[0]


def flops(made: StagePlan, phase: str) -> float:
    return next((item.flops for item in made.phases if item.phase == phase), 0.0)


def crown(root: Path, params: Params) -> None:
    """Make a run of `params` the champion, as far as a plan looks."""
    champion = Champion(run_id="old", method="ppo", model_digest="m", data_version="d", data_key="k")
    write_record(root, ChampionRecord(lineage=(champion,)))
    champion_folder(root, "old").mkdir(parents=True, exist_ok=True)
    write(params, champion_folder(root, "old") / "params.yaml")


def test_two_models_answer_where_an_evaluation_has_three(tmp_path: Path) -> None:
    result, evaluated = contest(params(), tmp_path), evaluation(params(), tmp_path)
    assert flops(result, "generate") == pytest.approx(flops(evaluated, "generate") * 2 / 3)
    # per model: two reward models and two readings, where an evaluation has 1 and 5/3
    first, other = flops(evaluated, "score") / 3, flops(result, "score") / 2
    assert first * 2 / (5 / 3) < other < first * 2


def test_a_larger_champion_takes_longer_and_decides_the_memory(tmp_path: Path) -> None:
    small = contest(params(), tmp_path)
    crown(tmp_path, params("model.random.width=512"))
    large = contest(params(), tmp_path)
    both = contest(params("model.random.width=512"), tmp_path)
    assert small.peak_bytes_per_gpu < large.peak_bytes_per_gpu == both.peak_bytes_per_gpu
    item = [flops(result, "generate") for result in (small, both)]
    assert flops(large, "generate") == pytest.approx(sum(item) / 2)
    assert "contest: against old" in large.assumptions


def test_safety_prompts_are_asked_as_well(tmp_path: Path) -> None:
    (tmp_path / "safety.jsonl").write_text('{"prompt": "?"}\n' * 400)
    without = contest(params(), tmp_path)
    source = "retrain.safety_source={kind: file, path: safety.jsonl, format: prompts, columns: {}}"
    result = contest(params(source), tmp_path)
    assert flops(result, "generate") == pytest.approx(2 * flops(without, "generate"))
    start = result.phases[0].seconds
    assert start - without.phases[0].seconds < without.phases[0].seconds / 2, "one process"


def test_it_holds_what_an_evaluation_holds(tmp_path: Path) -> None:
    large = params(recipe="gpu-80gb")
    result, evaluated = contest(large, tmp_path), evaluation(large, tmp_path)
    assert not {"optimizer", "gradients"} & {part for parts in result.memory.values() for part in parts}
    assert result.memory.keys() == evaluated.memory.keys()
    assert result.peak_bytes_per_gpu == pytest.approx(evaluated.peak_bytes_per_gpu, rel=0.05)


def test_no_more_prompts_are_planned_than_are_held_out(tmp_path: Path) -> None:
    few = params("data.source.prompt_rows=1000", "data.test_fraction=0.2")
    as_asked = params("evaluate.prompts=200")
    for planned in (contest, evaluation):
        assert flops(planned(few, tmp_path), "generate") == pytest.approx(
            flops(planned(as_asked, tmp_path), "generate")
        )


# ---------------------------------------------------------------- the examination


def examination(params: Params, root: Path, device: str | None = None) -> StagePlan:
    return plan_examination(params, find_target(params, device, None, None, root))


def seconds(made: StagePlan) -> dict[str, float]:
    return {phase.phase: phase.seconds for phase in made.phases}


def know(root: Path, pairs: int) -> None:
    """As if the champion had been trained on so many pairs."""
    file = champion_folder(root, "old") / "metrics/data.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"preference_train_rows": pairs - 10, "preference_test_rows": 10}))


def test_reading_and_comparing_take_as_long_as_was_measured(tmp_path: Path) -> None:
    """40,000 helpdesk rows against a champion that lacks 2,000 pairs of them, on two cores of an AMD EPYC machine: the
    first two phases are those of `python -m training.data`.
    """
    rows = [f"data.source.{name}" for name in ("preference_rows=24000", "prompt_rows=4000")]
    demo = load(ROOT / "recipes" / "demo.yaml", [*rows, "data.test_fraction=0.2"])
    crown(tmp_path, demo)
    know(tmp_path, pairs=22_000)
    planned = seconds(examination(demo, tmp_path))
    measured = {"read": 2.28, "tokenise": 2.97, "compare": 2.0}
    for phase, took in measured.items():
        assert planned[phase] == pytest.approx(took, rel=0.2), phase


def test_only_pairs_that_came_are_judged_and_no_more_than_it_looks_at(tmp_path: Path) -> None:
    wanted = params("data.source.preference_rows=8000")
    without = examination(wanted, tmp_path)
    crown(tmp_path, wanted)
    unknown = examination(wanted, tmp_path)
    judged = {}
    for judged_rows in (8000, 7000, 6000, 100):
        know(tmp_path, judged_rows)
        judged[judged_rows] = flops(examination(wanted, tmp_path), "score")
    assert judged[8000] == 0
    assert judged[6000] == pytest.approx(2 * judged[7000])
    assert flops(without, "score") == flops(unknown, "score") == judged[100]
    assert judged[100] == pytest.approx(judged[7000] * EXAMINED_PAIRS / 1000)


def test_the_champions_model_judges_and_the_new_sources_are_read(tmp_path: Path) -> None:
    crown(tmp_path, params("model.random.width=512"))
    small, more = (examination(params(*changes), tmp_path) for changes in ((), ("data.source.sft_rows=80000",)))
    assert seconds(more)["read"] > 1.5 * seconds(small)["read"]
    assert seconds(more)["compare"] > 1.5 * seconds(small)["compare"]
    assert flops(more, "score") == flops(small, "score")
    crown(tmp_path, params())
    by_small = examination(params(), tmp_path)
    assert flops(small, "score") > 2 * flops(by_small, "score")
    assert small.peak_bytes_per_gpu > by_small.peak_bytes_per_gpu


def test_a_cycle_is_a_run_between_its_two_processes(tmp_path: Path) -> None:
    wanted = params()
    target = find_target(wanted, None, None, None, tmp_path)
    run = plan(wanted, target)
    cycle, rest = plan_cycle(run, wanted, target), plan_cycle(run, wanted, target, examined=True)
    assert [stage.stage for stage in cycle.stages] == [
        "examine", "data", "sft", "reward", "ppo", "evaluate", "contest",
    ]  # fmt: skip
    assert cycle.stages[1:] == rest.stages
    assert rest.stages[:-1] == run.stages


def test_an_examination_that_does_not_fit_says_what_would_help(tmp_path: Path) -> None:
    large = params(recipe="two-nodes")
    for device, fits in (("rtx-4090", False), ("a100-80", True)):
        result = examination(large, tmp_path, device)
        assert result.fits is fits
        assert ("a device with more memory" in result.lever) is not fits
