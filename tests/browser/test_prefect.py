"""A run from Prefect's form: filled in, submitted, watched until it is complete, its result
read.
"""

import json
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.project import PATIENCE_SECONDS, Project

pytestmark = [pytest.mark.browser, pytest.mark.integration, pytest.mark.timeout(3600)]


def field(page: Page, *names: str) -> Locator:
    """The input of a parameter, by the names of its sections and its own, as the form writes
    them.
    """
    place = page.locator("body")
    for name in names:
        label = (
            ".//span[contains(@class, 'schema-form-property__label') and normalize-space() = "
            f"'{name}']"
        )
        place = place.locator(
            f"xpath={label}/ancestor::*[contains(concat(' ', normalize-space(@class), ' '), ' "
            "p-label ')][1]"
        ).first
    return place.locator("input").first


def sign_in(page: Page, stack: Project) -> None:
    """Give the key that `rlhf up` printed, in a page of its own: Prefect's scripts fail until they
    have it.
    """
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
    asked: set[str] = set()
    page.on("request", lambda request: asked.add(urlsplit(request.url).netloc))
    page.goto(stack.pages["rlhf/rlhf"])
    coefficient = field(page, "Ppo", "Kl", "Coef")
    expect(coefficient).to_have_value("0.05")
    page.locator(".p-label", has_text="Run Name").locator("input").first.fill(
        "a firmer leash / 0.3"
    )
    coefficient.fill("0.3")
    coefficient.scroll_into_view_if_needed()
    picture(page, "prefect-form")
    page.get_by_role("button", name="Submit").click()
    page.get_by_role("link", name="a firmer leash / 0.3").first.click()
    expect(page.locator(".state-badge", has_text="Completed").first).to_be_visible(
        timeout=1000 * PATIENCE_SECONDS
    )
    page.reload()  # its artifacts were read when it was opened
    expect(page.locator(".state-badge", has_text="Completed").first).to_be_visible()
    page.wait_for_timeout(2000)  # the line of time is drawn bit by bit
    picture(page, "prefect-run")
    page.get_by_text("Artifacts", exact=True).last.click()
    page.locator(
        ".artifact-card", has=page.locator(".artifact-card__title", has_text="result")
    ).click()
    expect(page.get_by_text("what it cost, and what it bought")).to_be_visible()
    page.wait_for_function("document.querySelector(\"img[src^='data:']\")?.naturalWidth > 100")
    picture(page, "prefect-result")
    assert asked <= {urlsplit(stack.pages["Prefect"]).netloc, ""}, "a page of ours asks nobody else"
    (_, newest) = (
        json.loads(line)
        for line in (stack.root / "runs/pipeline.jsonl").read_text().splitlines()[-2:]
    )
    assert (newest["event"], newest["state"]) == ("end", "completed")
    assert newest["run_id"].endswith("-a-firmer-leash-0.3")
    params = (stack.root / "runs/pipeline" / newest["run_id"] / "params.yaml").read_text()
    assert "coef: 0.3" in params
