"""`rlhf init`: a recipe for your data, model and hardware, planned before anything is trained."""

import json
import math
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.commands.data import ReaderOption, UnknownLayout, VoteOption, inspected
from cli.project import project_root, typed_path
from config.errors import CostError, DataError, EnvironmentFault, ParamsError
from config.methods.registry import METHODS, OFFLINE_METHODS
from config.terminal_text import shown

if TYPE_CHECKING:
    from config.schema import Params

BASE, SCRATCH = "base", "votes-cpu"
"""The recipe that others extend, and one that trains a small model from scratch on a CPU."""
LONGEST, SHORTEST, STEP = 2048, 128, 32
"""Limits and step of the context fitted to the data, in tokens."""
QUARANTINE_MARGIN = 0.01
"""Added to the share refused today: new rows come from the same source."""
ADAPTER_RATE = 10.0
"""Learning rate of adapters relative to that of full fine-tuning, as in recipes/base.yaml."""
LEARNING = ("sft", "reward", *METHODS)
SCRATCH_SECTIONS = ("model", *LEARNING, "evaluate")


def init(
    name: Annotated[str, typer.Argument(help="The recipe becomes recipes/NAME.yaml.")],
    file: Annotated[
        Path | None, typer.Option("--data", parser=typed_path, metavar="FILE", help="Preferences to learn.")
    ] = None,
    study: Annotated[
        Path | None,
        typer.Option(
            "--study",
            parser=typed_path,
            metavar="RECIPE",
            help="Write studies/NAME.yaml instead: variants of this recipe.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Base model, a folder or a hub id. Without it: that of recipes/base.yaml on a "
            "GPU, a small random one on a CPU."
        ),
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="Device such as rtx4090; without it the GPU of this machine, or none.")
    ] = None,
    usd_per_hour: Annotated[
        float | None, typer.Option(help="Price of an hour of it; without it, the catalogue's.")
    ] = None,
    elsewhere: Annotated[
        bool, typer.Option("--elsewhere", help="The run happens on another machine: any hardware.")
    ] = False,
    method: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(METHODS)}. Without it: ppo, or kto for ratings.")
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:FUNCTION", help="Scores replies in place of a reward model; ratings need it."),
    ] = None,
    form: Annotated[str | None, typer.Option("--format", help="Of the data; else its columns say.")] = None,
    column: Annotated[
        list[str] | None, typer.Option("--column", metavar="OURS=THEIRS", help="As of rlhf data check; repeatable.")
    ] = None,
    vote: VoteOption = None,
    reader: ReaderOption = None,
) -> None:
    """Write a recipe for your data, model and hardware that fits, and show its plan; or with --study a study of a
    recipe. It asks nothing and replaces no file. For a file in no known layout it writes a reader to fill in.
    """
    from cli.commands.plan import show
    from config.atomic_file import write_atomically
    from costs.planning.planner import plan
    from costs.planning.target import find_target

    root = project_root()
    if study is not None:
        typer.echo(new_study(root, name, study))
        return
    if file is None:
        raise ParamsError("name the preferences to learn: --data FILE (or a recipe: --study).")
    path = new_file(root, "recipes", name)
    try:
        inspection = inspected(root, str(file), form, column or [], vote=vote, reader=reader)
    except UnknownLayout as error:
        raise DataError(_with_reader(root, name, file, error)) from None
    here = gpu_here()
    if hardware is not None and not elsewhere:
        require_here(hardware, here)
    device = hardware or here
    method = method or ("ppo" if inspection["pairs"] else "kto")
    chosen = wanted(root, name, inspection, model, device, usd_per_hour, method, reward)
    params, note = fitting(fit_context_length(root, chosen, str(file), inspection))
    model_note = _model_note(params, model, device)
    remark = f"{file.name}: {inspection['format']}, {inspection['rows']:,} rows. {note}"
    write_atomically(path, recipe(root, params, f"{remark}\n# {model_note}"))
    target = find_target(params, None, 1, None, root)
    show(plan(params, target, params.stages), as_json=False, html=None, title=path.name)
    typer.echo(f"{path.relative_to(root)}: {note} {model_note}")
    typer.echo(f"Train it: rlhf run --recipe {path.relative_to(root)}")


