"""The plan of a contest against that of the evaluation, whose formulas are held against
measurements.
"""

from pathlib import Path

import pytest

from config.champions import Champion, ChampionRecord, champion_folder, write_record
from config.load import load, write
from config.schema import Params
from costs.planning.contest import plan_contest
from costs.planning.planner import plan, target
from costs.planning.plans import StagePlan
from tests.conftest import ROOT

ASKED = ["evaluate.prompts=400", "evaluate.batch_size=200", "data.source.prompt_rows=40000"]


def params(*changes: str, recipe: str = "demo") -> Params:
    return load(ROOT / "recipes" / f"{recipe}.yaml", [*ASKED, *changes] if recipe == "demo" else [])


def contest(params: Params, root: Path) -> StagePlan:
    return plan_contest(params, target(params, None, None, None, root))


def evaluation(params: Params, root: Path) -> StagePlan:
    return plan(params, target(params, None, None, None, root), ("evaluate",)).stages[0]


def flops(made: StagePlan, phase: str) -> float:
    return next(each.flops for each in made.phases if each.phase == phase)


def crown(root: Path, params: Params) -> None:
    """Make a run of `params` the champion, as far as a plan looks."""
    champion = Champion(
        run_id="old", method="ppo", model_digest="m", data_version="d", data_key="k"
    )
    write_record(root, ChampionRecord(lineage=(champion,)))
    champion_folder(root, "old").mkdir(parents=True)
    write(params, champion_folder(root, "old") / "params.yaml")


def test_two_models_answer_where_an_evaluation_has_three(tmp_path: Path) -> None:
    made, evaluated = contest(params(), tmp_path), evaluation(params(), tmp_path)
    assert flops(made, "generate") == pytest.approx(flops(evaluated, "generate") * 2 / 3)
    # per model: two reward models and two readings, where an evaluation has 1 and 5/3
    one, other = flops(evaluated, "score") / 3, flops(made, "score") / 2
    assert one * 2 / (5 / 3) < other < one * 2


def test_a_larger_champion_takes_longer_and_decides_the_memory(tmp_path: Path) -> None:
    small = contest(params(), tmp_path)
    crown(tmp_path, params("model.random.width=512"))
    large = contest(params(), tmp_path)
    both = contest(params("model.random.width=512"), tmp_path)
    assert small.peak_bytes_per_gpu < large.peak_bytes_per_gpu == both.peak_bytes_per_gpu
    each = [flops(made, "generate") for made in (small, both)]
    assert flops(large, "generate") == pytest.approx(sum(each) / 2)
    assert "contest: against old" in large.assumptions


def test_safety_prompts_are_asked_as_well(tmp_path: Path) -> None:
    (tmp_path / "safety.jsonl").write_text('{"prompt": "?"}\n' * 400)
    without = contest(params(), tmp_path)
    source = "retrain.safety_source={kind: file, path: safety.jsonl, format: prompts, columns: {}}"
    made = contest(params(source), tmp_path)
    assert flops(made, "generate") == pytest.approx(2 * flops(without, "generate"))
    start = made.phases[0].seconds
    assert start - without.phases[0].seconds < without.phases[0].seconds / 2, "one process"


def test_one_model_at_a_time_is_in_memory(tmp_path: Path) -> None:
    large = params(recipe="gpu-80gb")
    made = contest(large, tmp_path)
    ((role, parts),) = made.memory.items()
    assert role in ("policy", "reward")
    assert not {"optimizer", "gradients"} & parts.keys()
    peaks = {phase.phase: phase.peak_bytes for phase in made.phases}
    assert min(peaks["generate"], peaks["score"]) > parts["weights"]
    assert len(evaluation(large, tmp_path).memory) == 2


def test_no_more_prompts_are_planned_than_are_held_out(tmp_path: Path) -> None:
    few = params("data.source.prompt_rows=1000", "data.test_fraction=0.2")
    as_asked = params("evaluate.prompts=200")
    for planned in (contest, evaluation):
        assert flops(planned(few, tmp_path), "generate") == pytest.approx(
            flops(planned(as_asked, tmp_path), "generate")
        )
