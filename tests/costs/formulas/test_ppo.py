"""The loop by hand: how often each pass runs over how many sequences, and which role holds what."""

from dataclasses import replace
from typing import Any

import pytest

from config.errors import CostError
from costs.formulas.compute import Work, forward_pass, micro_step, optimizer_step
from costs.formulas.generation import generation
from costs.formulas.memory import frozen_role, generating, scoring
from costs.formulas.ppo import (
    has_value,
    mini_batch,
    own_value,
    packed_sequences,
    ppo_phases,
    roles_of,
    update_micro_batch,
    value_levers,
)
from costs.formulas.ppo_memory import ppo_moments
from costs.formulas.setting import Levers, Rlhf, Setting
from costs.formulas.states import gathered_bytes, optimizer_bytes, weights
from costs.formulas.time import duration
from costs.formulas.timeline import training_moments
from costs.tables.shapes import ModelShape
from tests.costs.settings import small, small_setting

REWARD, VALUE = small(layers=2, tied=True), small(layers=5, tied=True)
VALUE_LEVERS = Levers(micro_batch=3, optimizer="adamw8bit")


def loop(
    stage: str = "ppo", work: dict[str, Any] | None = None, rlhf: dict[str, Any] | None = None, **chosen: Any
) -> Setting:
    """Five updates of 24 responses, six of which are generated side by side: three epochs over two mini-batches. A
    sequence has eight tokens at most and seven on average, four of them said and three on average.
    """
    setting = small_setting(
        {"steps": 5, "mean_tokens": 7.0, "prompt_tokens": 4, "response_tokens": 4, "mean_response_tokens": 3.0}
        | (work or {}),
        **({"micro_batch": 3} | chosen),
    )
    shape: dict[str, Any] = {
        "reward": REWARD,
        "value": VALUE,
        "value_levers": VALUE_LEVERS,
        "batch": 24,
        "rollout_batch": 6,
        "ppo_epochs": 3,
        "mini_batches": 2,
    }
    return replace(setting, stage=stage, rlhf=Rlhf(**(shape | (rlhf or {}))))


Row = tuple[str, Work, float, str]


def rows(setting: Setting) -> dict[str, Row]:
    return {row[0]: row for row in ppo_phases(setting)}


def repeated(name: str, once: Work, times: float, setting: Setting) -> Row:
    spent = duration(once, setting)
    return (name, once.times(times), spent.seconds * times, spent.bound)


def same(found: Row, expected: Row) -> None:
    assert (found[0], found[3]) == (expected[0], expected[3])
    assert found[1] == pytest.approx(expected[1])
    assert found[2] == pytest.approx(expected[2])


# ---------------------------------------------------------------- roles


def test_a_loop_without_roles_or_with_an_impossible_layout_is_refused() -> None:
    with pytest.raises(CostError, match="stage ppo needs its roles"):
        roles_of(replace(loop(), rlhf=None))
    with pytest.raises(CostError, match="it needs LoRA"):
        roles_of(loop(rlhf={"layout": "shared_base"}))
    assert roles_of(loop(rlhf={"layout": "shared_base"}, tuning="lora")).layout == "shared_base"
    assert roles_of(loop(rlhf={"layout": "shared_trunk"})).layout == "shared_trunk"


def test_only_ppo_has_a_value_model_and_a_shared_trunk_none_of_its_own() -> None:
    assert [has_value(loop(stage)) for stage in ("ppo", "rloo", "grpo")] == [True, False, False]
    assert own_value(loop()) is VALUE
    assert own_value(loop(rlhf={"value": None})) == small()
    assert own_value(loop(rlhf={"layout": "shared_base"}, tuning="lora")) is VALUE
    assert own_value(loop(rlhf={"layout": "shared_trunk"})) is None
    assert own_value(loop("rloo")) is None
    assert value_levers(loop()) is VALUE_LEVERS
    plain = loop(rlhf={"value_levers": None})
    assert value_levers(plain) is plain.levers


# ---------------------------------------------------------------- time


