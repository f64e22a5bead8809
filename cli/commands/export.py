"""`rlhf export`: a run's final model in formats that other programs load."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.project import project_root, typed_path
from cli.run_models import CHAMPION, models_of, run_id_of
from config.errors import EXIT_BAD_INPUT, ModelError, RlhfError, UserError

if TYPE_CHECKING:
    from config.schema import Params

EXPORTS = Path("exports")
HUB = "hub:"


def export(
    run: Annotated[
        str | None,
        typer.Argument(
            help="A run by its id, last, last-1, ..., or champion; the champion if there is one, else the last run."
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|hub:ORG/NAME",
            help="The folder to write, without it exports/RUN; or a private repository of the Hugging Face hub.",
        ),
    ] = None,
) -> None:
    """Write a run's final model as merged safetensors and as GGUF files (f32, q8_0, q4_0), with a model card that says
    what it scored, what it cost, and what quantising changes.
    """
    root = project_root()
    run = run or champion_or_last(root)
    hub = to.removeprefix(HUB) if to and to.startswith(HUB) else None
    target = typed_path(to) if to and hub is None else EXPORTS / run_id_of(root, run)
    if hub is not None:
        _to_hub(root, hub)  # fail on a bad name or token before the export, not after it
    write_export(root, run, target)
    _show(target)
    _tell_mlflow(root, run_id_of(root, run))
    if hub is not None:
        _to_hub(root, hub, "--folder", str(target))


def champion_or_last(root: Path) -> str:
    """The run meant when none is named."""
    from config.workspace.champions import read_record

    return CHAMPION if read_record(root).champion is not None else "last"


def exported(root: Path, run: str) -> Path:
    """The run's export in its usual folder, written first if it is missing, damaged or of an older version. Raises as
    `write_export` does.
    """
    from config.workspace.exported import read_exported

    target = root / EXPORTS / run_id_of(root, run)
    try:
        read_exported(target)
    except ModelError:
        write_export(root, run, target)
    return target


def write_export(root: Path, run: str, target: Path) -> None:
    """Write the export of a run in a separate process, which prints its own error line.

    Raises UserError for a run that is not there, RlhfError if the process fails.
    """
    run_id = run_id_of(root, run)
    with models_of(root, run, "export") as (folder, params), tempfile.TemporaryDirectory() as export:
        facts = Path(export) / "facts.json"
        facts.write_text(json.dumps(_facts(root, run_id, params)), encoding="utf-8")
        command = [sys.executable, "-m", "training.export.package", "--folder", str(folder)]
        command += ["--to", str(target), "--facts", str(facts)]
        code = subprocess.run(command, cwd=root, check=False).returncode
    if code == EXIT_BAD_INPUT:
        raise UserError(f"run {run_id} was not exported: see the line above.")
    if code:
        raise RlhfError(f"the export of run {run_id} ended with exit code {code}.")
    _keep(root, run_id, target)


def _keep(root: Path, run_id: str, target: Path) -> None:
    """Keep the effect of quantisation with the run: its report shows it, the next sync ships it."""
    from config.workspace.exported import read_exported
    from config.workspace.quantised import Quantised, keep_quantised
    from tasks.champions.registry import describe

    files, digest = read_exported(target).quantised, describe(root, run_id).model_digest
    keep_quantised(root, run_id, Quantised(model_digest=digest, files=files))


def _tell_mlflow(root: Path, run_id: str) -> None:
    from config.workspace.kept import kept_params
    from tasks.champions.registry import update_mlflow

    fault = update_mlflow(root, kept_params(root, run_id))
    if fault is not None:
        print(f"warning: {fault}", file=sys.stderr)


def _facts(root: Path, run_id: str, params: "Params") -> dict[str, Any]:
    """What the model card says about the run."""
    from reporting.inputs import read_findings
    from reporting.run_card import card_rows
    from reporting.verdict import verdict

    findings = read_findings(root, params, run_id)
    judged = verdict(findings)
    evaluation = findings.metrics["evaluate"]
    metrics = {
        name: f"{value:.3f}"
        for name in ("gold_sft", "gold_aligned", "gold_student", "quality_kept", "kl")
        if (value := findings.value("evaluate", name)) is not None
    }
    for kind in ("gold", "reward"):
        names = (f"win_rate_{kind}", f"win_rate_{kind}_low", f"win_rate_{kind}_high")
        rate, low, high = (findings.value("evaluate", name) for name in names)
        if rate is not None and low is not None and high is not None:
            confidence = f"{evaluation.get('confidence', 0.95):.0%} interval"
            metrics[f"wins over SFT, {kind}"] = f"{rate:.1%} ({low:.1%} to {high:.1%}, {confidence})"
    return {
        "name": params.tracking.registered_model,
        "summary": f"{judged.title}. {judged.sentence}",
        "run_id": run_id,
        "method": params.align.method,
        "is_student": params.final_stage == "distill",
        "base": params.model.path or "weights drawn at random",
        "card": [row for row in card_rows(root, findings) if row[0] != "method"],
        "metrics": metrics,
    }


def _to_hub(root: Path, name: str, *folder: str) -> None:
    """Create a repository or upload an export in a separate process, which prints its own error line."""
    command = [sys.executable, "-m", "training.export.hub", "--to", name, *folder]
    code = subprocess.run(command, cwd=root, check=False).returncode
    if code:
        raise typer.Exit(code)


def _show(target: Path) -> None:
    """The files, with the effect of each quantisation."""
    from config.workspace.exported import read_exported

    files = read_exported(target).quantised
    if files:
        print(f"{'in gguf/':<16} {'size':>12} {'differ':>14} {'score':>8} {'interval':>20}")
    for file in files:
        gain = file.difference
        print(
            f"model-{file.kind}.gguf".ljust(16),
            f"{file.bytes / 2**20:8.2f} MiB",
            f"{file.flips} of {file.prompts}".rjust(14),
            f"{gain.mean:+8.4f}",
            f"{gain.low:+.4f} to {gain.high:+.4f}".rjust(20),
        )
    print(f"Written to {target}; README.md there is the model card.")
