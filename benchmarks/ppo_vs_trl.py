"""Our PPO against the last one of TRL (1.12.0): episodes per second, seconds to a gold score, peak memory, final gold
score, phases.

    python -m benchmarks.ppo_vs_trl        # the whole comparison: hours on two cores
    python -m benchmarks.ppo_vs_trl --sizes 2M --pairs 1 --updates 3 --layouts separate --json

SFT and reward model are trained once per size by our own stages (benchmarks/trl_comparison/workspaces.py). Then the
trainers run in turn, each in a fresh process, on the same prompts, models and hyper-parameters; ratios are taken
within a pair, and the median over the pairs is reported. Speed is that of all updates but the first. Memory is the
peak above what the process held after its imports, in runs of their own with a 32,000-entry vocabulary.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that it runs as a file, too

import torch
import transformers
from rich.console import Console
from rich.table import Table

from benchmarks.projects.checkouts import ROOT
from benchmarks.trl_comparison.runs import Measurement, lora_of, ppo_params, run_ours, run_trl, sft_peak_bytes
from benchmarks.trl_comparison.trl_venv import TRL_VERSION, bench_python
from benchmarks.trl_comparison.utilisation import matmul_flops_per_second, update_flops
from benchmarks.trl_comparison.workspaces import SIZES, Workspace, long_vocabulary, prepared, with_adapters
from config.errors import UserError
from config.schema import Params
from training.modeling.models import DTYPES

LAYOUTS = ("separate", "shared_trunk", "shared_base")
"""shared_base has LoRA adapters and is compared with TRL under the same LoRA."""
PHASES = ("rollout", "score", "reference", "value", "advantage", "update")


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    options = parse()
    try:
        result = compare(options)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    print(json.dumps(result, indent=2)) if options.json else show(result)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="parameters of the policy")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="ours; TRL has but one")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each trainer, in turn (default 3)")
    parser.add_argument("--updates", type=int, help="PPO updates per run, the first untimed (default by size)")
    parser.add_argument(
        "--memory-updates", type=int, default=2, help="updates of a memory run; 0 leaves memory out (default 2)"
    )
    parser.add_argument("--gold-target", type=float, default=0.8, help="for the seconds to reach it (default 0.8)")
    parser.add_argument(
        "--trl-accumulation", type=int, default=1, help="micro-batches per optimizer step of TRL (default 1)"
    )
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="CPU threads of every process (default all)"
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="params of both sides",
    )
    parser.add_argument("--work", type=Path, default=ROOT / ".bench" / "work", help="where models and runs are kept")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    options = parser.parse_args()
    for name in ("pairs", "threads", "trl_accumulation"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.updates is not None and options.updates < 1:
        parser.error("--updates must be at least 1")
    options.work = options.work.resolve()
    return options


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Everything asked for, as it is printed by --json."""
    torch.set_num_threads(options.threads)
    bench_python()  # now, not in the middle of a pair
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    machine = {
        "device": device,
        "cpu": platform.processor() or platform.machine(),
        "threads": options.threads,
        "torch": torch.__version__,
    }
    settings = {
        "trl": TRL_VERSION,
        "pairs": options.pairs,
        "gold_target": options.gold_target,
        "overrides": options.overrides,
    }
    return {"machine": machine, "settings": settings, "sizes": [compare_size(name, options) for name in options.sizes]}


