"""A headless Chromium, driven by Playwright, and pictures of what it shows."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.browser.project import Project, project

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
"""Without a sandbox because CI runs as root; the others keep the browser from calling its maker."""
PATIENCE_MILLISECONDS = 60_000
"""How long a page may take to show what it is asked for: a busy machine is not a failure."""
START_MILLISECONDS = 240_000

expect.set_options(timeout=PATIENCE_MILLISECONDS)


def chromium() -> str:
    """Where the system's browser is; skips the test if there is none."""
    program = next((result for name in PROGRAMS if (result := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(PROGRAMS)} is on the PATH (Debian: apt-get install chromium)")
    return program


@pytest.fixture(scope="session")
def stack(request: pytest.FixtureRequest, new_checkout: Callable[[], Path], forks: None) -> Iterator[Project]:
    """A checkout with everything up, one for all tests that open Prefect's or MLflow's pages."""
    chromium()
    with project(new_checkout(), request.config.getoption("--recipe")) as result:
        yield result


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser for the tests of a file: Playwright holds the thread's event loop as long as it lives, which others
    need too.
    """
    program = chromium()
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program, args=OPTIONS, timeout=START_MILLISECONDS)
        yield launched
        launched.close()


PREFECTS_GRAPH = "Cannot read properties of null (reading 'position')"
"""Of the graph on Prefect's own page of a run, on a busy machine: it draws a node that is gone."""


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page of a person who has never been here. An error in a script on the page fails the test."""
    context = browser.new_context(
        viewport={"width": 1280, "height": 800}, color_scheme="light", reduced_motion="reduce"
    )
    context.set_default_timeout(PATIENCE_MILLISECONDS)
    errors: list[str] = []
    opened = context.new_page()
    opened.on("pageerror", lambda error: errors.append(str(error)))
    yield opened
    context.close()
    assert [error for error in errors if error != PREFECTS_GRAPH] == []


@pytest.fixture
def picture(request: pytest.FixtureRequest) -> Callable[[Page, str], None]:
    """Keeps what a page shows as NAME.png in the folder of --screenshots; does nothing without that option."""
    folder: Path | None = request.config.getoption("--screenshots")

    def keep(page: Page, name: str) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=folder / f"{name}.png")

    return keep