@pytest.mark.parametrize(("gpus", "side_by_side", "batches"), [(1, 6, 5 * 24 / 6), (2, 6, 5 * 12 / 6), (8, 3, 5)])
def test_the_rollout_generates_the_devices_share_batch_by_batch(gpus: int, side_by_side: int, batches: float) -> None:
    setting = loop(gpus=gpus)
    prefill, decode = generation(setting, setting.model, setting.levers, batches, side_by_side)
    expected = ("rollout", prefill[1] + decode[1], prefill[2] + decode[2], decode[3])
    same(ppo_phases(setting)[0], expected)


def passed(setting: Setting, shape: ModelShape, micro: float, tokens: float, head: float, read: float) -> Work:
    counted = replace(setting, workload=replace(setting.workload, read_tokens=read))
    return forward_pass(counted, shape, setting.levers, micro, tokens, head)


@pytest.mark.parametrize("gpus", [1, 2])
def test_rows_are_packed_to_the_budget_of_a_pass(gpus: int) -> None:
    # 24 sequences of 7 tokens are 7 passes of 24 tokens; 12 are 3.5, so 4 of 3
    setting = loop(gpus=gpus, rlhf={"rescored": 10})
    passes, micro = (7, 24 / 7) if gpus == 1 else (4, 3)
    result = rows(setting)
    assert list(result) == ["rollout", "logprobs", "score", "reference", "value", "advantage", "update"]
    # a score reads the last token of all seven; log-probs and values the said ones of six
    score = passed(setting, REWARD, micro, 7, 0, 1 / 7)
    same(result["score"], repeated("score", score, 5 * passes, setting))
    expected = passed(setting, small(), micro, 6, 3 * micro, 3 / 6)
    same(result["reference"], repeated("reference", expected, 5 * passes, setting))
    value = passed(setting, VALUE, micro, 6, 0, 3 / 6)
    same(result["value"], repeated("value", value, 5 * passes, setting))
    again, item = (3, 10 / 3) if gpus == 1 else (2, 2.5)
    logprobs = passed(setting, small(), item, 6, 3 * item, 3 / 6)
    same(result["logprobs"], repeated("logprobs", logprobs, 5 * again, setting))


def test_without_packing_micro_batches_are_padded_to_one_size() -> None:
    setting = loop(software="transformers", micro_batch=5)
    score = passed(setting, REWARD, 5, 7, 0, 1 / 7)
    same(rows(setting)["score"], repeated("score", score, 5 * 24 / 5, setting))
    few = loop(software="transformers", micro_batch=50)
    # other software makes logits at prompts too
    expected = passed(few, small(), 24, 7, 7 * 24, 3 / 7)
    same(rows(few)["reference"], repeated("reference", expected, 5, few))


def test_a_sequence_longer_than_the_budget_is_a_pass_of_its_own() -> None:
    setting = loop("ppo", {"micro_batch_tokens": 2.0})
    score = passed(setting, REWARD, 1, 7, 0, 1 / 7)
    same(rows(setting)["score"], repeated("score", score, 5 * 24, setting))
    ample = loop("ppo", {"micro_batch_tokens": 1e6})
    score = passed(ample, REWARD, 24, 7, 0, 1 / 7)
    same(rows(ample)["score"], repeated("score", score, 5, ample))


def test_a_budget_that_fits_to_the_token_needs_no_further_pass() -> None:
    setting = loop("ppo", {"micro_batch_tokens": 12 * 7.0})
    score = passed(setting, REWARD, 12, 7, 0, 1 / 7)
    same(rows(setting)["score"], repeated("score", score, 5 * 2, setting))


def test_one_token_is_read_and_no_more_tokens_than_there_are() -> None:
    short = {"mean_tokens": 1.0, "mean_response_tokens": 3.0}
    setting = loop("ppo", short)
    value = passed(setting, VALUE, 24, 1, 0, 1.0)
    same(rows(setting)["value"], repeated("value", value, 5, setting))