def new_study(root: Path, name: str, recipe: Path) -> str:
    """Write a study of the learning rate of a recipe's method; returns what to do with it."""
    from config.atomic_file import write_atomically
    from config.load import load

    path = new_file(root, "studies", name)
    params = load(root / recipe)
    method = params.align.method
    rate, shown = params.section(method).learning_rate, path.relative_to(root)
    path.parent.mkdir(exist_ok=True)
    text = STUDY.format(path=shown, recipe=recipe, method=method, half=rate / 2, twice=rate * 2)
    write_atomically(path, text)
    return f"{shown}: edit its variants, then rlhf study {shown}"


STUDY = """# rlhf study {path} runs these variants and compares each with the first.
recipe: {recipe}
seeds: [1]                # with three or more, intervals are over seeds
# max_usd: 1.0            # most that all runs may cost together
variants:                 # name -> what it changes, as --set has it
  as it is: []
  half the learning rate: [{method}.learning_rate={half:g}]
  twice the learning rate: [{method}.learning_rate={twice:g}]
"""


def _with_reader(root: Path, name: str, file: Path, error: UnknownLayout) -> str:
    """Write a reader to fill in, unless there is one; returns what to do with it."""
    from config.atomic_file import write_atomically

    path = Path("readers") / f"{name}.py"
    how = f"rlhf init {name} --data {file} --reader {path}:read"
    if (root / path).exists():
        return f"{error} {path} exists and is not replaced: {how}"
    row = json.dumps(error.first, ensure_ascii=False, indent=1)
    (root / path).parent.mkdir(exist_ok=True)
    first = "\n".join(f"#   {line[:100]}" for line in row.splitlines()[:READER_LINES])
    write_atomically(root / path, READER.format(file=file.name, first=first))
    return f"{file} is in no known layout. {path} has its first row: fill it in, then {how}"


READER_LINES = 60
READER = '''"""Reads {file}: each row that `read` yields is checked like any other.

prompt, chosen, rejected               a pair
prompt, replies, ranks                 several replies, rank 0 the best
prompt, response1, response2, votes    votes: 1, 2, or 0 for a tie
prompt, completion                     a demonstration
prompt, completion, label              a reply that is good (true) or bad (false)
prompt                                 a prompt alone

Prompts are texts, or lists of messages with role and content.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from training.preparation.sources import rows_in

# The first row:
{first}


def read(path: Path) -> Iterator[dict[str, Any]]:
    for row in rows_in(path):
        yield {{
            "prompt": row["..."],
            "chosen": row["..."],
            "rejected": row["..."],
        }}
'''


def _model_note(params: "Params", model: str | None, device: str | None) -> str:
    """Which model is trained, and why."""
    length = f"It reads {params.model.context_length} tokens."
    if model is not None:
        return f"Model: {model}. {length}"
    if params.model.path is not None:
        return f"Model: {params.model.path}, for {device}; --model names another. {length}"
    return (
        "Model: a small one with random weights, as this machine has no GPU; --model names a "
        f"pretrained one (rlhf fetch smollm2). {length}"
    )


def require_here(hardware: str, here: str | None) -> None:
    """Raise EnvironmentFault unless this machine has the named device."""
    from costs.tables.catalogue import hardware as hardware_named

    named = hardware_named(hardware)
    if named.is_cpu or (here is not None and hardware_named(here).name == named.name):
        return
    raise EnvironmentFault(
        f"--hardware {hardware}: this machine has {here or 'no GPU'}. Add --elsewhere if the run "
        "happens on another machine, or leave --hardware out."
    )


def fit_context_length(root: Path, params: "Params", file: str, inspection: Mapping[str, Any]) -> "Params":
    """The params with a context in which 95% of the data's sequences fit, as far as the model and LONGEST allow, and a
    quarantine limit above the share that is too long. Unchanged if the tokenizer is not available.
    """
    source = inspection["source"]
    form, reader = (None, source["path"]) if source["kind"] == "python" else (inspection["format"], None)
    columns = [f"{ours}={theirs}" for ours, theirs in inspection["columns"].items()]

    def fit_of(params: "Params") -> Mapping[str, Any] | None:
        from config.load import write

        temporary = root / ".rlhf" / f"init-{os.getpid()}.yaml"
        temporary.parent.mkdir(exist_ok=True)
        try:
            write(params, temporary)
            recipe = temporary.relative_to(root)
            refitted = inspected(root, file, form, columns, recipe, source.get("vote"), reader)
        finally:
            temporary.unlink(missing_ok=True)
        return dict(refitted["fit"]) if refitted["fit"] else None

    fit = fit_of(params)
    if fit is None:
        return params
    most = min(LONGEST, _longest(root / params.model.path) if params.model.path else LONGEST)
    needed = STEP * math.ceil(fit["sequence_tokens"]["p95"] / STEP)
    params = with_context(params, max(SHORTEST, min(most, needed)))
    fit = fit_of(params)
    if fit is None or fit["enough"] is None:
        return params
    limit = min(1.0, round(fit["enough"] + QUARANTINE_MARGIN, 2))
    return params.model_copy(update={"data": params.data.model_copy(update={"max_quarantine_fraction": limit})})


