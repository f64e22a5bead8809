"""What a run cost, from its files alone, by arithmetic that shares nothing with the ledger.

Nothing of `costs`, `tracking`, `reporting` or `tasks` is imported here.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

STAGES = ("data", "sft", "reward", "ppo", "rloo", "grpo", "dpo", "kto", "distill", "evaluate")
Row = dict[str, Any]


def rows_of(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@dataclass
class Sum:
    """Rows of one kind of work, added up."""

    seconds: float = 0.0
    usd: float = 0.0
    tokens: int = 0
    sequences: int = 0
    peak_bytes: int = 0
    device_seconds: float = 0.0

    def add(self, row: Row, seconds: float, price: float, rented: int, tokens: bool = True) -> None:
        used = 1 if row["device"] == "cpu" else row["world_size"]
        devices = max(used, rented)
        self.seconds += seconds
        self.device_seconds += seconds * used
        self.usd += seconds / 3600 * devices * price
        self.tokens += row["tokens"] if tokens else 0
        self.sequences += row["sequences"] if tokens else 0
        self.peak_bytes = max(self.peak_bytes, row["peak_bytes"])


@dataclass
class Account:
    """One stage of one run."""

    price: float
    rented: int
    cached: bool = False
    state: str = "done"
    message: str = ""
    attempts: int = 0
    failed: int = 0
    retries: int = 0
    spent: Sum = field(default_factory=Sum)
    wasted: Sum = field(default_factory=Sum)
    phases: dict[str, Sum] = field(default_factory=dict)
    made: dict[str, Sum] = field(default_factory=dict)
    """The work that made the outputs, whichever run paid for it."""

    @property
    def made_seconds(self) -> float:
        return sum(phase.seconds for phase in self.made.values())

    @property
    def made_usd(self) -> float:
        return sum(phase.usd for phase in self.made.values())


class Accounts:
    """The stages of a run, by name."""

    def __init__(self, root: Path, run_id: str) -> None:
        self.root, self.run_id = root, run_id
        self.kept = root / "runs" / "pipeline" / run_id
        self.params: dict[str, Any] = yaml.safe_load((self.kept / "params.yaml").read_text())
        self.events = [row for row in rows_of(root / "runs" / "pipeline.jsonl") if row["run_id"] == run_id]
        ends = [row for row in self.events if row["event"] == "end"]
        self.state: str = ends[-1]["state"]
        self.ended: float = ends[-1]["time"]
        noted = {row["stage"]: row for row in self.events if row["event"] == "stage"}
        self.noted = noted
        self.stages: dict[str, Account] = {}
        for stage in STAGES:
            if (account := self._account(stage, noted.get(stage))) is not None:
                self.stages[stage] = account
        plan = self.kept / "plan.json"
        self.plan: dict[str, Any] = json.loads(plan.read_text()) if plan.exists() else {}

    # ------------------------------------------------------------ prices

    def place(self, stage: str) -> tuple[str, int]:
        """Pool and processes of a stage."""
        place = self.params["where"]["default"] | (self.params["where"].get(stage) or {})
        return place["pool"], 1 if stage in ("data", "evaluate") else place["processes"]

    def price(self, stage: str) -> float:
        """US dollars for an hour of one device of the stage."""
        prices, pool = self.params["prices"], self.place(stage)[0]
        if pool in prices["usd_per_device_hour_by_pool"]:
            return float(prices["usd_per_device_hour_by_pool"][pool])
        return float(prices["usd_per_device_hour"] + (prices["usd_per_kwh"] or 0.0) * (prices["watts"] or 0.0) / 1000)

    def rented(self, stage: str) -> int:
        """Devices that are paid for while a stage runs: beside the pipeline as many as the largest of its stages
        uses.
        """
        method = self.params["align"]["method"]
        run = ["data", "sft", "reward", method, "evaluate"]
        run += ["distill"] if self.params["distill"] is not None else []
        pool, processes = self.place(stage)
        if pool != "local":
            return processes
        return max(self.place(name)[1] for name in run if self.place(name)[0] == "local")

    # ------------------------------------------------------------ stages

    def _account(self, stage: str, noted: Row | None) -> Account | None:
        folder = self.root / "runs" / stage
        usage, events = rows_of(folder / "usage.jsonl"), rows_of(folder / "attempts.jsonl")
        numbers = list(dict.fromkeys(row["attempt"] for row in events))
        attempt_numbers = [row["attempt"] for row in events if row["run_id"] == self.run_id]
        attempt_numbers = list(dict.fromkeys(attempt_numbers))
        if not attempt_numbers and noted is None:
            return None
        account = Account(self.price(stage), self.rented(stage))
        kept, wasted = {}, {}
        for number in numbers:
            kept[number], wasted[number] = _split(number, numbers, usage, events)
        if attempt_numbers:
            ends = {row["attempt"]: row for row in events if row["event"] == "end"}
            codes = [ends[number]["exit_code"] if number in ends else None for number in attempt_numbers]
            account.state = {0: "done", 75: "stopped", 76: "stopped", None: "unfinished"}.get(codes[-1], "failed")
            account.message = ends.get(attempt_numbers[-1], {}).get("message", "")
            account.attempts, account.failed = len(attempt_numbers), sum(code != 0 for code in codes)
            account.retries = sum(row["event"] == "retry" and row["attempt"] in attempt_numbers for row in events)
            for number in attempt_numbers:
                for row, seconds, useful in [*kept[number], *wasted[number]]:
                    account.spent.add(row, seconds, account.price, account.rented, useful)
                    phase = account.phases.setdefault(row["phase"], Sum())
                    phase.add(row, seconds, account.price, account.rented, useful)
                for row, seconds, _ in wasted[number]:
                    account.wasted.add(row, seconds, account.price, account.rented)
        else:
            account.cached, account.state = True, "cached"
        last = noted["attempt"] if noted else None
        if last is not None:
            for number in _chain(last, numbers, events):
                for row, seconds, useful in kept[number]:
                    phase = account.made.setdefault(row["phase"], Sum())
                    phase.add(row, seconds, account.price, account.rented, useful)
        return account

    # ------------------------------------------------------------ totals

    @property
    def seconds(self) -> float:
        return sum(account.spent.seconds for account in self.stages.values())

    @property
    def outside_seconds(self) -> float:
        """From the start of the run's process to its end, when its report is written, without the stages."""
        began = self.events[0].get("detail", {}).get("began", self.events[0]["time"])
        return max(0.0, float(self.ended - began - self.seconds))

    @property
    def usd(self) -> float:
        return sum(account.spent.usd for account in self.stages.values())

    @property
    def wasted_usd(self) -> float:
        return sum(account.wasted.usd for account in self.stages.values())

    @property
    def saved_usd(self) -> float:
        return sum(account.made_usd for account in self.stages.values() if account.cached)

    @property
    def usd_per_point(self) -> float | None:
        """US dollars for a point of win rate above 50%."""
        rate = self.metrics("evaluate").get("win_rate_gold")
        result = self.usd + self.saved_usd
        return result / (100 * rate - 50) if rate and rate > 0.5 and result else None

    def metrics(self, stage: str) -> dict[str, Any]:
        """What the stage measured in this run."""
        if stage not in self.noted:
            return {}
        return dict(json.loads(self.file(f"metrics/{stage}.json").read_text()))

    def file(self, name: str) -> Path:
        """An output of the run: its own copy, or what is in place if it kept none."""
        return self.kept / name if (self.kept / name).exists() else self.root / name

    # ------------------------------------------------------------ the plan

    def planned(self, stage: str) -> Row | None:
        result = [item for item in self.plan.get("stages", []) if item["stage"] == stage]
        return result[0] if result else None

    def planned_usd(self, stage: str, seconds: float) -> float:
        """At the price that the ledger has today."""
        planned = self.planned(stage) or {}
        return seconds * planned.get("rented", 1) * self.price(stage) / 3600

    def compared(self) -> list[str]:
        """The stages that were planned and made."""
        return [name for name in self.stages if self.planned(name) and self.stages[name].made]

    def planned_total(self) -> tuple[float, float, float, float]:
        """Seconds planned and measured, US dollars planned and measured, of the compared stages."""
        both = self.compared()
        seconds = [(self.planned(name) or {})["seconds"] for name in both]
        return (
            sum(seconds),
            sum(self.stages[name].made_seconds for name in both),
            sum(self.planned_usd(name, item) for name, item in zip(both, seconds, strict=True)),
            sum(self.stages[name].made_usd for name in both),
        )


