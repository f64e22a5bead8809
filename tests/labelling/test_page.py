"""The page in a real browser: ten pairs by keyboard, and nothing a model wrote becomes markup."""

import json
import threading
from pathlib import Path

import pytest

from labelling.server import Session, serve, url
from labelling.votes import read_pairs, read_votes, shown_left
from tests.labelling.browser import Page, opened

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>&amp;"
KEYS = ["ArrowLeft", "ArrowRight", "ArrowDown", "s", "ArrowLeft", "t", "ArrowRight", "ArrowRight", "ArrowLeft", "ArrowDown"]


def press(page: Page, key: str, done: int) -> None:
    page.press(key)
    page.until(f"!busy && document.getElementById('count').textContent.startsWith('{done} of ')")


@pytest.mark.integration
def test_ten_pairs_are_labelled_by_keyboard_and_resumed(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i} {HOSTILE}", "response1": f"a{i} {HOSTILE}", "response2": f"b{i}\n{HOSTILE}", "seed": 1} for i in range(10)]
    rows[3]["prompt"] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": HOSTILE}, {"role": "user", "content": "r"}]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    votes = tmp_path / "votes.jsonl"
    with serve(Session(tmp_path / "pairs.jsonl", votes)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            with opened(url(server), tmp_path / "profile") as page:
                page.until("document.activeElement?.id === 'annotator'")
                for letter in "Ada":
                    page.press(letter)
                page.press("Enter")
                page.until("!document.getElementById('pair').hidden")
                assert page.value("document.getElementById('prompt').innerText") == rows[0]["prompt"]
                for done, key in enumerate(KEYS[:5], start=1):
                    press(page, key, done)
                page.picture(tmp_path / "page.png")
                page.call("Page.reload")
                page.until("document.getElementById('count').textContent.startsWith('5 of 10')")
                for done, key in enumerate(KEYS[5:], start=6):
                    press(page, key, done)
                assert page.value("document.getElementById('end').hidden") is False
                page.press("z")
                page.until("!busy && document.querySelector('.chosen')?.dataset.choice === 'tie'")
                press(page, "ArrowLeft", 10)
                assert page.value("document.title") == "Which reply is better?"
                assert page.value("document.images.length") == 0
        finally:
            server.shutdown()
            thread.join()
    chosen = {"ArrowLeft": "left", "ArrowRight": "right", "ArrowDown": "tie", "t": "tie", "s": "skip"}
    expected = []
    for pair, key in zip(read_pairs(tmp_path / "pairs.jsonl"), KEYS, strict=True):
        left = shown_left(pair, "Ada")
        expected.append({"left": left, "right": 3 - left, "tie": 0, "skip": None}[chosen[key]])
    found = read_votes(votes)
    assert [vote.vote for vote in found[:10]] == expected
    assert {vote.annotator for vote in found} == {"Ada"}
    assert (len(found), found[10].vote) == (11, found[10].left)
