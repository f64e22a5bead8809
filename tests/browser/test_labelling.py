"""The labelling page in a real browser: ten pairs by keyboard, and nothing a model wrote becomes markup."""

import json
import threading
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from labelling.server import Session, serve, url
from labelling.votes import read_pairs, read_votes, shown_left

pytestmark = [pytest.mark.browser, pytest.mark.integration]

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>&amp;"
KEYS = [
    "ArrowLeft",
    "ArrowRight",
    "ArrowDown",
    "s",
    "ArrowLeft",
    "t",
    "ArrowRight",
    "ArrowRight",
    "ArrowLeft",
    "ArrowDown",
]


def press(page: Page, key: str, done: int) -> None:
    """Press a key and wait until the page shows the next pair: while it waits for the server, keys are not votes."""
    expect(page.locator("main")).to_have_attribute("aria-busy", "false")
    page.keyboard.press(key)
    expect(page.locator("#count")).to_contain_text(f"{done} of ")


def test_ten_pairs_are_labelled_by_keyboard_and_resumed(tmp_path: Path, page: Page) -> None:
    rows = [
        {"prompt": f"p{i} {HOSTILE}", "response1": f"a{i} {HOSTILE}", "response2": f"b{i}\n{HOSTILE}", "seed": 1}
        for i in range(10)
    ]
    rows[3]["prompt"] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": HOSTILE},
        {"role": "user", "content": "r"},
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    votes = tmp_path / "votes.jsonl"
    with serve(Session(tmp_path / "pairs.jsonl", votes)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            page.goto(url(server))
            expect(page.get_by_label("Your name")).to_be_focused()
            page.keyboard.type("Ada")
            page.keyboard.press("Enter")
            expect(page.locator("#prompt")).to_have_text(str(rows[0]["prompt"]))
            for done, key in enumerate(KEYS[:5], start=1):
                press(page, key, done)
            assert page.locator("#bar").evaluate("bar => bar.value / bar.max") == 0.5
            page.reload()
            expect(page.locator("#count")).to_contain_text("5 of 10")
            for done, key in enumerate(KEYS[5:], start=6):
                press(page, key, done)
            expect(page.locator("#end")).to_be_visible()
            page.keyboard.press("z")
            expect(page.locator(".chosen")).to_have_attribute("data-choice", "tie")
            press(page, "ArrowLeft", 10)
            assert page.title() == "Which reply is better?"
            assert page.locator("img").count() == 0
        finally:
            server.shutdown()
            thread.join()
    chosen = {"ArrowLeft": "left", "ArrowRight": "right", "ArrowDown": "tie", "t": "tie", "s": "skip"}
    expected = []
    for pair, key in zip(read_pairs(tmp_path / "pairs.jsonl"), KEYS, strict=True):
        remaining = shown_left(pair, "Ada")
        expected.append({"left": remaining, "right": 3 - remaining, "tie": 0, "skip": None}[chosen[key]])
    result = read_votes(votes)
    assert [vote.vote for vote in result[:10]] == expected
    assert {vote.annotator for vote in result} == {"Ada"}
    assert (len(result), result[10].vote) == (11, result[10].left)
