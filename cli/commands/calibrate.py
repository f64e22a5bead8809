"""`rlhf calibrate`: measure this machine in a separate process and print the rates."""

import json
import subprocess
import sys
from pathlib import Path

import typer

from cli.project import project_root
from config.errors import EnvironmentFault
from config.workspace.machine import MACHINE_FILE, SERVING_FILE


def calibrate(as_json: bool) -> None:
    """Write .rlhf/hardware.yaml and .rlhf/serving.yaml, which `rlhf plan` then uses.

    Raises EnvironmentFault if the measurement fails; earlier files are kept.
    """
    root = project_root()
    command = [sys.executable, "-m", "training.calibrate.machine", "--out", str(MACHINE_FILE)]
    code = subprocess.run(command, cwd=root, stdout=sys.stderr, check=False).returncode
    if code < 0 or code == 130:
        raise EnvironmentFault(
            f"the measurement was stopped; {MACHINE_FILE} is unchanged. Run rlhf calibrate again."
        )
    if code:
        raise EnvironmentFault(
            f"the measurement failed with exit code {code}, the line above says why; "
            f"{MACHINE_FILE} is unchanged. Try rlhf doctor."
        )
    from tasks.serving.calibrate import calibrate_serving

    calibrate_serving(root, lambda line: print(line, file=sys.stderr, flush=True))
    show(root, as_json)


def show(root: Path, as_json: bool) -> None:
    """The rates that matter most, or the full record."""
    from costs.planning.machine import this_machine

    found = this_machine(root)
    assert found is not None
    if found.measured is None:  # an accelerator is planned by a roofline of its best rates
        record: dict[str, object] = {
            "name": found.name,
            "peak_flops_per_second": dict(found.peak_flops_per_second),
        }
    else:
        record = found.measured.machine.model_dump(mode="json")
    if as_json:
        typer.echo(json.dumps(record | {"file": str(MACHINE_FILE)}, indent=2))
        return
    best = max(rate for _, rate in found.peak_flops_per_second)
    typer.echo(f"{found.name}: {found.source}")
    typer.echo(f"memory      {found.usable_bytes / 2**30:.1f} GiB")
    typer.echo(f"products    up to {best / 1e9:.0f} GFLOP/s")
    typer.echo(f"bandwidth   {found.bandwidth_bytes_per_second / 1e9:.1f} GB/s beyond the caches")
    if found.measured is not None:
        machine = found.measured.machine
        typer.echo(f"launches    {found.measured.forward_op_seconds * 1e6:.1f} us an operation")
        typer.echo(
            f"processes   {machine.stages['sft'].start_seconds:.1f} s to start a Trainer's stage, "
            f"{machine.stages['ppo'].start_seconds:.1f} s another"
        )
    typer.echo(f"written: {MACHINE_FILE}, {SERVING_FILE}; rlhf plan uses them from now on")
