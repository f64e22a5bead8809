"""The recipes for GPUs: each fits the devices it names, and says at its top what the planner says."""

import re
from pathlib import Path

import pytest

from config.load import load
from costs.planning.moments import moments
from costs.planning.planner import plan
from costs.planning.settings import settings
from costs.planning.target import find_target

RECIPES = {"gpu-24gb": 1, "gpu-80gb": 1, "node-8gpu": 8, "two-nodes": 16}
TOLERANCE = 0.25
"""A better formula moves a plan a little; the line at the top is for people, and is written anew when it is off by
more.
"""


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_for_gpus_fits_them_for_the_time_and_money_it_names(name: str, tmp_path: Path) -> None:
    file = Path("recipes") / f"{name}.yaml"
    params = load(file)
    planned = plan(params, find_target(params, None, None, None, tmp_path))
    assert {
        stage.stage: stage.gpus for stage in planned.stages if stage.stage in ("sft", "reward", "ppo")
    } == dict.fromkeys(("sft", "reward", "ppo"), RECIPES[name])
    assert [(stage.stage, stage.lever) for stage in planned.stages if not stage.fits] == []
    named = re.search(r"Planned: (\d+) h (\d+) min, (\d+) USD", file.read_text(encoding="utf-8").split("\n")[1])
    assert named is not None
    hours, minutes, usd = map(int, named.groups())
    assert planned.total["seconds"] == pytest.approx(3600 * hours + 60 * minutes, rel=TOLERANCE)
    assert planned.total["usd"]["expected"] == pytest.approx(usd, rel=TOLERANCE, abs=1.0)


def test_what_is_divided_shrinks_with_the_number_of_devices(tmp_path: Path) -> None:
    def bytes_of(level: str, gpus: int, part: str) -> float:
        params = load(Path("recipes/node-8gpu.yaml"), [f"where.sft.sharding={level}"])
        setting = settings(params, find_target(params, None, gpus, None, tmp_path))["sft"]
        held = {moment.phase: moment.roles for moment in moments(setting)}
        return held["train:loss"]["policy"][part]

    # while computing, FSDP2 that keeps weights holds its share beside the whole
    assert bytes_of("zero2", 8, "weights") > bytes_of("none", 8, "weights")
    assert bytes_of("zero2", 8, "optimizer") == bytes_of("none", 8, "optimizer") / 8
    assert bytes_of("none", 8, "weights") == bytes_of("none", 1, "weights")
    assert bytes_of("zero3", 8, "weights") < 0.55 * bytes_of("none", 8, "weights")


def test_a_role_that_samples_is_whole_meanwhile(tmp_path: Path) -> None:
    params = load(Path("recipes/node-8gpu.yaml"))
    setting = settings(params, find_target(params, None, None, None, tmp_path))["ppo"]
    held = {moment.phase: moment.roles for moment in moments(setting)}["rollout"]
    weights = 7_615_616_512
    copied = weights - 152_064 * 3584  # the embedding is looked up
    assert held["policy"]["weights"] == 4 * weights / 8
    assert held["policy"]["workspace"] == 4 * weights + 2 * copied
    assert held["ref"]["weights"] == 2 * weights / 8
