"""params.yaml -> plan: stages, phases and sums, partial files, and mistakes."""

import json
from pathlib import Path

import pytest
import yaml

from config.errors import CostError, ParamsError
from config.load import load, load_partly
from config.schema import Params
from config.work import GAP_SAMPLE
from costs.formulas.setting import Workload
from costs.planning.models import base_shape
from costs.planning.moments import moments
from costs.planning.planner import plan
from costs.planning.rows import Rows, count, file_rows
from costs.planning.settings import compared_responses, setting_of, settings
from costs.planning.target import Target, find_target

DEMO = Path("recipes/demo.yaml")
LARGE = ["model.path=meta-llama/Llama-3.1-8B", "model.random=null", "model.dtype=bf16"]


def demo(*assignments: str) -> Params:
    return load(DEMO, list(assignments))


def target(params: Params, name: str | None = None, gpus: int = 1, root: Path = Path("nowhere")) -> Target:
    return find_target(params, name, gpus, None, root)


def test_ppo_has_the_phases_that_its_loop_measures() -> None:
    params = demo()
    phases = [phase.phase for phase in plan(params, target(params), ("ppo",)).stages[0].phases]
    assert phases == ["start", "rollout", "logprobs", "score", "reference", "value", "advantage", "update", "save"]


def test_ppo_computes_the_policys_log_probs_again_for_all_responses_or_for_a_sample() -> None:
    flops = {}
    for recompute in ("true", "false"):
        params = demo(f"ppo.recompute_logprobs={recompute}")
        flops[recompute] = {
            phase.phase: phase.flops for phase in plan(params, target(params), ("ppo",)).stages[0].phases
        }
    assert flops["true"]["logprobs"] == pytest.approx(flops["true"]["reference"])
    assert flops["false"]["logprobs"] == pytest.approx(flops["true"]["logprobs"] * 16 / 128)


