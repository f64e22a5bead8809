"""Every setting of `ppo` reaches its place: a run with all of them off their usual values equals the same run in plain
torch.

And each setting alone matters to that comparison (slow): put back to its usual value, plain torch gives something
else. What changes only memory, time or who computes is in OBSERVED, with how it is seen. A new field is in neither,
and fails here.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from config import jsonl
from config.errors import ParamsError
from config.load import load, write
from config.methods.ppo import Ppo
from config.records import UsageRow
from config.sections.levers import Lora
from config.sections.online import Kl
from tests.training.support.plain_ppo import Outcome, plain_ppo
from tests.training.support.processes import metric_rows
from tests.training.support.tiny import open_stage, params
from training.distributed import shards
from training.rl import rollout_phase
from training.rl.roles import Roles
from training.rollout.engine import Rollout

Project = Callable[..., Path]

USUAL: dict[str, Any] = {
    "layout": "separate",
    "value_init": "reward",
    "lora": None,
    "optimizer": "adamw",
    "activation_checkpointing": False,
    "updates": 4,
    "batch_size": 24,
    "responses_per_prompt": 1,
    "max_new_tokens": 12,
    "temperature": 1.0,
    "rollout_batch_size": 16,
    "rollout_engine": "static",
    "recompute_logprobs": False,
    "ppo_epochs": 1,
    "num_mini_batches": 2,
    "micro_batch_tokens": 4096,
    "learning_rate": 3.0e-4,
    "value_learning_rate": 1.0e-3,
    "schedule": "constant",
    "max_grad_norm": 1.0,
    "kl": {"controller": "fixed", "coef": 0.05, "target": 6.0, "horizon": 10000},
    "gamma": 1.0,
    "lam": 0.95,
    "policy_loss": "clipped",
    "cliprange": 0.2,
    "cliprange_high": None,
    "cliprange_value": 0.2,
    "vf_coef": 0.1,
    "whiten_rewards": False,
    "missing_eos_penalty": 1.0,
    "score_clip": None,
    "target_kl": None,
    "max_kl": None,
    "on_divergence": "stop",
    "checkpoint_every_updates": 1,
    "sample_every_updates": 2,
}
COMMON = {
    "activation_checkpointing": True,
    "updates": 6,
    "batch_size": 12,
    "responses_per_prompt": 2,
    "max_new_tokens": 14,
    "temperature": 0.8,
    "rollout_batch_size": 4,
    "recompute_logprobs": True,
    "ppo_epochs": 2,
    "num_mini_batches": 3,
    "micro_batch_tokens": 120,
    "learning_rate": 3.0e-3,
    "value_learning_rate": 3.0e-3,
    "schedule": "linear",
    "max_grad_norm": 0.3,
    "kl": {"controller": "adaptive", "coef": 0.2, "target": 0.2, "horizon": 60},
    "gamma": 0.97,
    "lam": 0.8,
    "policy_loss": "clipped",
    "cliprange": 0.07,
    "cliprange_high": 0.05,
    "cliprange_value": 0.05,
    "vf_coef": 0.6,
    "whiten_rewards": True,
    "missing_eos_penalty": 0.4,
    "score_clip": 1.5,
    "target_kl": 0.004,
    "max_kl": 0.3,
    "on_divergence": "roll_back",
    "checkpoint_every_updates": 3,
    "sample_every_updates": 3,
}
LORA = {"rank": 3, "alpha": 7.0, "modules": ["q", "down"], "dropout": 0.0}
RUNS: dict[str, dict[str, Any]] = {
    "one trunk": COMMON | {"layout": "shared_trunk", "checkpoint_every_updates": 4},
    "adapters": COMMON
    | {
        "lora": LORA,
        "value_init": "sft",
        "rollout_engine": "paged",
        "optimizer": "adamw8bit",
        "policy_loss": "gspo",
        "max_kl": None,
        "updates": 3,
    },
}
MOMENT = "/exp_avg"
OFFSET = 0.05
"""Added to the log-probs of sampling: an engine whose numbers differ."""


class Watched(NamedTuple):
    """What a run did, beside its outcome."""

    engines: set[tuple[str, int]]
    """Name and batch_size of each call."""
    tokens: list[int]
    """Of each pass with gradient."""
    layer_calls: int
    """Of the first layer with gradient."""


@pytest.fixture(scope="module")
def done(
    finished: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[Path, Outcome, Watched]]]:
    """Each of RUNS: its folder, what it left behind, how it went."""
    with pytest.MonkeyPatch.context() as patch:
        yield {name: ran(finished, tmp_path_factory.mktemp("settings") / "project", name, patch) for name in RUNS}


def ran(finished: Path, root: Path, name: str, patch: pytest.MonkeyPatch) -> tuple[Path, Outcome, Watched]:
    for part in ("data", "models/sft", "models/reward"):
        (root / part).parent.mkdir(parents=True, exist_ok=True)
        (root / part).symlink_to(finished / part)
    write(params(ppo=RUNS[name]), root / "params.yaml")
    stage, run = open_stage(root, "ppo")
    stage.checkpoints.clear = lambda: None  # type: ignore[method-assign] # the last one is read below
    watched = Watched(set(), [], 0)
    calls = []
    with patch.context() as p:
        for engine in rollout_phase.ENGINES:
            p.setitem(rollout_phase.ENGINES, engine, offset(engine, rollout_phase.ENGINES[engine], watched))
        forward = Roles.forward
        p.setattr(
            Roles,
            "forward",
            lambda self, rows, *rest: (watched.tokens.append(sum(map(len, rows))), forward(self, rows, *rest))[1],
        )
        hook = torch.nn.modules.module.register_module_forward_pre_hook(
            lambda module, _: (
                calls.append(1) if isinstance(module, LlamaDecoderLayer) and torch.is_grad_enabled() else None
            )
        )
        run(stage)
        hook.remove()
    stage.meter.close(stage.step)
    return root, left_behind(root), watched._replace(layer_calls=len(calls))


def offset(name: str, engine: Any, watched: Watched) -> Any:
    """The engine, its log-probs off by OFFSET."""

    def sample(*given: Any) -> Rollout:
        watched.engines.add((name, given[5]))
        rollout = engine(*given)
        return rollout._replace(logprobs=[row + OFFSET for row in rollout.logprobs])

    return sample


def left_behind(root: Path) -> Outcome:
    rows = [row.values for row in metric_rows(root, "ppo")]
    samples = [json.loads(line) for line in (root / "runs/ppo/samples.jsonl").read_text().splitlines()]
    newest = max((root / "checkpoints/ppo").glob("*/step-*"))
    weights, state = (stored(newest / folder) for folder in (shards.WEIGHTS, shards.OPTIMIZER))
    rest = json.loads((newest / shards.OPTIMIZER / shards.REST).read_text())
    moments = {name.removesuffix(MOMENT): value for name, value in state.items() if name.endswith(MOMENT)}
    return Outcome(
        rows=[{key: value for key, value in row.items() if key != "seconds"} for row in rows],
        samples=[{key: row[key] for key in ("step", "score", "prompt", "response")} for row in samples],
        saved=[
            row.step
            for row in jsonl.read(root / "runs/ppo/usage.jsonl", UsageRow).rows
            if row.phase == "save" and row.tokens == 0
        ],
        weights=weights,
        moments=moments,
        rates=[group["lr"] for group in rest["groups"]],
    )


def stored(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint's folder, which one process has written."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def plain(root: Path, name: str, **changes: Any) -> Outcome:
    settings = params(ppo=RUNS[name] | changes).ppo
    return plain_ppo(root, load(root / "params.yaml"), settings)


def differences(found: Outcome, expected: Outcome) -> list[str]:
    """Where two runs differ by more than rounding."""
    gap = {"rollout_logprob_gap", "rollout_logprob_gap_max"}
    rows = [{key: value for key, value in row.items() if key not in gap} for row in found.rows]
    result = [] if [row.keys() for row in rows] == [row.keys() for row in expected.rows] else ["the rows' names"]
    for update, (row, other) in enumerate(zip(rows, expected.rows, strict=False), 1):
        result += [
            f"{key} in row {update}: {row[key]} {other[key]}"
            for key in row
            if key in other and row[key] != pytest.approx(other[key], rel=2e-3, abs=2e-4)
        ]
    result += [] if found.saved == expected.saved else [f"saved after {found.saved}, {expected.saved}"]
    result += (
        [] if found.rates == pytest.approx(expected.rates) else [f"learning rates {found.rates}, {expected.rates}"]
    )
    texts = [[{**row, "score": 0.0} for row in outcome.samples] for outcome in (found, expected)]
    scores = [[row["score"] for row in outcome.samples] for outcome in (found, expected)]
    result += [] if texts[0] == texts[1] and scores[0] == pytest.approx(scores[1], abs=2e-4) else ["samples"]
    for kind, mine, theirs in (
        ("weight", found.weights, expected.weights),
        ("gradient", found.moments, expected.moments),
    ):
        result += [f"{kind}s of {name}" for name in sorted(mine.keys() ^ theirs.keys())]
        result += [f"{kind} {name}" for name in mine.keys() & theirs.keys() if not close(mine[name], theirs[name])]
    return result


def close(x: Tensor, y: Tensor) -> bool:
    """Up to a hundredth of what is typical of the tensor, but for the few weights whose gradient is noise."""
    return x.shape == y.shape and float((x - y).abs().mean()) <= 2e-3 * float(y.abs().mean()) + 1e-7


@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_every_setting_off_its_usual_value_is_that_of_plain_torch(done: dict, name: str) -> None:
    root, result, _ = done[name]
    assert differences(result, plain(root, name)) == []
    assert [row["first_ratio_error"] for row in result.rows] == pytest.approx([0.0] * len(result.rows), abs=1e-4)
    for row in result.rows:  # the engine's numbers are not those that are learnt from
        assert (row["rollout_logprob_gap"], row["rollout_logprob_gap_max"]) == pytest.approx(
            (OFFSET, OFFSET), abs=1e-3
        )


def engine_is_asked_for_batches_of_this_size(watched: Watched, settings: Ppo) -> None:
    assert watched.engines == {(settings.rollout_engine, settings.rollout_batch_size)}


def passes_hold_at_most_these_tokens(watched: Watched, settings: Ppo) -> None:
    assert 0.5 * settings.micro_batch_tokens < max(watched.tokens) <= settings.micro_batch_tokens


def layers_run_twice(watched: Watched, settings: Ppo) -> None:
    models = 1 if settings.layout == "shared_trunk" else 2
    # layers, again in the backward pass
    assert watched.layer_calls == 2 * 2 * models * len(watched.tokens)


def dropout_is_refused(watched: Watched, settings: Ppo) -> None:
    with pytest.raises(ParamsError, match=r"ppo\.lora\.dropout=0\.1"):
        params(ppo={"lora": LORA | {"dropout": 0.1}})


def other_numbers_are_not_learnt_from(watched: Watched, settings: Ppo) -> None:
    """With OFFSET in the engine's log-probs the run is that of plain torch, which knows of no engine: seen above."""
    assert settings.recompute_logprobs