def compare_size(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One row of `sizes`."""
    environment = {"OMP_NUM_THREADS": str(options.threads)}
    workspace = prepared(name, SIZES[name], options.overrides, options.work, environment)
    layouts = chosen(workspace, options.layouts, options.updates, environment)
    flops_per_second = []
    runs: dict[str, list[Measurement]] = {}
    for pair in range(1, options.pairs + 1):
        flops_per_second.append(matmul_rate(workspace))
        for run, measured in run_all(layouts, f"pair{pair}", options, environment).items():
            runs.setdefault(run, []).append(measured)
    memory, sft_peak = memory_runs(name, workspace, options, environment) if layouts else ({}, None)
    return {
        "size": name,
        "parameters": workspace.parameters,
        "vocabulary": workspace.shape["vocab_size"],
        "max_new_tokens": workspace.params.ppo.max_new_tokens,
        "batch_size": workspace.params.ppo.batch_size,
        "matmul_flops_per_second": median(flops_per_second),
        "sft_lora_peak_bytes": sft_peak,
        "layouts": {
            layout: layout_row(
                job,
                runs[layout],
                runs[rival(job.params)],
                memory.get(layout),
                memory.get(rival(job.params)),
                flops_per_second,
                options.gold_target,
            )
            for layout, job in layouts.items()
        },
    }


class Job(NamedTuple):
    """What one layout is run on."""

    workspace: Workspace
    params: Params


def chosen(
    workspace: Workspace, layouts: Sequence[str], updates: int | None, environment: dict[str, str]
) -> dict[str, Job]:
    """The models and params of each layout."""
    overrides = [f"ppo.updates={updates}"] if updates else []
    jobs = {}
    for layout in layouts:
        folder = with_adapters(workspace, environment) if layout == "shared_base" else workspace
        jobs[layout] = Job(folder, ppo_params(folder, [f"ppo.layout={layout}", *overrides]))
    return jobs


def rival(params: Params) -> str:
    """Which of TRL's runs a layout is compared with."""
    return "trl" if lora_of(params) is None else "trl_lora"


def run_all(
    layouts: dict[str, Job], name: str, options: argparse.Namespace, environment: dict[str, str]
) -> dict[str, Measurement]:
    """Every layout once, and after the first of its kind the TRL run it is compared with."""
    measured: dict[str, Measurement] = {}
    for layout, (workspace, params) in layouts.items():
        folder = workspace.folder / "bench"
        measured[layout] = run_ours(workspace, params, folder / f"{name}-{layout}", environment)
        if rival(params) not in measured:
            measured[rival(params)] = run_trl(
                workspace, params, folder / f"{name}-{rival(params)}", environment, options.trl_accumulation
            )
    return measured


def matmul_rate(workspace: Workspace) -> float:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return matmul_flops_per_second(
        workspace.shape, workspace.params.ppo.micro_batch_tokens, DTYPES[workspace.params.model.dtype], device
    )


def memory_runs(
    name: str, workspace: Workspace, options: argparse.Namespace, environment: dict[str, str]
) -> tuple[dict[str, Measurement], int | None]:
    """The run of each layout with the long vocabulary, and the peak of our SFT beside the layout that shares its
    base.
    """
    if not options.memory_updates:
        return {}, None
    long = long_vocabulary(name, workspace, options.work, environment)
    wide = chosen(long, options.layouts, options.memory_updates, environment)
    memory = run_all(wide, "memory", options, environment)
    if "shared_base" not in wide:
        return memory, None
    base = wide["shared_base"]
    folder = base.workspace.folder / "bench/memory-sft"
    return memory, sft_peak_bytes(base.workspace, base.params, folder, environment)


def layout_row(
    job: Job,
    ours: list[Measurement],
    trl: list[Measurement],
    memory: Measurement | None,
    trl_memory: Measurement | None,
    flops_per_second: list[float],
    gold_target: float,
) -> dict[str, Any]:
    """What is printed of one layout: medians over the pairs, ratios within them."""
    workspace, params = job
    speeds = [m.episodes_per_second for m in ours], [m.episodes_per_second for m in trl]
    return {
        "trl_run": rival(params),
        "episodes_per_second": median(speeds[0]),
        "trl_episodes_per_second": median(speeds[1]),
        "speedup": median(a / b for a, b in zip(*speeds, strict=True)),
        "peak_bytes": memory.peak_bytes if memory else None,
        "trl_peak_bytes": trl_memory.peak_bytes if trl_memory else None,
        "memory_ratio": memory.peak_bytes / trl_memory.peak_bytes if memory and trl_memory else None,
        "gold_final": median(m.gold_final for m in ours),
        "trl_gold_final": median(m.gold_final for m in trl),
        "seconds_to_gold": median_time(ours, gold_target),
        "trl_seconds_to_gold": median_time(trl, gold_target),
        "update_utilisation": utilisation(
            workspace, params, ours, flops_per_second, own_value_trunk=params.ppo.layout != "shared_trunk"
        ),
        "trl_update_utilisation": utilisation(workspace, params, trl, flops_per_second, own_value_trunk=True),
        "phases": median_phases(ours),
        "trl_phases": median_phases(trl),
        "mean_response_tokens": fmean(m.mean_response_tokens for m in ours),
        "trl_mean_response_tokens": fmean(m.mean_response_tokens for m in trl),
        "speeds": speeds[0],
        "trl_speeds": speeds[1],
        "golds": [m.gold_final for m in ours],
        "trl_golds": [m.gold_final for m in trl],
    }


def median_time(runs: list[Measurement], gold_target: float) -> float | None:
    """Median seconds to the gold score; None if half of the runs or more never reach it."""
    times = sorted(float("inf") if (t := run.seconds_to_gold(gold_target)) is None else t for run in runs)
    return None if times[len(times) // 2] == float("inf") else median(times)


def median_phases(runs: list[Measurement]) -> dict[str, float]:
    """Seconds per update."""
    return {name: median(run.phases.get(name, 0.0) for run in runs) for name in runs[0].phases}


def utilisation(
    workspace: Workspace, params: Params, runs: list[Measurement], flops_per_second: list[float], own_value_trunk: bool
) -> float:
    """Useful FLOP/s of the update phase over the matmul rate measured just before its pair, a fraction; median over
    the pairs.
    """
    shares = []
    for run, rate in zip(runs, flops_per_second, strict=True):
        lengths = list(zip(run.prompt_lengths, run.response_lengths, strict=True))[run.steady]
        flops = fmean(
            update_flops(
                workspace.shape,
                prompts,
                responses,
                params.ppo.ppo_epochs,
                own_value_trunk,
                lora_of(params) is not None,
            )
            for prompts, responses in lengths
        )
        shares.append(flops / run.phases["update"] / rate)
    return median(shares)


SPEEDS = ("episodes_per_second", "trl_episodes_per_second", "speedup", "update_utilisation", "trl_update_utilisation")


def show(result: dict[str, Any]) -> None:
    """Three tables for people."""
    title = (
        f"Our PPO and TRL {TRL_VERSION}'s, medians of {result['settings']['pairs']} pairs on "
        f"{result['machine']['device']}"
    )
    speed = table(f"{title}: speed", ("size", "layout", "episodes/s", "TRL", "speedup", "update use", "TRL"))
    worth = table(
        "Memory and what was learnt", ("size", "layout", "peak MiB", "TRL", "ratio", "gold", "TRL", "s to gold", "TRL")
    )
    phases = table("Seconds per update", ("size", "trainer", *PHASES))
    for size in result["sizes"]:
        trl_shown = set()
        for layout, row in size["layouts"].items():
            speed.add_row(size["size"], layout, *(number(row[name]) for name in SPEEDS))
            worth.add_row(size["size"], layout, *worth_cells(row))
            phases.add_row(size["size"], layout, *phase_cells(row["phases"]))
            if row["trl_run"] not in trl_shown:
                phases.add_row(size["size"], row["trl_run"], *phase_cells(row["trl_phases"]))
                trl_shown.add(row["trl_run"])
    console = Console()
    for outcome in (speed, worth, phases):
        console.print(outcome)


def worth_cells(row: dict[str, Any]) -> list[str]:
    """Memory and what was learnt."""
    mib = [None if row[name] is None else row[name] / 2**20 for name in ("peak_bytes", "trl_peak_bytes")]
    return [
        number(mib[0], 0),
        number(mib[1], 0),
        number(row["memory_ratio"]),
        number(row["gold_final"], 3),
        number(row["trl_gold_final"], 3),
        number(row["seconds_to_gold"], 0),
        number(row["trl_seconds_to_gold"], 0),
    ]


def phase_cells(seconds: dict[str, float]) -> list[str]:
    return [number(seconds.get(name)) for name in PHASES]


def table(title: str, columns: Sequence[str]) -> Table:
    """An empty table whose first two columns are words."""
    result = Table(title=title)
    for i, column in enumerate(columns):
        result.add_column(column, justify="left" if i < 2 else "right")
    return result


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    main()
