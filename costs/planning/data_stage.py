"""The plan of the data stage: no model, one process; each phase by rows, tokens or pairs.

The rates are seconds of `python -m training.data` on two quiet cores of an AMD EPYC machine: 40,000 helpdesk rows (2.2
million tokens), 999 voted pairs (0.26 million) and 100 trees (0.55 million). The three agree to a third in each phase,
and to a tenth in the sum.
"""

from collections.abc import Mapping
from dataclasses import replace

from costs.formulas.time import energy_kwh
from costs.planning.grades import fixed_interval
from costs.planning.machine import stage_timings, timed_seconds
from costs.planning.plans import NOTHING, PhasePlan, StagePlan, Usd
from costs.planning.rows import Rows
from costs.tables.catalogue import Hardware, Price

START_SECONDS = 2.3
"""Imports, most of them Transformers and datasets."""
READ_SECONDS = 57e-6
"""Reading or generating a row, checking it, and keeping it: 57 microseconds, and 45 from a file."""
TOKENISE_SECONDS = 1.3e-6
"""Learning the tokenizer, tokenising and writing, a token of a sequence: 1.0 to 1.35 microseconds."""
SUMMARY_SECONDS = 0.65
"""Summaries and baselines however few the pairs: scikit-learn's import, most of it."""
PAIR_SECONDS, MOST_PAIRS = 33e-6, 25_000
"""Baselines of one pair, and how many are taken: at most 20,000 to learn from."""


def data_phases(rows: Rows, test_fraction: float, device: Hardware) -> tuple[dict[str, float], dict[str, float]]:
    """(seconds, units) of each phase, in the order and under the names that the stage measures: as it was timed on the
    device, else at this file's rates. A pair is two sequences.
    """
    prompts = rows.prompts / (1 - test_fraction)
    sft, pairs = rows.sft + rows.sft_held_out, rows.preference + rows.preference_held_out
    total = sft + pairs + prompts
    tokens = sft * rows.sft_tokens + 2 * pairs * rows.preference_tokens + prompts * rows.prompt_tokens
    seconds = {
        "start": START_SECONDS,
        "read": total * READ_SECONDS,
        "tokenise": tokens * TOKENISE_SECONDS,
        "summarise": SUMMARY_SECONDS + min(pairs, MOST_PAIRS) * PAIR_SECONDS,
    }
    units = {"start": 1.0, "read": total, "tokenise": tokens, "summarise": 1.0}
    return seconds | timed_seconds(stage_timings(device, "data"), units), units


def plan_data(
    rows: Rows, test_fraction: float, device: Hardware, gpus: int, price: Price, rented: int = 0
) -> StagePlan:
    """The plan of the data stage on devices that wait for it; `rented` are paid for, if these are more than it has."""
    steps = rows.sft + rows.preference + rows.prompts
    waits = "the devices wait while data is prepared, and are paid for"
    seconds, units = data_phases(rows, test_fraction, device)
    return replace(fixed_stage("data", seconds, steps, device, gpus, price, rented, waits), units=units)


def fixed_stage(
    stage: str,
    seconds: Mapping[str, float],
    steps: float,
    device: Hardware,
    gpus: int,
    price: Price,
    rented: int,
    assumption: str,
) -> StagePlan:
    """The plan of a stage that runs no model, from the seconds of its phases."""
    total = sum(seconds.values())
    gpus = 1 if device.is_cpu else gpus
    hours, paid = total / 3600 * gpus, max(gpus, rented)
    paid_hours = total / 3600 * paid
    return StagePlan(
        stage=stage,
        hardware=device.name,
        gpus=gpus,
        rented=paid,
        idle_usd=(paid_hours - hours) * price.expected,
        fits=True,
        shortfall_bytes=0.0,
        lever="",
        peak_bytes_per_gpu=0.0,
        device_bytes_per_gpu=0.0,
        peak_phase="",
        memory={},
        phases=tuple(
            PhasePlan(name, 0.0, 0.0, spent, "fixed", spent / 3600 * paid * price.expected)
            for name, spent in seconds.items()
        ),
        seconds=total,
        gpu_hours=hours,
        kwh=energy_kwh(hours, device.watts),
        usd=Usd(paid_hours * price.low, paid_hours * price.expected, paid_hours * price.high) if hours else NOTHING,
        steps=steps,
        tokens=0.0,
        mfu=0.0,
        time_interval=fixed_interval(stage_timings(device, stage), total),
        assumptions=(assumption,),
    )