def test_responses_without_a_mean_are_as_long_as_they_may_be() -> None:
    setting = loop("ppo", {"mean_response_tokens": 0.0})
    micro = 24 / 7
    expected = passed(setting, small(), micro, 6, 4 * micro, 4 / 6)
    same(rows(setting)["reference"], repeated("reference", expected, 5 * 7, setting))
    same(rows(setting)["update"], updated(setting, 4, 12 / 4, 6, 4 / 6))


def test_phases_are_those_of_the_roles_that_there_are() -> None:
    assert list(rows(loop(rlhf={"ref": False}))) == ["rollout", "score", "value", "advantage", "update"]
    assert "value" not in rows(loop(rlhf={"layout": "shared_trunk"}))
    assert "value" not in rows(loop("grpo"))
    # rules give the rewards
    assert list(rows(loop(rlhf={"reward": None}))) == ["rollout", "reference", "value", "advantage", "update"]


@pytest.mark.parametrize(("gpus", "sequences"), [(1, 24), (4, 6)])
def test_advantages_are_a_dozen_operations_a_position(gpus: int, sequences: int) -> None:
    setting = loop(gpus=gpus)
    once = Work(bytes_moved=sequences * 4 * 80, operations=13 * 4)
    same(rows(setting)["advantage"], repeated("advantage", once, 5, setting))


def updated(setting: Setting, passes: float, micro: float, tokens: float, read: float, last: bool = True) -> Row:
    """Five updates of three epochs over two mini-batches: policy, and value where it is apart."""
    counted = replace(setting, workload=replace(setting.workload, loss_tokens=read, read_tokens=read if last else 1.0))
    total, seconds, bound = Work(), 0.0, ""
    value = own_value(setting)
    trained = [(setting.model, setting.levers, True)]
    if value is not None:
        trained.append((value, value_levers(setting), False))
    for shape, levers, policy in trained:
        once = micro_step(counted, shape, levers, micro, tokens, policy)
        step = optimizer_step(counted, shape, levers)
        total = total + once.times(30 * passes) + step.times(30)
        seconds += 30 * passes * duration(once, setting).seconds
        seconds += 30 * duration(step, setting).seconds
        bound = duration(once, setting).bound if policy else bound
    return ("update", total, seconds, bound)


@pytest.mark.parametrize("roles", [{}, {"layout": "shared_trunk"}, {"value_levers": None}], ids=str)
def test_the_update_trains_policy_and_value_on_packed_mini_batches(roles: dict[str, Any]) -> None:
    # twelve sequences of seven tokens: four passes of three
    setting = loop(rlhf=roles)
    same(rows(setting)["update"], updated(setting, 4, 3, 6, 3 / 6))
    halved = loop(rlhf=roles, gpus=2)
    same(rows(halved)["update"], updated(halved, 2, 3, 6, 3 / 6))


def test_the_update_without_packing_pads_and_makes_logits_at_every_token() -> None:
    setting = loop(software="transformers", micro_batch=5)
    same(rows(setting)["update"], updated(setting, 12 / 5, 5, 7, 1.0, last=False))
    long = loop("ppo", {"mean_response_tokens": 9.0}, software="transformers", micro_batch=50)
    same(rows(long)["update"], updated(long, 1, 12, 7, 1.0, last=False))


def test_the_bound_of_the_update_is_that_of_the_policys_pass() -> None:
    # a policy of 3 layers, and a value model so wide that products are what bounds it
    setting = loop("ppo", rlhf={"value": small(width=20000, mlp_width=40000)})
    assert rows(setting)["update"][3] == "launch"
    wide = replace(setting, model=small(width=20000, mlp_width=40000))
    wide = replace(wide, rlhf=replace(roles_of(wide), value=small()))
    assert rows(wide)["update"][3] != "launch"


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("chosen", "batch", "micro"),
    [({}, 12, 3), ({"gpus": 2}, 6, 3), ({"gpus": 8}, 1, 1), ({"gpus": 16}, 1, 1), ({"micro_batch": 20}, 12, 12)],
)
def test_a_mini_batch_is_the_devices_share_and_at_least_one(chosen: dict[str, Any], batch: int, micro: int) -> None:
    setting = loop(**chosen)
    assert (mini_batch(setting), update_micro_batch(setting)) == (batch, micro)