OBSERVED: dict[str, Callable[[Watched, Ppo], None]] = {
    "rollout_engine": engine_is_asked_for_batches_of_this_size,
    "rollout_batch_size": engine_is_asked_for_batches_of_this_size,
    "micro_batch_tokens": passes_hold_at_most_these_tokens,
    "activation_checkpointing": layers_run_twice,
    "recompute_logprobs": other_numbers_are_not_learnt_from,
    "lora.dropout": dropout_is_refused,
}


def leaves() -> list[str]:
    """Every setting that there is."""
    nested = {"kl": Kl, "lora": Lora}
    names = [name for name in Ppo.model_fields if name != "kl"]
    return names + [f"{name}.{leaf}" for name, section in nested.items() for leaf in section.model_fields]


PUT_BACK = {"lora.rank": 8, "lora.alpha": 16.0, "lora.modules": ["q", "v"], "checkpoint_every_updates": 1}
"""Usual values that USUAL has not, below its null."""
HOME = dict.fromkeys(("value_init", "lora", "optimizer", "rollout_engine", "policy_loss"), "adapters")


@pytest.fixture(scope="module")
def unchanged(done: dict) -> dict[str, Outcome]:
    return {name: plain(done[name][0], name) for name in RUNS}


def changed_back(leaf: str) -> tuple[str, dict[str, Any]]:
    """Which of RUNS has the setting off its usual value, and what puts it back there."""
    section, _, key = leaf.partition(".")
    name = HOME.get(section, "one trunk")
    if not key:
        return name, {section: USUAL[section]}
    usual = PUT_BACK[leaf] if section == "lora" else USUAL[section][key]
    return name, {section: RUNS[name][section] | {key: usual}}


@pytest.mark.parametrize("leaf", leaves())
def test_every_setting_is_off_its_usual_value_or_seen_at_work(done: dict, leaf: str) -> None:
    section = leaf.partition(".")[0]
    root, _, watched = done[HOME.get(section, "one trunk")]
    settings = load(root / "params.yaml").ppo
    if leaf in OBSERVED:
        OBSERVED[leaf](watched, settings)
        return
    usual = changed_back(leaf)[1][section]
    result = getattr(settings, section)
    assert (result.model_dump() if hasattr(result, "model_dump") else result) != usual


@pytest.mark.slow
@pytest.mark.parametrize("leaf", [leaf for leaf in leaves() if leaf not in OBSERVED])
def test_every_setting_matters_to_the_comparison(done: dict, unchanged: dict[str, Outcome], leaf: str) -> None:
    name, changes = changed_back(leaf)
    assert differences(plain(done[name][0], name, **changes), unchanged[name]) != []
