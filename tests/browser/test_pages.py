"""Our own pages on a wide and on a narrow screen: nothing runs out of them, whatever is too wide scrolls in its
box.
"""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from config.load import load
from costs.planning.planner import plan
from costs.planning.target import find_target
from labelling.server import Session, serve, url
from reporting.build import build_report
from reporting.comparison.page import comparison_page
from reporting.comparison.runs import compare_runs
from reporting.gallery_page import write_gallery
from reporting.plan_page import plan_page
from tests.conftest import ROOT
from tests.reporting.two_runs import FIRST, SECOND, write_two_runs

pytestmark = [pytest.mark.browser, pytest.mark.integration]

WIDTHS = (1280, 400)
RECIPE = ROOT / "recipes" / "demo.yaml"
ESCAPES = """() => {
  const wide = document.documentElement.clientWidth;
  const inBox = (e) => e.closest('.scroll, pre, svg') !== null;
  return [...document.querySelectorAll('body *')]
    .filter((e) => !inBox(e) && e.getBoundingClientRect().right > wide + 1)
    .map((e) => e.outerHTML.slice(0, 120));
}"""
"""The elements that reach over the right edge of the window, those in boxes that scroll left out."""
OVERLAPS = """() => [...document.querySelectorAll('.tile dd, .bar-value, .badge, h1, h2, h3')]
  .filter((e) => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== 'inline')
  .map((e) => e.outerHTML.slice(0, 120))"""
"""The texts that are wider than their own box."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """report, compare and plan, as the commands write them."""
    root = tmp_path_factory.mktemp("runs")
    write_two_runs(root)
    files = {"report": build_report(root, load(root / "runs/pipeline" / FIRST / "params.yaml"), FIRST)}
    params = load(RECIPE)
    planned = plan(params, find_target(params, None, 1, None, root), ("data", "sft", "reward", "ppo", "evaluate"))
    texts = {
        "compare": comparison_page(compare_runs(root, [FIRST, SECOND]), "Two runs side by side", "rlhf compare"),
        "plan": plan_page(planned, "Plan of demo.yaml"),
    }
    for name, text in texts.items():
        files[name] = root / f"{name}.html"
        files[name].write_text(text, encoding="utf-8")
    return files | {"runs": write_gallery(root)}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["report", "compare", "plan", "runs"])
def test_a_page_fits_its_window(
    pages: dict[str, Path], name: str, width: int, page: Page, picture: Callable[[Page, str], None]
) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(pages[name].as_uri())
    if width == WIDTHS[0]:
        picture(page, name)
    for closed in page.locator("summary").all():
        closed.click()
    assert page.evaluate(ESCAPES) == []
    assert page.evaluate(OVERLAPS) == []
    assert page.evaluate("document.documentElement.scrollWidth") == width


LONELY = """() => {
  const rows = {};
  for (const tile of document.querySelectorAll('.tiles > *')) {
    const { top, width } = tile.getBoundingClientRect();
    (rows[Math.round(top)] ||= []).push(width);
  }
  const whole = document.querySelector('.tiles').getBoundingClientRect().width;
  return Object.values(rows).filter((row) => row.length === 1 && row[0] < whole - 1).length;
}"""
"""How many tiles stand alone in a row that they do not fill."""


def test_no_tile_stands_alone_in_its_row(pages: dict[str, Path], page: Page) -> None:
    page.goto(pages["report"].as_uri())
    there = page.locator(".tiles > *").count()
    assert there > 6
    page.evaluate("document.querySelector('.tiles').append(document.querySelector('.tile').cloneNode(true))")
    for count in range(there + 1, 1, -1):
        for width in (1280, 960, 700, 400):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate(LONELY) == 0, (count, width)
        page.evaluate("document.querySelector('.tiles').lastElementChild.remove()")


@pytest.fixture
def labelling(tmp_path: Path) -> Iterator[str]:
    """Address of a labelling page whose texts are long, one of them without a space."""
    row = {
        "prompt": "my order of a blue kettle came broken, i am quite upset. " * 6,
        "response1": "i am sorry. " * 40,
        "response2": "x" * 900,
    }
    (tmp_path / "pairs.jsonl").write_text(json.dumps({**row, "seed": 1}) + "\n")
    with serve(Session(tmp_path / "pairs.jsonl", tmp_path / "votes.jsonl")) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield url(server)
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("width", WIDTHS)
def test_long_replies_fit_the_labelling_page(labelling: str, width: int, page: Page) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(labelling)
    assert page.evaluate(ESCAPES) == []
    page.get_by_label("Your name").fill("Ada")
    page.keyboard.press("Enter")
    expect(page.locator("#pair")).to_be_visible()
    assert page.evaluate(ESCAPES) == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
