"""Phases and moments of every kind of stage."""

from dataclasses import replace

import pytest

from config.errors import CostError
from costs.formulas.memory import Moment, peak, phase_peak
from costs.formulas.ppo import update_micro_batch
from costs.formulas.setting import Rlhf, Setting
from costs.planning.moments import moments
from costs.planning.phases import STAGES, phases
from costs.planning.stages import closing_lever, plan_stage
from costs.tables.catalogue import price, shape
from tests.costs.settings import ALL_LINEAR, ppo, sft


def of_stage(stage: str, **levers: object) -> Setting:
    """A setting of any kind of stage."""
    if stage in ("ppo", "rloo", "grpo"):
        return ppo(stage=stage, **levers)
    setting = replace(sft(micro_batch=4, **levers), stage=stage)
    work = replace(setting.workload, prompt_tokens=256, response_tokens=256, mean_response_tokens=256)
    return replace(setting, workload=work, rlhf=Rlhf(teacher=shape("llama-3-8b"), reward=setting.model))


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_time_and_memory(stage: str) -> None:
    plan = plan_stage(of_stage(stage), price("a100-80"))
    assert plan.peak_bytes_per_gpu > 2 * shape("llama-3.2-1b").parameters
    assert all(phase.seconds >= 0 for phase in plan.phases)
    assert plan.phases[0].phase == "start"
    assert plan.phases[-1].phase == "save"


def test_an_unknown_stage_says_where_to_add_it() -> None:
    with pytest.raises(CostError, match=r"stage 'orpo' has no plan.*costs/planning/phases.py"):
        phases(replace(sft(), stage="orpo"))


def named(setting: Setting) -> dict[str, float]:
    return {phase.name: phase.seconds for phase in phases(setting)}


def test_only_ppo_has_values() -> None:
    assert "value" in named(of_stage("ppo"))
    assert "value" not in named(of_stage("grpo"))
    assert {"rollout", "score", "reference", "update"} <= set(named(of_stage("rloo")))


def test_a_shared_trunk_trains_one_model_and_separate_trains_two() -> None:
    separate, trunk = (named(ppo(layout))["update"] for layout in ("separate", "shared_trunk"))
    assert separate == pytest.approx(2 * trunk, rel=0.15)


def test_a_small_critic_costs_less_than_one_of_the_policys_size() -> None:
    setting = ppo(model="llama-3-8b", tuning="lora")
    assert setting.rlhf is not None
    small = replace(setting, rlhf=replace(setting.rlhf, value=shape("llama-3.2-1b"), reward=shape("llama-3.2-1b")))
    assert named(small)["value"] < named(setting)["value"] / 4
    assert peak(moments(small)).total < peak(moments(setting)).total - 2 * 6e9


def test_the_shared_base_needs_lora() -> None:
    with pytest.raises(CostError, match=r"shared_base.*needs LoRA"):
        phases(ppo("shared_base"))


def test_dpo_passes_the_reference_and_holds_it_unless_an_adapter_can_be_turned_off() -> None:
    full, lora = of_stage("dpo"), of_stage("dpo", tuning="lora", lora_modules=ALL_LINEAR)
    assert named(full)["reference"] > 0
    assert any("ref" in moment.roles for moment in moments(full))
    assert not any("ref" in moment.roles for moment in moments(lora))


def test_distillation_needs_its_teacher() -> None:
    with pytest.raises(CostError, match="teacher's shape"):
        moments(replace(of_stage("ppo"), stage="distill", rlhf=Rlhf()))


def test_a_reward_model_has_no_logits() -> None:
    assert all("logits" not in parts for moment in moments(of_stage("reward")) for parts in moment.roles.values())
    assert any("logits" in parts for moment in moments(of_stage("sft")) for parts in moment.roles.values())