def _chain(last: int, numbers: list[int], events: list[Row]) -> list[int]:
    """The attempts that made the outputs of attempt `last`: it, and those before it, back to one that was done, of the
    same parameters and data.
    """
    prints = {row["attempt"]: row["fingerprint"] for row in events if row["fingerprint"]}
    done = {row["attempt"] for row in events if row["event"] == "end" and row["exit_code"] == 0}
    before = [number for number in numbers if number < last]
    start = max((number for number in before if number in done), default=0)
    return [
        number for number in numbers if start < number <= last and prints.get(number, prints[last]) == prints[last]
    ]


Part = tuple[Row, float, bool]
"""A usage row, its seconds here, and whether its tokens count here."""


def _split(number: int, numbers: list[int], usage: list[Row], events: list[Row]) -> tuple[list[Part], list[Part]]:
    """The rows of an attempt that were of use, and those that were lost."""
    rows = [row for row in usage if row["attempt"] == number]
    mine = [row for row in events if row["attempt"] == number]
    ended = any(row["event"] == "end" for row in mine)
    if not ended:
        begin = min([row["time"] for row in mine] + [row["time"] - row["seconds"] for row in rows])
        last = max(row["time"] for row in [*mine, *rows])
        lived = [row["lived_seconds"] for row in mine if row.get("lived_seconds") is not None]
        missing = (lived[0] if lived else last - begin) - sum(row["seconds"] for row in rows)
        if missing > 0:
            rows = [*rows, {
                "phase": "other", "seconds": missing, "tokens": 0, "sequences": 0, "peak_bytes": 0,
                "step": max((row["step"] for row in rows), default=0), "time": last,
                "world_size": mine[0]["world_size"], "device": mine[0]["device"], "attempt": number,
            }]  # fmt: skip
    done = any(row["event"] == "end" and row["exit_code"] == 0 for row in mine)
    later = numbers[numbers.index(number) + 1 :]
    resumed = [row["step"] for row in events if row["event"] == "resume" and row["attempt"] in later]
    lost = {
        index: retry["lost_seconds"]
        for retry in mine
        if retry["event"] == "retry"
        for index, row in enumerate(rows)
        if row["time"] - row["seconds"] <= retry["time"] <= row["time"]
    }
    useful: list[Part] = []
    wasted: list[Part] = []
    for index, row in enumerate(rows):
        if not done and later and not 1 <= row["step"] <= min(resumed, default=0):
            wasted.append((row, row["seconds"], True))
            continue
        useful.append((row, row["seconds"] - lost.get(index, 0.0), True))
        if index in lost:
            wasted.append((row, lost[index], False))
    return useful, wasted
