"""The servers' own pages, opened as a person does it: a run from Prefect's form, filled in, submitted, watched until
it is complete and its result read; then MLflow's, where runs are searched and compared. One file, so that one stack
and one trained project serve both.
"""

import json
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from mlflow import MlflowClient
from playwright.sync_api import Locator, Page, expect

from reporting.numbers import usd
from tests.browser.project import PATIENCE_SECONDS, RECIPE, Project
from tests.conftest import ROOT
from tracking.runs_view import COLUMNS

pytestmark = [pytest.mark.browser, pytest.mark.integration, pytest.mark.timeout(3600)]

SAME_ROW = """e => {
  const middle = (x) => x.getBoundingClientRect().top + x.getBoundingClientRect().height / 2;
  return [...document.querySelectorAll('.ReactVirtualized__Grid__innerScrollContainer > div')]
    .filter((x) => Math.abs(middle(x) - middle(e)) < 4).map((x) => x.innerText);
}"""
"""The texts beside an element in MLflow's table, which has no rows: only cells, each at its place."""
BOTH_PICTURES = (
    "[...document.querySelectorAll('img')].filter((x) => x.naturalWidth > 300 && x.offsetWidth > 200).length >= 2"
)
WHOLE_RUNS = "tags.\"rlhf.kind\" = 'run'"


def field(page: Page, *names: str) -> Locator:
    """The input of a parameter, by the names of its sections and its own, as the form writes them."""
    place = page.locator("body")
    for name in names:
        label = (
            ".//span[contains(@class, 'schema-form-property__label') and "
            f"(normalize-space() = '{name}' or normalize-space() = '{name} (Optional)')]"
        )
        place = place.locator(
            f"xpath={label}/ancestor::*[contains(concat(' ', normalize-space(@class), ' '), ' p-label ')][1]"
        ).first
    return place.locator("input").first


def sign_in(page: Page, stack: Project) -> None:
    """Give the key that `rlhf up` printed, in a page of its own: Prefect's scripts fail until they have it."""
    asking = page.context.new_page()
    asking.goto(stack.pages["rlhf/rlhf"])
    asking.locator("input[type=password]").fill(stack.key)
    asking.keyboard.press("Enter")
    expect(field(asking, "Ppo", "Kl", "Coef")).to_be_visible()
    asking.close()


def test_a_run_is_started_from_the_form_and_shows_its_result(
    stack: Project, page: Page, picture: Callable[[Page, str], None]
) -> None:
    sign_in(page, stack)
    requests: set[str] = set()
    page.on("request", lambda request: requests.add(urlsplit(request.url).netloc))
    page.goto(stack.pages["rlhf/rlhf"])
    coefficient = field(page, "Ppo", "Kl", "Coef")
    expect(coefficient).to_have_value("0.05")
    page.locator(".p-label", has_text="Run Name").locator("input").first.fill("a firmer leash / 0.3")
    coefficient.fill("0.3")
    coefficient.scroll_into_view_if_needed()
    picture(page, "prefect-form")
    page.get_by_role("button", name="Submit").click()
    page.get_by_role("link", name="a firmer leash / 0.3").first.click()
    expect(page.locator(".state-badge", has_text="Completed").first).to_be_visible(timeout=1000 * PATIENCE_SECONDS)
    page.reload()  # its artifacts were read when it was opened
    expect(page.locator(".state-badge", has_text="Completed").first).to_be_visible()
    page.wait_for_timeout(2000)  # the line of time is drawn bit by bit
    picture(page, "prefect-run")
    page.get_by_text("Artifacts", exact=True).last.click()
    page.locator(".artifact-card", has=page.locator(".artifact-card__title", has_text="result")).click()
    expect(page.get_by_text("what it cost, and what it bought")).to_be_visible()
    page.wait_for_function("document.querySelector(\"img[src^='data:']\")?.naturalWidth > 100")
    picture(page, "prefect-result")
    assert requests <= {urlsplit(stack.pages["Prefect"]).netloc, ""}, "a page of ours asks nobody else"
    rows = [json.loads(line) for line in (stack.root / "runs/pipeline.jsonl").read_text().splitlines()]
    newest = [row for row in rows if row["event"] == "end"][-1]
    assert newest["state"] == "completed"
    assert newest["run_id"].endswith("-a-firmer-leash-0.3")
    params = (stack.root / "runs/pipeline" / newest["run_id"] / "params.yaml").read_text()
    assert "coef: 0.3" in params


# ---------------------------------------------------------------- MLflow


@pytest.fixture(scope="module")
def results(stack: Project) -> list[dict[str, Any]]:
    """Two runs that differ in one parameter, as `rlhf run --json` tells them."""
    return [stack.run("--recipe", RECIPE), stack.run("--set", "ppo.kl.coef=0.2")]


def name_of(result: dict[str, Any]) -> str:
    return f"{str(result['run_id']).split('-', 2)[2]} (ppo)"


def close_assistant(page: Page) -> None:
    """MLflow opens a panel of its own beside the page of somebody who is new."""
    page.get_by_role("button", name="Close", exact=True).click()