def with_context(params: "Params", length: int) -> "Params":
    """Params for sequences of up to this many tokens; replies take at most half of them."""
    from config.load import validate

    content = params.model_dump(mode="json")
    content["model"]["context_length"] = length
    for settings in (content[section] for section in (*LEARNING, "evaluate")):
        if settings is not None and "max_length" in settings:
            settings["max_length"] = length
        if settings is not None and "max_new_tokens" in settings:
            settings["max_new_tokens"] = min(settings["max_new_tokens"], length // 2)
    return validate(content, "rlhf init")


def new_file(root: Path, folder: str, name: str) -> Path:
    """Path of the new recipe or study. Raises ParamsError for an invalid or existing name."""
    path = root / folder / f"{name}.yaml"
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise ParamsError(f"{shown(name)} cannot name a file: letters, digits, _ - and . can. Take another name.")
    if path.exists():
        raise ParamsError(f"{folder}/{name}.yaml already exists and is not replaced. Take another name, or remove it.")
    return path


def gpu_here() -> str | None:
    """The first GPU of this machine by its driver's name, None if there is none."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next(iter(done.stdout.splitlines()), None) if done.returncode == 0 else None


def wanted(
    root: Path,
    name: str,
    inspection: Mapping[str, Any],
    model: str | None,
    device: str | None,
    usd_per_hour: float | None,
    method: str,
    reward: str | None = None,
) -> "Params":
    """Params for the inspected data, with full fine-tuning. Raises DataError for data without preferences or ratings,
    ParamsError, or CostError for an unknown device.
    """
    from config.compose import compose
    from config.load import read, validate
    from config.workspace.machine import bf16_instructions

    rated = inspection["good"] + inspection["bad"] > 0
    if rated and reward is None:
        raise DataError(
            f"{inspection['file']} has ratings and no preferences, so no reward model can judge the replies. Add "
            "--reward FILE.py:FUNCTION, which scores a reply: docs/data.md."
        )
    if not inspection["pairs"] and not rated:
        raise DataError(
            f"{inspection['file']} has no preferences ({inspection['format']}), and a reward model "
            "needs them. Name a file of pairs, votes, trees or ratings: rlhf data check FILE. Demonstrations "
            "alone can be data.sft_source."
        )
    content = read(root / "recipes" / f"{BASE}.yaml")
    if model is None and device is None:
        scratch = read(root / "recipes" / f"{SCRATCH}.yaml")
        content |= {section: scratch[section] for section in SCRATCH_SECTIONS}
    overlay: dict[str, Any] = {
        "data": {"source": inspection["source"], "vote_source": None},
        "align": {"method": method},
        "prices": _prices(content["prices"], device, usd_per_hour),
        "tracking": {"registered_model": name},
    }
    if model is not None:
        length = min(content["model"]["context_length"], _longest(root / model))
        dtype = "bf16" if device or bf16_instructions() else "fp32"
        overlay["model"] = {"path": model, "pad_token": _pad_token(root / model, model)}
        overlay["model"] |= {"context_length": length, "dtype": dtype}
        if template := chat_turn(root / model):
            overlay["data"] |= {"prompt_template": template}
    composed = compose(content, overlay)
    for stage in ("sft", "reward", *OFFLINE_METHODS):
        composed[stage]["max_length"] = composed["model"]["context_length"]
    if reward is not None:
        composed["reward"] = {"kind": "function", "path": reward, "timeout_seconds": 10.0}
    return validate(composed, f"recipes/{name}.yaml")


def _prices(prices: Mapping[str, Any], device: str | None, usd: float | None) -> dict[str, Any]:
    from datetime import UTC, datetime

    from costs.tables.catalogue import hardware as hardware_named
    from costs.tables.catalogue import price

    row = hardware_named(device) if device is not None else None
    overlay: dict[str, Any] = {} if row is None else {"device": row.name}
    if usd is not None:
        today = datetime.now(UTC).date().isoformat()
        return overlay | {"usd_per_device_hour": usd, "source": "as stated", "date": today}
    if row is None:
        return {}
    rate = price(row.name)
    return overlay | {"usd_per_device_hour": rate.expected, "source": rate.source, "date": str(rate.date)}


def _longest(folder: Path) -> int:
    """The most tokens that a model folder's config allows (`n_positions` in GPT-2's); no limit if the folder is
    missing.
    """
    config = folder / "config.json"
    content = json.loads(config.read_text("utf-8")) if config.is_file() else {}
    names = ("max_position_embeddings", "n_positions")
    return next((int(content[name]) for name in names if content.get(name)), 1_000_000)


def _pad_token(folder: Path, model: str) -> str | None:
    """The pad token of the tokenizer in a folder, that of the base recipe's family, or None: the data stage then
    reports what is missing.
    """
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return "<|fim_pad|>" if model.startswith("Qwen/") else None
    content = json.loads(config.read_text("utf-8"))
    names = [content.get(key) for key in ("pad_token", "eos_token")]
    pad, eos = (name.get("content") if isinstance(name, dict) else name for name in names)
    return None if pad == eos else pad


def chat_turn(folder: Path) -> str | None:
    """How the chat template of the model in a folder puts a user's first turn, with {prompt} in its place: plain
    prompts are then what the model knows. None without such a template.

    A beginning-of-sequence token in front is left to the tokenizer, which adds it to any text.
    """
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    config, file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    content = json.loads(config.read_text("utf-8")) if config.is_file() else {}
    source = file.read_text("utf-8") if file.is_file() else content.get("chat_template")
    if not isinstance(source, str):
        return None
    tokens = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in content.items()
        if key.endswith("_token")
    }
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    turn = [{"role": "user", "content": "{prompt}"}]
    try:
        text = environment.from_string(source).render(messages=turn, add_generation_prompt=True, **tokens)
    except (TemplateError, TypeError):
        return None
    start = tokens.get("bos_token") or ""
    if start and text.startswith(start) and text.count(start) == 1:
        text = text.removeprefix(start)
    return text if text.count("{prompt}") == 1 else None


def fitting(params: "Params") -> tuple["Params", str]:
    """The params unchanged if every stage fits; else with the cheapest levers that keep full fine-tuning; else with
    adapters. With a description of the choice. Raises CostError if nothing fits.
    """
    from costs.planning.planner import plan
    from costs.planning.search import cheapest
    from costs.planning.target import find_target

    target, stages = find_target(params, None, 1, None, Path()), params.stages
    if all(stage.fits for stage in plan(params, target, stages).stages):
        return params, "All weights learn."
    for adapters, note in ((False, "All weights learn"), (True, "Adapters learn")):
        try:
            best = cheapest(params, target, stages, "usd", adapters=adapters)
        except CostError as error:
            refusal = error
            continue
        return _with_adapter_rates(params, best.params), f"{note}, in steps that fit the device."
    raise CostError(
        f"this model fits {target.hardware.name} neither with all weights nor with adapters: take a "
        "smaller --model or a larger --hardware."
    ) from refusal


def _with_adapter_rates(before: "Params", after: "Params") -> "Params":
    """A new adapter gets the learning rate of adapters."""
    changes = {}
    for stage in LEARNING:
        old, new = getattr(before, stage), getattr(after, stage)
        if new is not None and old.lora is None and new.lora is not None:
            rate = ADAPTER_RATE * new.learning_rate
            changes[stage] = new.model_copy(update={"learning_rate": rate})
    return after.model_copy(update=changes)


def recipe(root: Path, params: "Params", remark: str) -> str:
    """The recipe's text: its differences from recipes/base.yaml."""
    from config.load import read, to_yaml

    base = read(root / "recipes" / f"{BASE}.yaml")
    differs = overlay_of(base, params.model_dump(mode="json"))
    return f"# {remark}\n{to_yaml({'extends': BASE, **differs})}"


def overlay_of(base: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The overlay that turns `base` into `wanted`: mappings key by key; lists, null and a source of another kind are
    replaced.
    """
    overlay: dict[str, Any] = {}
    for key, value in wanted.items():
        before = base.get(key)
        if key in base and before == value:
            continue
        if isinstance(value, Mapping) and isinstance(before, Mapping) and _goes_over(before, value):
            overlay[key] = overlay_of(before, value)
        else:
            overlay[key] = value
    return overlay


def _goes_over(before: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    """Whether an overlay can turn `before` into `value`: it cannot remove keys."""
    return before.keys() <= value.keys() and before.get("kind") == value.get("kind")