def test_answers_cost_the_same_work_in_any_batch() -> None:
    def generated(micro: int) -> float:
        setting = of_stage("evaluate", tuning="frozen").with_levers(micro_batch=micro, accumulation=8 // micro)
        return next(phase.work.matmul_flops for phase in phases(setting) if phase.name == "generate")

    assert generated(1) == pytest.approx(generated(8))


def test_larger_batches_answer_faster() -> None:
    def seconds(micro: int) -> float:
        return named(of_stage("evaluate", tuning="frozen").with_levers(micro_batch=micro, accumulation=8 // micro))[
            "generate"
        ]

    assert seconds(8) < seconds(1) / 4


def test_a_phase_has_the_peak_of_its_own_moments() -> None:
    held = [
        Moment("rollout", {"policy": {"weights": 5.0}}),
        Moment("update:loss", {"policy": {"weights": 7.0}}),
        Moment("update:step", {}),
    ]
    assert phase_peak(held, "update") == 7.0
    assert phase_peak(held, "save") == 0.0


def test_the_lever_offered_makes_it_fit() -> None:
    setting = sft("llama-3-8b", device="a100-40", micro_batch=2, accumulation=4, tokens=2048)
    assert not plan_stage(setting, price("a100-40")).fits
    assert closing_lever(setting) == "LoRA"
    assert plan_stage(setting.with_levers(tuning="lora", checkpointing="full"), price("a100-40")).fits


def test_on_a_cpu_the_process_itself_is_counted() -> None:
    held = moments(sft(device="cpu", dtype="fp32", tokens=64))
    assert all(moment.roles["process"]["workspace"] >= (490 + 40) * 2**20 for moment in held)
    assert not any("process" in moment.roles for moment in moments(sft()))


def test_apart_models_keep_both_their_activations_until_the_loss() -> None:
    def kept(layout: str) -> dict[str, float]:
        backward = next(m for m in moments(ppo(layout, micro_batch=2)) if m.phase == "update:backward")
        return {role: parts.get("activations", 0.0) for role, parts in backward.roles.items()}

    separate, trunk = kept("separate"), kept("shared_trunk")
    assert separate["value"] == pytest.approx(trunk["policy"])
    # without the layer that is running
    assert separate["policy"] == pytest.approx(trunk["policy"], rel=0.1)
    assert "value" not in trunk or not trunk["value"]


def test_a_head_on_the_trunk_says_its_values_during_the_rollout() -> None:
    assert "value" not in named(ppo("shared_trunk"))


def budget(tokens: float, stage: str = "ppo", **levers: object) -> Setting:
    """64 responses of 512 tokens at most and 300 on average, half of them said; mini-batches
    of 32.
    """
    setting = ppo(stage=stage, **levers)
    work = replace(setting.workload, mean_tokens=300.0, mean_response_tokens=150.0, micro_batch_tokens=tokens)
    return replace(setting, workload=work)


def operations(setting: Setting, name: str) -> float:
    return next(phase.work.operations for phase in phases(setting) if phase.name == name)


def test_a_token_budget_is_filled_without_padding() -> None:
    # 64 x 300 tokens in passes of 4,800: four, where padded micro-batches of nine would make seven
    assert operations(budget(4800.0), "score") / operations(budget(64 * 300.0), "score") == pytest.approx(4)
    # one row a pass at the least
    assert operations(budget(1.0), "score") / operations(budget(64 * 300.0), "score") == pytest.approx(64)


def test_the_update_fills_its_passes_for_each_mini_batch() -> None:
    def passes(tokens: float) -> float:
        return (operations(budget(tokens), "update") - steps) / first

    def of_passes(tokens: float) -> float:
        return operations(budget(tokens), "update")

    # two passes a mini-batch against one, in eight mini-batches
    first = (of_passes(4800.0) - of_passes(9600.0)) / 8
    steps = of_passes(9600.0) - 8 * first
    assert passes(3200.0) == pytest.approx(24)


def test_memory_of_an_update_is_that_of_the_budget_or_of_the_longest_sequence() -> None:
    def kept(tokens: float) -> float:
        return next(m for m in moments(budget(tokens)) if m.phase == "update:loss").roles["policy"]["activations"]

    assert kept(2048.0) == pytest.approx(2 * kept(1024.0)) == pytest.approx(4 * kept(512.0))
    assert kept(100.0) == kept(512.0)
    # a mini-batch that fits as a whole: what its 32 sequences add up to, and three deviations more
    work = budget(1e9).workload
    tokens = 32 * work.mean_tokens + 3 * 32**0.5 * work.mean_response_tokens
    assert tokens < 32 * 512
    assert kept(1e9) == pytest.approx(tokens / 512 * kept(512.0))


def test_the_last_layers_feed_forward_runs_at_the_tokens_that_are_read() -> None:
    setting = budget(4800.0)
    shape_ = setting.model
    done = {phase.name: phase.work.matmul_flops for phase in phases(setting)}
    updates, rows = 10, 64
    layers = 2 * shape_.layers * shape_.active_layer_parameters
    assert done["score"] == pytest.approx(updates * rows * (layers * 300 - 2 * shape_.feed_forward_parameters * 299))
    # the last token goes in nowhere
    values = updates * rows * (layers * 299 - 2 * shape_.feed_forward_parameters * 149)
    assert done["value"] == pytest.approx(values)
    logits = updates * rows * 2 * shape_.vocab * shape_.width * 150
    assert done["reference"] == pytest.approx(values + logits)
    assert done["update"] == pytest.approx(
        4 * (3 * (2 * values + logits) + logits)  # the loss makes its logits again
    )
    eager = {phase.name: phase.work.matmul_flops for phase in phases(budget(4800.0, attention="eager"))}
    assert eager["score"] == pytest.approx(updates * rows * layers * 300)


@pytest.mark.parametrize("method", ["rloo", "grpo"])
def test_without_a_critic_the_loop_costs_what_ppo_does_less_its_value_model(method: str) -> None:
    ppo_, other = (
        {phase.name: phase.work.matmul_flops for phase in phases(budget(4800.0, stage=stage))}
        for stage in ("ppo", method)
    )
    assert set(ppo_) - set(other) == {"value"}
    assert {name: other[name] for name in other if name != "update"} == {
        name: ppo_[name] for name in other if name != "update"
    }
    trunk = {phase.name: phase.work.matmul_flops for phase in phases(budget(4800.0, layout="shared_trunk"))}
    assert other["update"] == trunk["update"] < 0.6 * ppo_["update"]
    memory = {stage: max(moment.total for moment in moments(budget(4800.0, stage=stage))) for stage in ("ppo", method)}
    assert memory[method] < 0.7 * memory["ppo"]


def test_a_micro_batch_is_no_larger_than_a_mini_batch() -> None:
    assert update_micro_batch(ppo(micro_batch=64)) == 32
    assert update_micro_batch(ppo(micro_batch=4)) == 4


def test_rewards_from_rules_need_no_model() -> None:
    judged = ppo(stage="grpo")
    assert judged.rlhf is not None
    ruled = replace(judged, rlhf=replace(judged.rlhf, reward=None))
    names = [[phase.name for phase in phases(item)] for item in (judged, ruled)]
    assert names[0] == [*names[1][:2], "score", *names[1][2:]]
    held = [moments(item)[0].roles for item in (judged, ruled)]
    assert set(held[0]) - set(held[1]) == {"reward"}
    less = peak(moments(judged)).total - peak(moments(ruled)).total
    assert less == 2 * judged.model.parameters