def test_the_page_of_a_run_shows_its_summary_with_the_key_picture(
    results: list[dict[str, Any]], page: Page, picture: Callable[[Page, str], None]
) -> None:
    page.goto(results[0]["pages"]["mlflow"])
    shown = page.locator("img[src*='key.svg']")
    expect(shown).to_be_visible()
    page.wait_for_function("document.querySelector(\"img[src*='key.svg']\").naturalWidth > 100")
    close_assistant(page)
    page.get_by_text("Show more").click()
    total = page.get_by_role("row").filter(has=page.get_by_role("cell", name="total", exact=True)).locator("td")
    assert total.nth(2).inner_text().strip() == usd(results[0]["total_usd"])
    shown.scroll_into_view_if_needed()
    picture(page, "mlflow-run")


def test_the_list_of_all_runs_opens_with_the_columns_that_matter(
    results: list[dict[str, Any]], page: Page, picture: Callable[[Page, str], None]
) -> None:
    page.set_viewport_size({"width": 2600, "height": 800})  # MLflow draws what is in sight
    page.goto(results[1]["pages"]["runs"])
    for result in results:
        expect(page.get_by_role("link", name=name_of(result), exact=True)).to_be_visible()
    for column in COLUMNS:
        header = page.locator(f'[role=columnheader][col-id="{column}"]')
        expect(header.first).to_be_visible()
    assert page.get_by_role("link", name=re.compile("^(sft|ppo) of ")).count() == 0
    picture(page, "mlflow-runs")
    page.goto("about:blank")  # within MLflow, it would keep the view as it is drawn now
    page.goto(f"{results[1]['pages']['runs']}&compareRunsMode=CHART")
    expect(page.get_by_text("cost/made_milliusd vs. eval/win_rate")).to_be_visible()
    picture(page, "mlflow-charts")


def test_two_runs_are_found_selected_and_compared_by_cost(
    results: list[dict[str, Any]], page: Page, picture: Callable[[Page, str], None]
) -> None:
    inside = results[0]["pages"]["mlflow"].split("/runs/")[0]
    page.goto(f"{inside}/runs?workflowType=machine_learning")
    close_assistant(page)
    search = page.get_by_placeholder("metrics.rmse")
    search.fill(WHOLE_RUNS)
    with page.expect_response("**/runs/search*"):
        search.press("Enter")
    page.wait_for_timeout(1000)  # the table is drawn anew, and a click on the old one is lost
    for done, result in enumerate(results, start=1):
        row = page.get_by_role("row").filter(has=page.get_by_role("link", name=name_of(result), exact=True))
        row.get_by_label("toggle row selection").click(force=True)  # its own drawing is in the way
        expect(page.get_by_label("toggle row selection (checked)")).to_have_count(done)
    page.get_by_role("button", name="Compare", exact=True).click()
    expect(page.get_by_text("Comparing 2 Runs")).to_be_visible()
    page.get_by_text("key.svg", exact=True).dispatch_event("click")
    page.wait_for_function(BOTH_PICTURES)
    picture(page, "mlflow-pictures")
    heading = page.get_by_role("button", name="Metrics", exact=True)
    heading.evaluate("e => e.scrollIntoView({block: 'start'})")  # the table itself stays at its top
    label = page.get_by_role("link", name="cost/milliusd", exact=True)
    expect(label).to_be_visible()
    picture(page, "mlflow-compare")
    values = sorted(float(cell) for cell in label.evaluate(SAME_ROW)[1:])
    # MLflow shows three decimals
    spent = sorted(1000 * result["total_usd"] for result in results)
    assert values == pytest.approx(spent, abs=0.0006)


def test_the_documented_searches_and_metrics_are_there(results: list[dict[str, Any]]) -> None:
    server, _, experiment = results[0]["pages"]["mlflow"].split("/runs/")[0].partition("/#/experiments/")
    client = MlflowClient(server)
    document = (ROOT / "docs" / "mlflow.md").read_text(encoding="utf-8")
    searches = re.findall(r"`((?:tags|metrics|params|attributes)\.[^`]* [^`]*)`", document)
    assert len(searches) > 8
    matches = {search: {run.info.run_name for run in client.search_runs([experiment], search)} for search in searches}
    names = {name_of(result) for result in results}  # other tests may have started more
    assert matches[WHOLE_RUNS] >= names
    assert not any(" of " in name for name in matches[WHOLE_RUNS])
    dear = matches['metrics."cost/usd" > 0.01 and tags."rlhf.kind" = \'run\'']
    assert dear & names == {name_of(result) for result in results if result["total_usd"] > 0.01}
    logged = {name for run in client.search_runs([experiment]) for name in run.data.metrics}
    documented = set(
        re.findall(r"[`\"]((?:cost|eval|plan|ppo|phase_seconds|phase_usd|stage_usd)/[a-z_/]+)[`\"]", document)
    )
    headings = {name for name in documented if any(metric.startswith(f"{name}/") for metric in logged)}
    assert documented - headings - logged <= {
        "cost/usd_per_win_rate_point",
        "eval/reward_hacking",
        "eval/reward_hacking_prompts_needed",
    }, "without a gain there is no price of it; a tiny run's few prompts may decide no hacking"