@pytest.mark.parametrize(
    ("budget", "software", "available", "found"),
    [
        (None, "ours", 24, 3),
        (None, "ours", 2, 2),
        (20.0, "ours", 24, 2.5),
        (2.0, "ours", 24, 1),
        (1e6, "ours", 24, 24),
        (1e6, "ours", 400, (400 * 7 + 3 * 20 * 3) / 8),
        (None, "transformers", 24, 3),
        (None, "transformers", 2, 2),
        (20.0, "transformers", 24, 3),
    ],
)
def test_a_pass_holds_the_longest_sequences_that_its_budget_has_room_for(
    budget: float | None, software: str, available: float, found: float
) -> None:
    setting = loop("ppo", {"micro_batch_tokens": budget}, software=software)
    assert packed_sequences(setting, available) == found


Held = dict[str, dict[str, float]]


def moments(setting: Setting) -> dict[str, Held]:
    """Phase -> role -> what it holds, without parts of no size."""
    return {
        moment.phase: {
            role: {part: size for part, size in parts.items() if size} for role, parts in moment.roles.items()
        }
        for moment in ppo_moments(setting)
    }


def states(setting: Setting, shape: ModelShape, levers: Levers) -> dict[str, float]:
    held = {"weights": weights(setting, shape, levers), "optimizer": optimizer_bytes(setting, shape, levers)}
    return {part: size for part, size in held.items() if size}


def resident(setting: Setting) -> Held:
    """Of the separate layout."""
    return {
        "policy": states(setting, setting.model, setting.levers),
        "ref": frozen_role(setting, setting.model, setting.levers),
        "reward": frozen_role(setting, REWARD, setting.levers),
        "value": states(setting, VALUE, VALUE_LEVERS),
    }


def with_parts(held: Held, role: str, parts: dict[str, float], gathered: float = 0.0) -> Held:
    more = dict(parts)
    more["workspace"] = more.get("workspace", 0.0) + gathered
    return held | {role: held.get(role, {}) | {part: size for part, size in more.items() if size}}


def test_the_roles_of_the_separate_layout_stay_and_one_works() -> None:
    setting = loop(rlhf={"rescored": 2})
    model, levers = setting.model, setting.levers
    result, held = moments(setting), resident(setting)
    rollout = generating(setting, model, levers, 6, 8, 4)
    assert result["rollout"] == with_parts(held, "policy", rollout)
    # three sequences of a pass; of those scored again there are two
    for name, role, shape, vocabulary, sequences in (
        ("logprobs", "policy", model, True, 2.0),
        ("score", "reward", REWARD, False, 3.0),
        ("reference", "ref", model, True, 3.0),
        ("value", "value", VALUE, False, 3.0),
    ):
        parts = scoring(setting, shape, levers, sequences, 8, vocabulary)
        assert result[name] == with_parts(held, role, parts), name
    assert list(result)[:5] == ["rollout", "logprobs", "score", "reference", "value"]


@pytest.mark.parametrize(("rescored", "rows_of_a_pass"), [(24, 3.0), (4, 2.0), (1, 1.0)])
def test_scoring_again_holds_no_more_than_there_is_to_score(rescored: int, rows_of_a_pass: float) -> None:
    setting = loop(rlhf={"rescored": rescored}, gpus=2)
    parts = scoring(setting, setting.model, setting.levers, rows_of_a_pass, 8, True)
    assert moments(setting)["logprobs"] == with_parts(resident(setting), "policy", parts)


def test_the_rollout_holds_the_caches_of_the_devices_own_share() -> None:
    setting = loop(gpus=8)
    parts = generating(setting, setting.model, setting.levers, 3, 8, 4)
    assert moments(setting)["rollout"] == with_parts(resident(setting), "policy", parts)


