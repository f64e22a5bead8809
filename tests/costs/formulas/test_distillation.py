"""The plan of distillation: which phases there are, what grows with what, and what is in memory."""

from pathlib import Path

import pytest

from config.errors import CostError
from config.load import load
from costs.formulas.distillation import teacher_hidden_bytes
from costs.formulas.setting import Setting
from costs.planning.explain import explain_params
from costs.planning.models import base_shape
from costs.planning.moments import moments
from costs.planning.phases import phases
from costs.planning.planner import plan
from costs.planning.rows import count
from costs.planning.settings import evaluated, setting_of
from costs.planning.target import find_target
from tests.conftest import ROOT

RECIPE = ROOT / "recipes/demo-distill.yaml"


def setting(*overrides: str) -> Setting:
    params = load(RECIPE, list(overrides))
    target = find_target(params, None, None, None, Path("nowhere"))
    result = setting_of(params, target, "distill", count(params, target.root), base_shape(params, target.root))
    assert result.rlhf is not None
    return result


def seconds(*overrides: str) -> dict[str, float]:
    return {phase.name: phase.seconds for phase in phases(setting(*overrides))}


def test_phases_follow_who_samples_and_who_reads() -> None:
    offline = seconds("distill.lmbda=0.0", "distill.sft_updates=16")
    assert list(offline) == ["start", "teacher_rollout", "teacher_logprobs", "update", "save"]
    mixed = seconds("distill.lmbda=0.5", "distill.sft_updates=40")
    assert mixed["teacher_rollout"] == pytest.approx(0.75 * offline["teacher_rollout"])
    assert mixed["teacher_logprobs"] == pytest.approx(0.5 / 0.8 * offline["teacher_logprobs"])
    assert mixed["student_rollout"] > 0
    student_only = seconds("distill.lmbda=1.0", "distill.sft_updates=0")
    assert "teacher_rollout" not in student_only
    supervised = seconds("distill.sft_updates=80")
    assert "teacher_logprobs" not in supervised
    assert supervised["update"] < offline["update"]


def test_the_teachers_head_is_applied_again_in_every_pass() -> None:
    first, three = (
        [phase for phase in phases(setting(f"distill.distill_epochs={n}")) if phase.name == "update"] for n in (1, 3)
    )
    assert three[0].work.matmul_flops == pytest.approx(3 * first[0].work.matmul_flops)
    none = phases(setting("distill.sft_updates=80", "distill.distill_epochs=1"))
    update = next(phase for phase in none if phase.name == "update")
    work, teacher = setting().workload, base_shape(load(RECIPE), Path("nowhere"))
    tokens = 128 * work.mean_response_tokens * 64  # of the 80 updates those with a teacher
    head = 2 * teacher.width * teacher.vocab * tokens
    assert first[0].work.matmul_flops - update.work.matmul_flops == pytest.approx(head, rel=0.02)


def test_the_teacher_stays_and_its_hidden_states_with_it() -> None:
    result = setting("distill.batch_size=256")
    held = {moment.phase.split(":")[0]: moment for moment in moments(result)}
    assert {"teacher_rollout", "teacher_logprobs", "update"} <= held.keys()
    assert all(moment.roles["teacher"]["weights"] > 0 for moment in held.values())
    assert held["update"].roles["teacher"]["activations"] == teacher_hidden_bytes(result)
    assert teacher_hidden_bytes(result) == 2 * teacher_hidden_bytes(setting())


def test_a_student_of_the_teachers_layers_has_its_width() -> None:
    layers = "distill.student={path: null, revision: null, random: null, layers: 2}"
    assert (setting(layers).model.layers, setting(layers).model.width) == (2, 96)
    assert (setting().model.layers, setting().model.width) == (1, 40)
    assert setting().model.vocab == base_shape(load(RECIPE), Path("nowhere")).vocab
    with pytest.raises(CostError, match=r"distill\.student\.layers=4, and the teacher has 3"):
        setting(layers.replace("layers: 2", "layers: 4"))


def test_the_stage_is_planned_and_explained_where_there_is_a_section() -> None:
    params = load(RECIPE)
    target = find_target(params, None, None, None, Path("nowhere"))
    planned = plan(params, target)
    assert [stage.stage for stage in planned.stages][-2:] == ["distill", "evaluate"]
    assert evaluated(params) == 4
    without = plan(load(ROOT / "recipes/demo.yaml"), target)
    assert "distill" not in [stage.stage for stage in without.stages]
    said = explain_params(params, target, params.stages, "distill")
    assert said.seconds == pytest.approx(planned.stages[-2].seconds)
