"""The page of `rlhf serve --page` in a real browser: a talk, thumbs by mouse and keyboard, and no word of others."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from config.workspace.feedback import FeedbackStore
from tests.serving.fronts import Served, made_export
from tests.training.support.tiny import policy

pytestmark = [pytest.mark.browser, pytest.mark.integration]

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><b>hello</b>"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("page")
    export = made_export(root / "run-1", policy(3, "qwen3"))
    result = Served(root, export, keep_days=1, page=True)
    yield result
    assert result.end() == 0


def said(served: Served) -> list[dict[str, Any]]:
    with closing(FeedbackStore(served.root)) as store:
        return list(store.rows())


def test_a_talk_is_rated_by_mouse_and_by_keyboard(
    served: Served, page: Page, picture: Callable[[Page, str], None]
) -> None:
    assert served.said[1] == f"Page    {served.url}/\n"
    page.goto(f"{served.url}/#key={served.key}")
    expect(page.locator("#model")).to_have_text("run-1")
    assert page.url == f"{served.url}/"  # the key is not left in the address
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type(HOSTILE)
    page.keyboard.press("Enter")
    first = page.locator(".assistant").first
    expect(first.get_by_label("Good reply")).to_be_visible()
    assert page.locator(".user").inner_text() == HOSTILE
    assert (page.locator("#turns img").count(), page.title()) == (0, "Try the model")
    first.get_by_label("Good reply").click()
    expect(first.get_by_role("status")).to_have_text("kept")
    expect(first.get_by_label("Good reply")).to_have_attribute("aria-pressed", "true")
    page.locator("#prompt").focus()
    page.keyboard.type("good morning")
    page.keyboard.press("Enter")
    second = page.locator(".assistant").nth(1)
    expect(second.get_by_label("Bad reply")).to_be_visible()
    page.keyboard.press("Alt+ArrowDown")
    expect(second.get_by_role("status")).to_have_text("kept")
    second.get_by_label("What is wrong with it").fill("makes no sense")
    page.keyboard.press("Enter")
    expect(second.get_by_label("Bad reply")).to_have_attribute("aria-pressed", "true")
    picture(page, "chat")
    reply = first.locator(".text").inner_text()
    rows = said(served)
    assert rows[0]["prompt"] == HOSTILE
    assert rows[0]["label"] is True
    assert rows[0]["completion"].split() == reply.split()
    assert (rows[1]["prompt"], rows[1]["label"]) == ("good morning", False)  # a model of single prompts
    with closing(FeedbackStore(served.root)) as store:
        assert store.summary()[0].reasons == ("makes no sense",)
    page.get_by_role("button", name="New conversation").click()
    assert page.locator("#turns").inner_text() == ""


def test_without_a_key_the_page_asks_for_it_and_a_wrong_one_opens_nothing(served: Served, page: Page) -> None:
    page.goto(f"{served.url}/")
    expect(page.get_by_label("Key", exact=True)).to_be_focused()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("the key is missing or wrong")
    page.get_by_label("Key", exact=True).fill(served.key)
    page.keyboard.press("Enter")
    expect(page.locator("#model")).to_have_text("run-1")
    page.reload()
    expect(page.locator("#model")).to_have_text("run-1")


def test_without_page_and_without_thumbs(served: Served, page: Page, tmp_path: Path) -> None:
    other = Served(tmp_path, served.root / "run-1", page=True)
    try:
        page.goto(f"{other.url}/#key={other.key}")
        page.keyboard.type("hello")
        expect(page.locator("#model")).to_have_text("run-1")
        page.locator("#prompt").fill("hello")
        page.keyboard.press("Enter")
        expect(page.locator("#main")).to_have_attribute("aria-busy", "false")
        expect(page.locator(".assistant")).to_have_count(1)
        expect(page.locator(".thumbs")).to_have_count(0)
        expect(page.locator("#keys")).to_be_hidden()
    finally:
        other.end()


ATTACK = """async ([url, id]) => {
  const word = JSON.stringify({id, rating: 'down', user: 'attacker'});
  const results = [];
  for (const options of [{}, {mode: 'no-cors'}, {headers: {'Content-Type': 'application/json'}}]) {
    try { results.push((await fetch(url + '/v1/feedback', {method: 'POST', body: word, ...options})).status) }
    catch (error) { results.push(error.name) }
  }
  await new Promise(done => {
    const frame = document.body.appendChild(Object.assign(document.createElement('iframe'), {name: 'hidden'}));
    const form = document.body.appendChild(document.createElement('form'));
    Object.assign(form, {method: 'POST', enctype: 'text/plain', target: 'hidden', action: url + '/v1/feedback'});
    const name = word.slice(0, -1) + ', "a": "';
    form.appendChild(Object.assign(document.createElement('input'), {name, value: '"}'}));
    frame.onload = done;
    form.submit();
  });
  const frame = document.body.appendChild(document.createElement('iframe'));
  frame.src = url + '/';
  await new Promise(done => frame.onload = done);
  return results;
}"""


class Elsewhere(BaseHTTPRequestHandler):
    """A page of somebody else."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><body>elsewhere</body>")

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def test_a_foreign_page_says_nothing_of_a_reply(served: Served, page: Page) -> None:
    identity = served.ask("hello", max_tokens=2).json()["id"]
    before = len(said(served))
    with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as elsewhere:
        thread = threading.Thread(target=elsewhere.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            page.goto(f"http://127.0.0.1:{elsewhere.server_port}/")
            results = page.evaluate(ATTACK, [served.url, identity])
        finally:
            elsewhere.shutdown()
            thread.join()
    assert 200 not in results
    assert len(said(served)) == before
    counted = served.client.get("/metrics").text
    assert 'rlhf_requests_total{path="/v1/feedback",status="403"}' in counted  # they did arrive