def test_divided_roles_are_whole_while_they_pass_without_gradient() -> None:
    setting = loop(
        "ppo",
        parallel="fsdp",
        gpus=8,
        weights_fp32=True,
        rlhf={"reward": small(layers=9), "value_levers": replace(VALUE_LEVERS, parallel="fsdp", weights_fp32=True)},
    )
    loops, model, levers = roles_of(setting), setting.model, setting.levers
    assert loops.value_levers is not None
    frozen = replace(levers, tuning="frozen", weights_fp32=False)
    result = moments(setting)
    gathered = {
        "rollout": ("policy", gathered_bytes(setting, model, levers)),
        "score": ("reward", gathered_bytes(setting, small(layers=9), frozen)),
        "reference": ("ref", gathered_bytes(setting, model, frozen)),
        "value": ("value", gathered_bytes(setting, VALUE, loops.value_levers)),
    }
    assert len({size for _, size in gathered.values()}) == 4
    for phase, (role, size) in gathered.items():
        assert size > 0
        assert result[phase][role]["workspace"] == pytest.approx(size), phase


def test_an_adapter_that_is_off_is_the_reference() -> None:
    setting = loop(tuning="lora")
    result = moments(setting)
    assert "ref" not in result["rollout"]
    passing = scoring(setting, setting.model, setting.levers, 3.0, 8, True)
    assert result["reference"]["ref"] == {part: size for part, size in passing.items() if size}
    assert "ref" not in moments(loop(rlhf={"ref": False}))["rollout"]


def test_rewards_from_rules_hold_no_model() -> None:
    result = moments(loop(rlhf={"reward": None}))
    assert "score" not in result
    assert set(result["rollout"]) == {"policy", "ref", "value"}


def test_a_shared_base_holds_adapters_beside_one_model() -> None:
    lora: dict[str, Any] = {"tuning": "lora", "lora_rank": 2, "lora_modules": ("q", "down")}
    adapter = 3 * 2 * (22 + 27)
    shared = {"layout": "shared_base", "value_levers": None}
    held = moments(loop(rlhf=shared, **lora))["rollout"]
    assert set(held) == {"policy", "reward", "value"}
    assert held["policy"]["weights"] == 2 * 4700 + 4 * adapter
    assert held["reward"] == {"weights": 4 * adapter}
    assert held["value"] == {"weights": 4 * adapter, "optimizer": 2 * 4 * adapter}
    adapters = {
        "reward_levers": Levers(**(lora | {"lora_rank": 4})),
        "value_levers": Levers(**(lora | {"lora_rank": 6})),
    }
    held = moments(loop(rlhf=shared | adapters, **lora))["rollout"]
    assert held["reward"] == {"weights": 2 * 4 * adapter}
    assert held["value"] == {"weights": 3 * 4 * adapter, "optimizer": 3 * 8 * adapter}
    assert set(moments(loop("grpo", rlhf=shared, **lora))["rollout"]) == {"policy", "reward"}
    sft = {"ref_levers": Levers(**lora)}
    held = moments(loop(rlhf=shared | sft, **lora))["rollout"]
    assert held["ref"] == {"weights": 4 * adapter}
    assert "ref" not in moments(loop(rlhf=shared | sft | {"ref": False}, **lora))["rollout"]


def test_frozen_models_of_their_own_hold_the_adapters_they_were_saved_with() -> None:
    lora: dict[str, Any] = {"tuning": "lora", "lora_rank": 2, "lora_modules": ("q", "down")}
    adapters = {"ref_levers": Levers(**lora), "reward_levers": Levers(**(lora | {"lora_rank": 4}))}
    plain, held = (moments(loop(rlhf=chosen))["rollout"] for chosen in ({}, adapters))
    assert held["ref"]["weights"] - plain["ref"]["weights"] == 4 * 3 * 2 * (22 + 27)
    assert held["reward"]["weights"] - plain["reward"]["weights"] == 4 * 2 * 4 * (22 + 27)


