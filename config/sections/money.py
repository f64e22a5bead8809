"""Device prices and budgets. Changing either retrains nothing."""

import difflib
from datetime import date
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from config.errors import ParamsError
from config.records import STAGES
from config.sections.base import Limit, Section


def _iso(value: object) -> object:
    """YAML reads an unquoted day as a date; keep it as text."""
    return value.isoformat() if isinstance(value, date) else value


class Prices(Section):
    """What a device costs. Changing a price never retrains anything."""

    device: str | None = Field(
        description="Device that a run is planned for, a name of costs/tables/hardware.yaml such "
        "as a100-80; null is this machine."
    )
    usd_per_device_hour: Annotated[float, Field(ge=0, le=1000)] = Field(
        description="Price of one device (GPU, or this machine's CPU) per hour, in US dollars; of "
        "own hardware what an hour of it is worth."
    )
    usd_per_kwh: Annotated[float, Field(ge=0, le=10)] | None = Field(
        description="Price of electricity, in US dollars per kWh, on top of the hourly price; null "
        "where that includes it."
    )
    watts: Annotated[float, Field(gt=0, le=100_000)] | None = Field(
        description="Power of one device under load, in watts; null takes that of the device in "
        "costs/tables/hardware.yaml."
    )
    device_by_pool: dict[str, str] = Field(
        description="Pool -> its device, a name of costs/tables/hardware.yaml, for the stages "
        "that where puts there; {} plans them for device."
    )
    usd_per_device_hour_by_pool: dict[str, Annotated[float, Field(gt=0, le=1000)]] = Field(
        description="Pool -> price of one of its devices per hour, in US dollars, electricity "
        "included; {} is the price above."
    )
    outside_stages: bool = Field(
        description="Whether the time of a run outside of its stages (starting, between stages, report, sending "
        "results) costs what the pipeline's machine costs. true suits a machine that is rented for the run."
    )
    source: str = Field(description="Where the price was read.")
    date: Annotated[str, BeforeValidator(_iso)] = Field(
        pattern=r"^\d{4}-\d{2}-\d{2}$", description="Day it was read, YYYY-MM-DD."
    )

    @model_validator(mode="after")
    def _believable(self) -> "Prices":
        if self.usd_per_device_hour == 0 and not self.usd_per_kwh:
            raise ParamsError(
                "prices.usd_per_device_hour=0 with no prices.usd_per_kwh: an hour of a device "
                "costs something. Set either in params.yaml."
            )
        if not self.source.strip():
            raise ParamsError("prices.source is empty: say where the price was read. Set it in params.yaml.")
        try:
            date.fromisoformat(self.date)
        except ValueError:
            raise ParamsError(
                f"prices.date={self.date} is not a date. Set it to the day the price was read."
            ) from None
        return self


class Budget(Section):
    """What a run may cost. Changing a budget never retrains anything; a run stopped by it resumes when it is
    raised.
    """

    max_usd: Limit | None = Field(
        description="Most that the run may cost in US dollars, failed attempts and the runs it "
        "goes on from included; null is no limit."
    )
    max_hours: Limit | None = Field(
        description="Longest that its stages may take together, in hours of wall time; null is no limit."
    )
    monthly_usd: Limit | None = Field(
        description="Most that all runs of this project may cost in a calendar month (UTC), in US "
        "dollars; null is no limit."
    )
    max_usd_per_hour: Limit | None = Field(
        description="Most that the devices of a stage may cost in an hour, in US dollars, those "
        "that wait included; null is no limit."
    )
    max_usd_by_stage: dict[str, Limit] = Field(
        description="Stage -> most that it may cost in US dollars; {} is no limit."
    )
    max_hours_by_stage: dict[str, Limit] = Field(
        description="Stage -> longest that it may take in hours; {} is no limit."
    )
    min_gain_per_usd: Limit | None = Field(
        description="A method that samples ends as done once its score gains less than this a US dollar: as soon as "
        "the upper end of the gain of the last five updates over the five before lies below; null trains all updates."
    )
    gate: Literal["refuse", "warn"] = Field(
        description="A run planned above the budget: refuse does not start it, warn starts it and "
        "stops it at the budget."
    )
    approval_usd: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        description="A run planned above this many US dollars waits for approval; null never asks."
    )

    @model_validator(mode="after")
    def _stages(self) -> "Budget":
        for name, limits in (
            ("max_usd_by_stage", self.max_usd_by_stage),
            ("max_hours_by_stage", self.max_hours_by_stage),
        ):
            for stage in limits:
                if stage not in STAGES:
                    close = difflib.get_close_matches(stage, STAGES, n=1)
                    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(STAGES)}."
                    raise ParamsError(
                        f"budget.{name} limits {stage}, which is not a stage; {hint} Change it in params.yaml."
                    )
        return self
