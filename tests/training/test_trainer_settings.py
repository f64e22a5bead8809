"""Every setting of `sft`, `reward` and `dpo` reaches its place, as tests/training/test_ppo_settings.py says of
`ppo`.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from config import jsonl
from config.load import load, write
from config.methods.dpo import Dpo
from config.records import UsageRow
from config.sections.levers import Lora
from config.sections.offline import Optimisation, Reward, Sft
from tests.training.support.plain_trainers import Outcome, plain_dpo, plain_reward, plain_sft
from tests.training.support.processes import metric_rows, metrics
from tests.training.support.tiny import open_stage, params
from training.modeling import scoring, sequences
from training.modeling.packing import pack_pairs

SECTIONS: dict[str, type[Optimisation]] = {"sft": Sft, "reward": Reward, "dpo": Dpo}
PLAIN: dict[str, Callable[..., Outcome]] = {"sft": plain_sft, "reward": plain_reward, "dpo": plain_dpo}
OWN_USUAL: dict[str, dict[str, Any]] = {
    "sft": {"max_length": 96},
    "reward": {"max_length": 96, "init": "sft", "layers": None, "normalise": True},
    "dpo": {"max_length": 96, "beta": 0.1, "loss": "sigmoid", "label_smoothing": 0.0},
}
OWN: dict[str, dict[str, Any]] = {
    "sft": {"max_length": 36},
    "reward": {"max_length": 60, "init": "base", "layers": 1, "normalise": False},
    "dpo": {"max_length": 60, "beta": 0.6, "loss": "robust", "label_smoothing": 0.15},
}
USUAL: dict[str, Any] = {
    "lora": None,
    "optimizer": "adamw",
    "epochs": 3.0,
    "max_steps": None,
    "batch_size": 8,
    "micro_batch_size": 8,
    "learning_rate": 1.0e-3,
    "warmup_fraction": 0.1,
    "schedule": "cosine",
    "weight_decay": 0.0,
    "adam_beta2": 0.98,
    "max_grad_norm": 100.0,
    "activation_checkpointing": False,
    "checkpoint_every_steps": 100,
    "log_every_steps": 1,
}
COMMON: dict[str, Any] = {
    "epochs": 2.0,
    "max_steps": 8,
    "batch_size": 12,
    "micro_batch_size": 4,
    "learning_rate": 3.0e-3,
    "warmup_fraction": 0.35,
    "schedule": "linear",
    "weight_decay": 3.0,
    "adam_beta2": 0.9,
    "max_grad_norm": 0.4,
    "activation_checkpointing": True,
    "checkpoint_every_steps": 3,
    "log_every_steps": 2,
}
LORA = {"rank": 3, "alpha": 7.0, "modules": ["q", "down"], "dropout": 0.0}
RUNS: dict[tuple[str, str], dict[str, Any]] = {
    (stage, kind): {**COMMON, **OWN[stage], **changes}
    for stage in SECTIONS
    for kind, changes in {
        "whole": {},
        "adapters": {
            "lora": LORA,
            "optimizer": "adamw8bit",
            "epochs": 0.8,
            "max_steps": 100,
            **({"init": "sft", "layers": None} if stage == "reward" else {}),
        },
    }.items()
}
HOME = {"lora": "adapters", "optimizer": "adapters", "epochs": "adapters"}
PUT_BACK = {"lora.rank": 8, "lora.alpha": 16.0, "lora.modules": ["q", "v"]}


class Watched(NamedTuple):
    rows_at_once: set[int]
    """Sequences in the passes with gradient."""
    layer_calls: int
    """Of all layers with gradient."""
    dropout: set[float]
    """Rates of the dropout that was running."""
    optimizers: set[str]


class Done(NamedTuple):
    root: Path
    found: Outcome
    watched: Watched
    expected: Outcome


@pytest.fixture(scope="module")
def done(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Done]:
    """A run of RUNS and the same in plain torch, made when first asked for."""
    outcomes: dict[tuple[str, str], Done] = {}

    def get(stage: str, kind: str) -> Done:
        if (stage, kind) not in outcomes:
            root = tmp_path_factory.mktemp(f"{stage}-{kind}") / "project"
            result, watched = ran(finished, root, stage, kind, RUNS[stage, kind])
            outcomes[stage, kind] = Done(root, result, watched, plain(root, stage, kind))
        return outcomes[stage, kind]

    return get


def ran(finished: Path, root: Path, stage_name: str, kind: str, section: dict[str, Any]) -> tuple[Outcome, Watched]:
    for part in ("data", "models/sft", "metrics"):
        shutil.copytree(finished / part, root / part)
    base: dict[str, Any] = {}
    if (stage_name, kind) == ("sft", "adapters"):  # adapters need a base that has learnt something
        shutil.copytree(finished / "models/sft", root / "base")
        base = {"model": {"random": None, "path": str(root / "base")}}
    write(params(**{stage_name: section}, **base), root / "params.yaml")
    stage, run = open_stage(root, stage_name)
    rows_at_once, calls, dropout, optimizers = set(), [], set(), set()

    def watch(module: torch.nn.Module, given: Any, options: Any) -> None:
        if isinstance(module, LlamaDecoderLayer) and torch.is_grad_enabled():
            calls.append(1)
            hidden = given[0] if given else options["hidden_states"]
            if stage_name == "sft":
                rows_at_once.add(len(hidden))
        learns = torch.is_grad_enabled()
        if isinstance(module, torch.nn.Dropout) and module.training and module.p and learns:
            dropout.add(module.p)

    def packed(pairs: list[tuple[list[int], list[int]]]) -> Any:
        if torch.is_grad_enabled():
            rows_at_once.add(2 * len(pairs))
        return pack_pairs(pairs)

    hooks = [
        torch.nn.modules.module.register_module_forward_pre_hook(lambda module, given: watch(module, given, {})),
        register_optimizer_step_pre_hook(
            lambda optimizer, *_: optimizers.add(type(optimizer).__module__.split(".")[0])
        ),
    ]
    try:
        with (  # one row, whatever it holds
            mock.patch.object(scoring, "pack_pairs", packed),
            mock.patch.object(sequences, "pack_pairs", packed),
        ):
            run(stage)
    finally:
        for hook in hooks:
            hook.remove()
    stage.meter.close(stage.step)
    return left_behind(root, stage_name), Watched(rows_at_once, len(calls), dropout, optimizers)


def left_behind(root: Path, stage: str) -> Outcome:
    folder = root / "models" / stage
    adapter = folder / "adapter_model.safetensors"
    stored = load_file(adapter if adapter.exists() else folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    saved = [
        row.step for row in jsonl.read(root / "runs" / stage / "usage.jsonl", UsageRow).rows if row.phase == "save"
    ]
    return Outcome(
        rows={
            row.step: {key: row.values[key] for key in ("loss", "grad_norm", "learning_rate")}
            for row in metric_rows(root, stage)
            if "loss" in row.values
        },
        saved=saved[:-1],  # the last is that of the model
        weights={name.removeprefix("base_model.model."): weight for name, weight in stored.items()},
        steps=int(metrics(root, stage)["steps"]),
        normalisation=(config.get("score_mean", 0.0), config.get("score_std", 1.0)),
    )


def plain(root: Path, stage: str, kind: str, **changes: Any) -> Outcome:
    settings = SECTIONS[stage].model_validate(getattr(params(), stage).model_dump() | RUNS[stage, kind] | changes)
    return PLAIN[stage](root, load(root / "params.yaml"), settings)


def differences(found: Outcome, expected: Outcome) -> list[str]:
    """Where two runs differ by more than rounding."""
    result = [name for name in ("steps", "saved") if getattr(found, name) != getattr(expected, name)]
    if found.rows.keys() != expected.rows.keys():
        result.append("steps of the rows")
    for step in found.rows.keys() & expected.rows.keys():
        result += [f"row {step}"] if found.rows[step] != pytest.approx(expected.rows[step], rel=1e-3, abs=1e-5) else []
    result += [] if found.normalisation == pytest.approx(expected.normalisation, abs=1e-3) else ["normalisation"]
    result += [f"weight {name}" for name in found.weights.keys() ^ expected.weights.keys()]
    for name in found.weights.keys() & expected.weights.keys():
        mine, theirs = found.weights[name], expected.weights[name]
        if mine.shape != theirs.shape or float((mine - theirs).abs().mean()) > 1e-3 * float(theirs.abs().mean()):
            result.append(f"weight {name}")
    return result


@pytest.mark.parametrize(("stage", "kind"), RUNS)
def test_a_run_with_every_setting_off_its_usual_value_is_that_of_plain_torch(
    done: Callable[[str, str], Done], stage: str, kind: str
) -> None:
    run = done(stage, kind)
    assert differences(run.found, run.expected) == []


def passes_hold_at_most_these_rows(run: Done, stage: str) -> None:
    assert max(run.watched.rows_at_once) == COMMON["micro_batch_size"] * (1 if stage == "sft" else 2)


def layers_run_twice(run: Done, stage: str) -> None:
    passes = sum(-(-rows // COMMON["micro_batch_size"]) for rows in rows_of_steps(run, stage))
    layers = OWN[stage].get("layers", 2)
    assert run.watched.layer_calls == 2 * layers * passes  # again in the backward pass


def rows_of_steps(run: Done, stage: str) -> list[int]:
    train = "sft" if stage == "sft" else "preference"
    rows = int(metrics(run.root, stage).get("train_pairs", 0)) or len(
        (run.root / f"data/prepared/{train}/train.jsonl").read_text().splitlines()
    )
    rows -= int(metrics(run.root, stage).get("demonstrations_dropped", 0))
    batch = COMMON["batch_size"]
    epoch = [batch] * (rows // batch) + ([rows % batch] if rows % batch else [])
    return (epoch * 3)[: run.found.steps]


def eight_bits_of_state(run: Done, stage: str) -> None:
    assert run.watched.optimizers == {"bitsandbytes"}


def nothing_chooses_among_checkpoints(run: Done, stage: str) -> None:
    assert "kept_step" not in metrics(run.root, stage)  # with validation rows: hf/test_validation.py


def a_model_is_trained(run: Done, stage: str) -> None:
    assert (run.root / "models" / stage / "config.json").exists()


OBSERVED: dict[str, Callable[[Done, str], None]] = {
    "keep": nothing_chooses_among_checkpoints,
    "kind": a_model_is_trained,
    "micro_batch_size": passes_hold_at_most_these_rows,
    "activation_checkpointing": layers_run_twice,
    "optimizer": eight_bits_of_state,
}


def leaves() -> list[tuple[str, str]]:
    """Every setting that there is."""
    settings = [(stage, name) for stage, section in SECTIONS.items() for name in section.model_fields]
    return settings + [
        (stage, f"lora.{name}") for stage in SECTIONS for name in Lora.model_fields if name != "dropout"
    ]


def changed_back(stage: str, leaf: str) -> tuple[str, dict[str, Any]]:
    """Which run of the stage has the setting off its usual value, and what puts it back there."""
    section, _, key = leaf.partition(".")
    kind = HOME.get(section, "whole")
    usual = {**USUAL, **OWN_USUAL[stage]}
    if key:
        return kind, {section: LORA | {key: PUT_BACK[leaf]}}
    changes = {section: usual[section]}
    if leaf == "loss":
        changes["label_smoothing"] = 0.0  # which the usual loss has not
    if leaf == "batch_size":
        changes["micro_batch_size"] = usual["micro_batch_size"]
    return kind, changes


@pytest.mark.parametrize(("stage", "leaf"), leaves())
def test_every_setting_is_off_its_usual_value_or_seen_at_work(
    done: Callable[[str, str], Done], stage: str, leaf: str
) -> None:
    section = leaf.partition(".")[0]
    run = done(stage, HOME.get(section, "whole"))
    if leaf in OBSERVED:
        OBSERVED[leaf](run, stage)
        return
    usual = changed_back(stage, leaf)[1][section]
    result = getattr(getattr(load(run.root / "params.yaml"), stage), section)
    assert (result.model_dump() if hasattr(result, "model_dump") else result) != usual


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "leaf"), [(stage, leaf) for stage, leaf in leaves() if leaf not in OBSERVED])
def test_every_setting_matters_to_the_comparison(done: Callable[[str, str], Done], stage: str, leaf: str) -> None:
    kind, changes = changed_back(stage, leaf)
    run = done(stage, kind)
    assert differences(plain(run.root, stage, kind, **changes), run.expected) != []


@pytest.mark.parametrize("stage", SECTIONS)
def test_the_dropout_of_adapters_is_at_work(finished: Path, tmp_path: Path, stage: str) -> None:
    section = RUNS[stage, "adapters"] | {"lora": LORA | {"dropout": 0.25}, "max_steps": 1}
    _, watched = ran(finished, tmp_path / "project", stage, "adapters", section)
    assert watched.dropout == {0.25}