@pytest.mark.parametrize(("batch", "compared"), [(128, 16), (130, 17), (31, 31), (8, 8), (1, 1)])
def test_as_many_responses_are_compared_as_the_rollout_compares(batch: int, compared: int) -> None:
    every = max(1, batch // GAP_SAMPLE)
    assert compared_responses(batch) == compared == len(range(batch)[::every])


def test_adapters_on_the_shared_base_have_the_rank_of_the_reward_stage() -> None:
    sizes = {}
    for rank in (4, 32):
        params = load(Path("recipes/demo-lora.yaml"), [f"reward.lora.rank={rank}"])
        setting = settings(params, target(params))["ppo"]
        sizes[rank] = moments(setting)[0].roles
    small, large = sizes[4], sizes[32]
    assert large["policy"] == small["policy"]
    for role, part in (("reward", "weights"), ("value", "weights"), ("value", "optimizer")):
        assert large[role][part] == pytest.approx(8 * small[role][part])


def test_an_sft_model_that_is_an_adapter_stays_beside_the_policys_as_the_reference() -> None:
    lora = "{rank: 16, alpha: 32.0, modules: [q, k, v, o, gate, up, down], dropout: 0.0}"
    folder = ["model.path=qwen2.5-0.5b", "model.random=null"]
    held = []
    for sft in ("null", lora):
        params = load(Path("recipes/demo-lora.yaml"), [*folder, f"sft.lora={sft}"])
        held.append(moments(settings(params, target(params))["ppo"])[0].roles)
    whole, adapter = held
    assert "ref" not in whole
    assert adapter == whole | {"ref": {"weights": whole["reward"]["weights"]}}


def test_reward_and_value_model_have_no_output_head() -> None:
    untied = demo("model.random.tie_embeddings=false")
    result = settings(untied, target(untied))
    shape = result["sft"].model
    resident = moments(result["ppo"])[0].roles
    assert shape.head_parameters > 0
    for role, parameters in (
        ("policy", shape.parameters),
        ("reward", shape.backbone_parameters),
        ("value", shape.backbone_parameters),
    ):
        assert resident[role]["weights"] == 4 * parameters
    assert moments(result["reward"])[0].roles["policy"]["weights"] == 4 * shape.backbone_parameters


@pytest.mark.parametrize("method", ["rloo", "grpo"])
def test_without_a_critic_the_phases_are_those_of_ppo_without_values(method: str) -> None:
    params = demo(f"{method}.kl.coef=0.0", f"{method}.{method}_epochs=3")
    phases = [phase.phase for phase in plan(params, target(params), (method,)).stages[0].phases]
    assert phases == ["start", "rollout", "logprobs", "score", "reference", "advantage", "update", "save"]
    setting = settings(params, target(params))[method]
    assert setting.rlhf is not None
    assert (setting.rlhf.value, setting.rlhf.ppo_epochs) == (None, 3)


@pytest.mark.parametrize("method", ["dpo", "kto", "rloo", "grpo"])
def test_the_run_is_planned_with_its_own_method(method: str) -> None:
    params = demo(f"align.method={method}")
    assert [stage.stage for stage in plan(params, target(params)).stages] == [
        "data",
        "sft",
        "reward",
        method,
        "evaluate",
    ]


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_the_reference_is_computed_once_however_many_epochs_there_are(method: str) -> None:
    seconds = {}
    for epochs in ("1.0", "3.0"):
        params = demo(f"{method}.epochs={epochs}")
        stage = plan(params, target(params), (method,)).stages[0]
        seconds[epochs] = {phase.phase: phase.seconds for phase in stage.phases}
        assert "ref" not in stage.memory
    assert seconds["3.0"]["reference"] == seconds["1.0"]["reference"] > 0
    assert seconds["3.0"]["train"] == pytest.approx(3 * seconds["1.0"]["train"])


def test_dpo_holds_logits_of_replies_alone_a_chunk_at_a_time() -> None:
    # measured: a run of 8 sequences of 512 tokens over 8,192 entries peaked at 1,645 MiB above its imports with TRL's
    # head, whose tiles are large, and at 682 with our own chunks
    def logits(vocab: int) -> float:
        params = demo(f"model.random.vocab_size={vocab}")
        return moments(settings(params, target(params))["dpo"])[0].roles["policy"]["logits"]

    read = 128 * 51 * (52.7 - 36.5) / (52.7 / 2)  # half a pair's tokens, the reply's share of them
    assert logits(512) == pytest.approx(read * 512 * 12)  # fp32
    assert logits(8192) == pytest.approx(2**22 * 12)


def test_evaluation_has_the_phases_that_its_stage_measures() -> None:
    params = demo()
    assert [phase.phase for phase in plan(params, target(params), ("evaluate",)).stages[0].phases] == [
        "start",
        "generate",
        "score",
        "save",
    ]


def test_steps_are_rows_times_epochs_over_the_batch() -> None:
    params = demo()
    result = {stage.stage: stage for stage in plan(params, target(params)).stages}
    assert result["sft"].steps == 12_000 * 0.9 / 32
    assert result["reward"].steps == pytest.approx(
        params.data.source.preference_rows * 0.9 * params.reward.epochs / params.reward.batch_size
    )
    assert result["ppo"].steps == params.ppo.updates


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo"])
def test_the_smaller_of_epochs_and_max_steps_is_planned(stage: str) -> None:
    steps = {}
    for max_steps in ("null", "7", "100000"):
        params = demo(f"{stage}.max_steps={max_steps}")
        steps[max_steps] = plan(params, target(params), (stage,)).stages[0].steps
    assert steps["7"] == 7 < steps["null"] == steps["100000"]


def test_a_pair_is_two_sequences() -> None:
    params = demo()
    result = settings(params, target(params))
    assert result["reward"].levers.micro_batch == 2 * params.reward.micro_batch_size


@pytest.mark.parametrize(
    ("stage", "assignment", "masked"),
    [
        ("sft", "model.attention=sdpa", True),
        ("sft", "model.attention=eager", False),
        ("sft", "model.attention=flash_attention_2", False),
        ("sft", "sft.micro_batch_size=1", False),
        ("reward", "model.attention=sdpa", False),  # packed
        ("dpo", "model.attention=sdpa", False),
        ("rloo", "model.attention=sdpa", False),
        ("ppo", "model.attention=sdpa", False),
    ],
)
def test_a_batch_of_several_lengths_has_a_mask_that_sdpa_keeps(stage: str, assignment: str, masked: bool) -> None:
    params = demo(assignment)
    assert settings(params, target(params))[stage].mask_tensor is masked


def test_devices_share_the_batch() -> None:
    params = demo("sft.batch_size=64", "sft.micro_batch_size=4")
    levers = settings(params, target(params, "a100-80", gpus=4))["sft"].levers
    assert levers.micro_batch * levers.accumulation * 4 == 64


def test_a_batch_that_does_not_split_over_the_devices_is_refused() -> None:
    params = demo()
    with pytest.raises(CostError, match="32 does not split over 3 devices"):
        plan(params, target(params, "a100-80", gpus=3), ("sft",))


def test_a_model_too_large_names_the_shortfall_and_a_lever() -> None:
    params = demo(*LARGE)
    stage = plan(params, target(params, "rtx4090"), ("sft",)).stages[0]
    assert not stage.fits
    assert stage.shortfall_bytes == pytest.approx(
        stage.device_bytes_per_gpu - target(params, "rtx4090").hardware.usable_bytes
    )
    assert "LoRA" in stage.lever


def test_what_no_lever_helps_says_how_much_it_needs() -> None:
    params = demo("model.path=llama-3.1-405b", "model.random=null", "model.dtype=bf16")
    assert "it needs at least" in plan(params, target(params, "t4"), ("sft",)).stages[0].lever


def test_a_local_folder_is_read_for_its_config(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": '
        '4, "vocab_size": 300}'
    )
    assert base_shape(demo("model.path=mine", "model.random=null"), tmp_path).width == 64


def test_an_unknown_stage_is_refused() -> None:
    params = demo()
    with pytest.raises(CostError, match="--stage dpoo is not a stage"):
        plan(params, target(params), ("dpoo",))


# ---------------------------------------------------------------- rows


def test_rows_come_from_the_data_stage_when_it_ran_with_this_data(tmp_path: Path) -> None:
    params = demo()
    (tmp_path / "metrics").mkdir()
    measured = {f"{name}_train_rows": 100 for name in ("sft", "preference", "prompts")}
    measured |= {f"{name}_train_tokens_mean": 30.0 for name in ("sft", "preference", "prompts")} | {
        "prompts_train_tokens_max": 40
    }
    (tmp_path / "metrics" / "data.json").write_text(json.dumps(measured))
    lock = {"stages": {"data": {"params": {"params.yaml": {"data": params.data.model_dump(mode="json")}}}}}
    (tmp_path / "dvc.lock").write_text(yaml.safe_dump(lock))
    assert count(params, tmp_path).sft == 100
    # other data: the metrics do not count
    assert count(demo("data.test_fraction=0.5"), tmp_path).sft == 6000


def test_what_both_sequences_of_a_pair_begin_with_is_planned_once() -> None:
    rows = Rows(
        sft=100, preference=100, prompts=100, sft_tokens=30, preference_tokens=30,
        prompt_tokens=14, longest_prompt=20, longest_preference=50, pair_tokens=44, longest_pair=77,
    )  # fmt: skip

    def work(stage: str, attention: str) -> Workload:
        params = demo(f"model.attention={attention}")
        return setting_of(params, target(params), stage, rows, base_shape(params, Path())).workload

    for stage in ("reward", "dpo"):
        for attention in ("sdpa", "flash_attention_2"):
            result = work(stage, attention)
            assert (result.mean_tokens, result.max_tokens) == (22, 39)
            assert result.mean_tokens * result.attention_places == pytest.approx(30)
        whole = work(stage, "eager")
        assert (whole.mean_tokens, whole.max_tokens, whole.attention_places) == (30, 50, 1)
    assert work("reward", "sdpa").read_tokens == pytest.approx(1 / 22)  # the last of each
    assert work("dpo", "sdpa").read_tokens == pytest.approx(14 / 22)  # 14 of 30 are the reply's
    assert work("dpo", "eager").loss_tokens == pytest.approx(14 / 30)


def test_nothing_is_planned_as_shared_before_it_is_known() -> None:
    rows = Rows(100, 100, 100, 30, 30, 14, 20)
    params = demo()
    result = setting_of(params, target(params), "dpo", rows, base_shape(params, Path())).workload
    assert (result.mean_tokens, result.attention_places, result.loss_tokens) == (30, 1, 1)
    assert result.max_tokens == params.section("dpo").max_length


def test_the_embedded_world_is_planned_with_the_lengths_of_its_texts(tmp_path: Path) -> None:
    params = demo()
    result = count(params, tmp_path)
    assert (result.sft_tokens, result.longest_sft, result.longest_prompt) == (36.2, 57, 23)
    assert result.sft_tokens < params.sft.max_length * 0.6
    assert count(demo("sft.max_length=30"), tmp_path).sft_tokens == 30
    (tmp_path / "pairs.jsonl").write_text('{"a": 1}\n')
    other = count(demo("data.source={kind: file, path: pairs.jsonl, format: pairs, columns: {}}"), tmp_path)
    assert other.sft_tokens == params.sft.max_length * 0.6
    assert other.longest_sft == float("inf")


def test_rows_of_local_files_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    (tmp_path / "b.json").write_text("[1, 2, 3]")
    (tmp_path / "c.csv").write_text("x\n1\n2\n")
    assert [file_rows(tmp_path / name) for name in ("a.jsonl", "b.json", "c.csv", "missing.jsonl")] == [2, 3, 2, None]


# ---------------------------------------------------------------- a stage alone


def test_a_stage_alone_needs_no_other_section(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(
        "model: {path: llama-2-7b, dtype: bf16, attention: sdpa}\n"
        "sft: {max_length: 2048, batch_size: 8, micro_batch_size: 2, max_steps: 100, "
        "activation_checkpointing: true}\n"
    )
    params, notes = load_partly(file, [], ("sft",))
    stage = plan(params, target(params, "a100-80"), ("sft",)).stages[0]
    # fp32, and the copy that autocast keeps of all but the embedding
    assert stage.memory["policy"]["weights"] == (4 + 2) * 6_738_415_616 - 2 * 32000 * 4096
    assert stage.steps == 100
    assert "sft.epochs" in notes[0]


def test_a_stage_alone_must_be_there(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("model: {path: llama-2-7b}\n")
    with pytest.raises(ParamsError, match="has no section sft"):
        load_partly(file, [], ("sft",))


def test_without_a_named_stage_the_file_must_be_complete(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("seed: 1\n")
    with pytest.raises(ParamsError, match="is missing"):
        load_partly(file, [], ())


@pytest.mark.parametrize("recipe", sorted(path.name for path in Path("recipes").glob("*.yaml")))
def test_every_recipe_can_be_planned(recipe: str) -> None:
    params = load(Path("recipes") / recipe)
    assert plan(params, target(params)).total["seconds"] > 0


# ---------------------------------------------------------------- every setting arrives


def test_every_setting_of_the_loop_reaches_its_plan() -> None:
    params = demo(
        "ppo.batch_size=96", "ppo.num_mini_batches=3", "ppo.rollout_batch_size=24",
        "ppo.ppo_epochs=5", "ppo.updates=17", "ppo.max_new_tokens=19",
        "ppo.micro_batch_tokens=777", "ppo.layout=separate",
    )  # fmt: skip
    setting = settings(params, target(params))["ppo"]
    loop, work = setting.rlhf, setting.workload
    assert loop is not None
    assert (loop.batch, loop.mini_batches, loop.rollout_batch, loop.ppo_epochs) == (96, 3, 24, 5)
    assert (work.steps, work.response_tokens, work.micro_batch_tokens) == (17, 19, 777.0)
    rows = count(params, Path("nowhere"))
    assert work.max_tokens == int(rows.longest_prompt) + 19


def test_an_adapter_reaches_the_levers_of_its_stage_alone() -> None:
    params = load(Path("recipes/demo-lora.yaml"), ["reward.lora={rank: 5, alpha: 10, dropout: 0.25, modules: [k, o]}"])
    result = settings(params, target(params))
    levers = result["reward"].levers
    assert (levers.tuning, levers.lora_rank, levers.lora_modules) == ("lora", 5, ("k", "o"))
    assert levers.lora_dropout
    assert result["ppo"].levers.lora_rank == params.ppo.lora.rank  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("word", "parallel", "offloads"), [("none", "ddp", False), ("zero2", "zero2", True), ("zero3", "fsdp", True)]
)
def test_sharding_of_a_stage_is_its_parallelism_and_offloading_needs_it(
    word: str, parallel: str, offloads: bool
) -> None:
    params = demo()
    place = params.where.default.model_copy(update={"sharding": word, "offload": True})
    where = params.where.model_copy(update={"default": place})
    placed = params.model_copy(update={"where": where})
    alone, two = (settings(placed, target(params, gpus=gpus))["sft"].levers for gpus in (1, 2))
    assert two.parallel == parallel
    assert (two.offload_optimizer, two.offload_weights) == (offloads, offloads)
    assert (alone.offload_optimizer, alone.offload_weights) == (False, False)


def test_what_is_read_besides_training_is_counted() -> None:
    params = demo()
    rows = count(params, Path("nowhere"))
    result = settings(params, target(params))
    both = rows.preference + rows.preference_held_out
    assert result["sft"].workload.held_out == rows.sft_held_out
    # scored once more for mean and deviation: at most 2000 pairs
    assert result["reward"].workload.held_out == 2 * (rows.preference_held_out + 2000)
    assert result["dpo"].workload.held_out == 2 * rows.preference_held_out
    assert result["dpo"].workload.reference_sequences == 2 * both
    # both replies of a pair, and one of another prompt beside each, with the prompt once
    twice = 2 - rows.prompt_tokens / rows.preference_tokens
    assert result["kto"].workload.held_out == pytest.approx(2 * twice * rows.preference_held_out)
    assert result["kto"].workload.reference_sequences == pytest.approx(2 * twice * both)
    assert result["kto"].workload.steps == pytest.approx(2 * rows.preference / params.kto.batch_size)


def test_ratings_are_counted_beside_pairs() -> None:
    rows = Rows(100, 100, 100, 30, 30, 14, 20, longest_preference=50, preference_held_out=10,
                ratings=50, ratings_held_out=5, ratings_tokens=60, longest_rating=80)  # fmt: skip
    params = demo()
    result = setting_of(params, target(params), "kto", rows, base_shape(params, Path())).workload
    assert (result.mean_tokens, result.max_tokens) == ((200 * 30 + 50 * 60) / 250, 80)
    assert result.steps == pytest.approx(250 / params.kto.batch_size)
    twice = 2 - 14 / 36  # the prompt is read once
    assert (result.held_out, result.reference_sequences) == pytest.approx((twice * 25, twice * 275))


def test_three_models_answer_every_prompt_of_the_evaluation() -> None:
    params = demo("evaluate.prompts=100", "evaluate.batch_size=32", "evaluate.max_new_tokens=21")
    work = settings(params, target(params))["evaluate"].workload
    assert (work.steps, work.response_tokens) == (3 * 4, 21)


def test_measured_rows_have_each_their_own_column(tmp_path: Path) -> None:
    params = demo()
    (tmp_path / "metrics").mkdir()
    measured = {
        f"{name}_{rest}": float(10 * i + j)
        for i, name in enumerate(("sft", "preference", "prompts"), 1)
        for j, rest in enumerate(("train_rows", "train_tokens_mean", "train_tokens_max", "test_rows"))
    }
    (tmp_path / "metrics" / "data.json").write_text(json.dumps(measured))
    made_with = {"params.yaml": {"data": params.data.model_dump(mode="json")}}
    (tmp_path / "dvc.lock").write_text(yaml.safe_dump({"stages": {"data": {"params": made_with}}}))
    rows = count(params, tmp_path)
    assert (rows.sft, rows.sft_tokens, rows.longest_sft, rows.sft_held_out) == (10, 11, 12, 13)
    assert (rows.preference, rows.preference_tokens) == (20, 21)
    assert (rows.longest_preference, rows.preference_held_out) == (22, 23)
    assert (rows.prompts, rows.prompt_tokens, rows.longest_prompt) == (30, 31, 32)


def test_votes_are_pairs_to_learn_from(tmp_path: Path) -> None:
    (tmp_path / "votes.jsonl").write_text("{}\n" * 50)
    source = "data.vote_source={kind: file, path: votes.jsonl, format: votes, columns: {}}"
    without, with_votes = count(demo(), tmp_path), count(demo(source), tmp_path)
    assert with_votes.preference - without.preference == pytest.approx(50 * 0.9)
    assert with_votes.preference_held_out - without.preference_held_out == pytest.approx(50 * 0.1)


def test_a_smaller_reward_model_costs_less_wherever_it_is() -> None:
    """The reward stage, PPO with the value model that starts from it, and the evaluation."""
    whole, small = (
        {stage.stage: stage for stage in plan(params, target(params)).stages}
        for params in (demo(), demo("reward.layers=1"))
    )
    for stage in ("reward", "ppo", "evaluate"):
        assert small[stage].seconds < whole[stage].seconds, stage
    roles = ("reward", "value")
    for role in roles:
        held = [item["ppo"].memory[role]["weights"] for item in (whole, small)]
        assert held[1] < held[0], role
    assert small["sft"].seconds == whole["sft"].seconds
    with pytest.raises(CostError, match=r"reward\.layers=9, and the model .* has 3\. Lower it"):
        plan(demo("reward.layers=9"), target(demo()))