def training(
    setting: Setting,
    shape: ModelShape,
    levers: Levers,
    role: str,
    read: float = 3 / 7,
    accumulation: int = 4,
    budget: float | None = 24.0,
    micro: int = 3,
) -> dict[str, dict[str, float]]:
    """Moment of a step -> what a role holds beside its states."""
    held = replace(levers, micro_batch=micro, accumulation=accumulation)
    counted = replace(
        setting,
        levers=replace(setting.levers, micro_batch=micro, accumulation=accumulation),
        workload=replace(
            setting.workload, loss_tokens=read, read_tokens=read if budget else 1.0, micro_batch_tokens=budget
        ),
    )
    return {
        moment.phase: {part: size for part, size in moment.roles[role].items() if part not in ("weights", "optimizer")}
        for moment in training_moments(counted, shape, held, "update", role, role == "policy")
    }


STEPS = ["update:loss", "update:backward", "update:backward_end", "update:step"]


@pytest.mark.parametrize(("batch", "accumulation"), [(24, 4), (6, 1)])
def test_policy_and_value_keep_their_activations_until_their_common_loss(batch: int, accumulation: int) -> None:
    setting = loop(rlhf={"batch": batch, "rollout_batch": 6})
    policy = training(setting, setting.model, setting.levers, "policy", accumulation=accumulation)
    value = training(setting, VALUE, VALUE_LEVERS, "value", accumulation=accumulation)
    held = resident(setting)
    waiting = policy["update:step"]["gradients"] if accumulation > 1 else 0.0
    kept = {"activations": policy["update:loss"]["activations"], "gradients": waiting}
    gradients = {"gradients": value["update:step"]["gradients"]}
    result = ppo_moments(setting)
    assert [moment.phase for moment in result[4:]] == STEPS + STEPS
    item = [
        {role: {part: size for part, size in parts.items() if size} for role, parts in moment.roles.items()}
        for moment in result
    ]
    for phase, roles in zip(STEPS, item[4:8], strict=True):
        expected = with_parts(with_parts(held, "value", value[phase]), "policy", kept)
        assert roles == expected, phase
    for phase, roles in zip(STEPS, item[8:], strict=True):
        expected = with_parts(with_parts(held, "policy", policy[phase]), "value", gradients)
        assert roles == expected, phase


def test_without_a_value_model_the_policy_trains_alone() -> None:
    setting = loop(rlhf={"layout": "shared_trunk"})
    policy = training(setting, setting.model, setting.levers, "policy")
    result, held = moments(setting), resident(setting)
    del held["value"]
    assert [phase for phase in result if phase.startswith("update")] == STEPS
    for phase in STEPS:
        assert result[phase] == with_parts(held, "policy", policy[phase])


@pytest.mark.parametrize(
    ("work", "chosen", "parts"),
    [
        ({"mean_response_tokens": 0.0}, {}, {"read": 4 / 7}),
        ({"mean_response_tokens": 9.0}, {}, {"read": 1.0}),
        ({"mean_response_tokens": 1.0, "mean_tokens": 0.5}, {},
         {"read": 1.0, "accumulation": 1, "budget": 12 * 0.5 + 3 * 12**0.5 * 1.0}),
        ({}, {"loss": "fused", "device": "cpu"}, {"read": 1.0}),
        ({}, {"loss": "fused"}, {"read": 3 / 7}),
        ({}, {"device": "cpu"}, {"read": 3 / 7}),
        ({}, {"software": "transformers"}, {"budget": None, "read": 1.0}),
        ({}, {"software": "transformers", "micro_batch": 5}, {"budget": None, "accumulation": 2,
                                                              "micro": 5, "read": 1.0}),
        ({"micro_batch_tokens": 20.0}, {}, {"budget": 20.0, "accumulation": 5}),
        ({"micro_batch_tokens": 1e6}, {"micro_batch": 20},
         {"budget": 96.0, "accumulation": 1, "micro": 12}),
    ],
)  # fmt: skip
def test_what_a_micro_batch_of_the_update_holds(
    work: dict[str, Any], chosen: dict[str, Any], parts: dict[str, Any]
) -> None:
    setting = loop("rloo", work, **chosen)
    policy = training(setting, setting.model, setting.levers, "policy", **parts)
    result, held = moments(setting), resident(setting)
    del held["value"]
    for phase in STEPS:
        assert result[phase] == with_parts(held, "policy", policy[phase]), phase
