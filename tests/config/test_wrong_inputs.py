"""Wrong inputs and what is said to them: one line each, with the value, the rule and the fix."""

import pytest

from config.errors import ParamsError
from config.load import load
from tests.conftest import ROOT

TOLD = {
    "sft.epochs=0": "sft.epochs=0 from --set: input should be greater than 0.",
    "sft.epoch=1": "sft.epoch is not a parameter from --set; did you mean epochs?",
    "sft.learning_rate=-1": "sft.learning_rate=-1 from --set: input should be greater than 0.",
    "sft.batch_size=100": (
        "sft.batch_size=100 does not split into sft.micro_batch_size=32. Change either in params.yaml."
    ),
    "sft.max_length=100000": (
        "sft.max_length=100000 does not fit in model.context_length=96. Change either in params.yaml."
    ),
    "reward.epochs=no": "reward.epochs='no' from --set: input should be a valid number.",
    "ppo.num_mini_batches=7": (
        "ppo.batch_size=128 does not split into ppo.num_mini_batches=7. Change either in params.yaml."
    ),
    "ppo.cliprange=1.5": "ppo.cliprange=1.5 from --set: input should be less than 1.",
    "ppo.gamma=2": "ppo.gamma=2 from --set: input should be less than or equal to 1.",
    "ppo.layout=shared": (
        "ppo.layout='shared' from --set: input should be 'separate', 'shared_trunk' or 'shared_base'."
    ),
    "ppo.layout=shared_base": (
        "ppo.layout=shared_base shares one frozen base between adapters, and ppo.lora is "
        "null. Set ppo.lora, or layout: separate in params.yaml."
    ),
    "ppo.kl.coef=-0.1": "ppo.kl.coef=-0.1 from --set: input should be greater than or equal to 0.",
    "ppo.kl.mode=never": (
        "ppo.kl.mode is not a parameter from --set; known there: coef, controller, horizon, target."
    ),
    "ppo.lora={rank: 8, alpha: 16.0, modules: [q], dropout: 0.1}": (
        "ppo.lora.dropout=0.1: with dropout the policy that learns is not the one that "
        "sampled. Set ppo.lora.dropout: 0.0 in params.yaml."
    ),
    "align.method=dqn": ("align.method='dqn' from --set: input should be 'ppo', 'dpo', 'kto', 'grpo' or 'rloo'."),
    "model.path=base": (
        "model.path=base and model.random=a shape: exactly one of them must be set. Set "
        "the other to null in params.yaml."
    ),
    "model.random=null": (
        "model.path=None and model.random=None: exactly one of them must be set. Set the other to null in params.yaml."
    ),
    "model.random.heads=5": (
        "model.random.width=96 does not split into model.random.heads=5 of even size. Change either in params.yaml."
    ),
    "model.random.kv_heads=3": (
        "model.random.kv_heads=3 does not divide model.random.heads=4. Change either in params.yaml."
    ),
    "model.dtype=int8": "model.dtype='int8' from --set: input should be 'fp32', 'bf16' or 'fp16'.",
    "model.context_length=16": (
        "sft.max_length=96 does not fit in model.context_length=16. Change either in params.yaml."
    ),
    "model.quantisation=nf4": (
        "model.quantisation=nf4 with ppo.lora null: the policy would learn from other "
        "weights than its reference has. Set ppo.lora, or model.quantisation: null in "
        "params.yaml."
    ),
    "data.source.kind=csv": (
        "data.source.kind='csv' from --set: input should be one of 'helpdesk', 'file', 'python', 'hub'."
    ),
    "data.source={kind: file, path: x.jsonl}": (
        "data.source.format is missing from --set; every parameter must be given, "
        "recipes/base.yaml has them all. (1 more)"
    ),
    "data.source={kind: file, path: x, format: pair, columns: {}}": (
        "data.source.format='pair' from --set: input should be 'pairs', 'votes', 'ranked',"
        " 'rated', 'ratings', 'trees', 'instructions', 'prompts', 'nectar', 'arena-table' or "
        "'oasst-messages'."
    ),
    "data.test_fraction=1.0": "data.test_fraction=1.0 from --set: input should be less than 1.",
    "data.prompt_template=hello": (
        "data.prompt_template='hello' must contain {prompt} exactly once. Change it in params.yaml."
    ),
    "evaluate.prompts=0": ("evaluate.prompts=0 from --set: input should be greater than or equal to 1."),
    "prices.usd_per_device_hour=0": (
        "prices.usd_per_device_hour=0 with no prices.usd_per_kwh: an hour of a device "
        "costs something. Set either in params.yaml."
    ),
    "prices.date=2026-02-30": ("prices.date=2026-02-30 is not a date. Set it to the day the price was read."),
    "prices.source=": ("prices.source is empty: say where the price was read. Set it in params.yaml."),
    "budget.max_usd=-1": "budget.max_usd=-1 from --set: input should be greater than 0.",
    "budget.max_usd_by_stage={tune: 1}": (
        "budget.max_usd_by_stage limits tune, which is not a stage; known: data, sft, "
        "reward, ppo, dpo, kto, grpo, rloo, distill, evaluate. Change it in params.yaml."
    ),
    "where.default.processes=0": ("where.default.processes=0 from --set: input should be greater than or equal to 1."),
    "tracking.uri=http://me:secret@host:5000": (
        "tracking.uri has a password before host, and params are kept and shown in many places. "
        "Take it out, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; for a "
        "database, start mlflow server in front of it."
    ),
    "retrain.safety_source={kind: file, path: s.jsonl, format: pairs, columns: {}}": (
        "retrain.safety_source.format=pairs: safety prompts are of format prompts. Change it in params.yaml."
    ),
    "seed=one": "seed='one' from --set: input should be a valid integer.",
    "seed": ("--set 'seed' is not of the form section.key=value, for example --set sft.epochs=2."),
    "nothing=1": (
        "nothing is not a parameter from --set; known there: align, budget, data, distill, dpo, "
        "evaluate, grpo, kto, model, ppo, prices, retrain, reward, rloo, seed, sft, tracking, "
        "where."
    ),
}
"""`--set` with the demo recipe -> the message."""


@pytest.mark.parametrize("assignment", TOLD)
def test_a_wrong_input_is_refused_in_one_line_that_helps(assignment: str) -> None:
    with pytest.raises(ParamsError) as refused:
        load(ROOT / "recipes" / "demo.yaml", [assignment])
    assert str(refused.value) == TOLD[assignment]
