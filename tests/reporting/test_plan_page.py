"""The page of a plan."""

from html.parser import HTMLParser
from pathlib import Path

import pytest

from config.load import load
from costs.planning.planner import plan
from costs.planning.plans import Plan
from costs.planning.target import find_target
from reporting.numbers import memory
from reporting.plan_page import plan_page
from tests.conftest import ROOT


def planned(*assignments: str) -> Plan:
    params = load(ROOT / "recipes" / "demo.yaml", list(assignments))
    return plan(params, find_target(params, None, 1, None, Path("nowhere")), ("sft", "ppo"))


class Elements(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_asks_for_nothing_from_elsewhere_and_escapes_its_title() -> None:
    page = plan_page(planned(), "Plan of <demo>")
    elements = Elements(page)
    assert not {"script", "img", "link"} & {tag for tag, _ in elements.found}
    assert "url(" not in page
    assert "Plan of <demo>" in elements.texts


def test_the_bars_of_the_memory_are_to_one_scale() -> None:
    result = planned()
    elements = Elements(plan_page(result, "Plan"))
    widths = [
        float(str(attributes["style"]).removeprefix("width:").removesuffix("%"))
        for tag, attributes in elements.found
        if tag == "i" and str(attributes.get("class", "")).startswith("cut")
    ]
    scaled = []
    for stage in result.stages:
        most = max(sum(parts.values()) for parts in stage.memory.values())
        scaled += [100 * size / most for parts in stage.memory.values() for size in parts.values() if size > 0]
    assert widths == pytest.approx(scaled, abs=0.01)


def test_what_does_not_fit_is_said_with_what_helps() -> None:
    result = planned("sft.micro_batch_size=4096", "sft.batch_size=4096")
    (sft, _) = result.stages
    assert not sft.fits
    texts = Elements(plan_page(result, "Plan")).texts
    assert "Does not fit" in texts
    assert f"Stage sft lacks {memory(sft.shortfall_bytes)} on each device. What helps: {sft.lever}." in texts
    assert "Fits" in Elements(plan_page(planned(), "Plan")).texts
