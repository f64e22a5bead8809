"""A headless Chromium at the end of a socket: just enough of its DevTools protocol to press keys and read a page."""

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

KEY_CODES = {"ArrowLeft": 37, "ArrowRight": 39, "ArrowDown": 40, "Enter": 13}


class Page:
    """A page that is open."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._sent = 0

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._sent += 1
        self._socket.send(json.dumps({"id": self._sent, "method": method, "params": params}))
        while (answer := json.loads(self._socket.recv(timeout=30))).get("id") != self._sent:
            pass
        assert "error" not in answer, answer
        return dict(answer["result"])

    def value(self, script: str) -> Any:
        """What a JavaScript expression gives."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until an expression is true; one that fails, as on a page that still loads, is not true yet."""
        end = time.monotonic() + 20
        while self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value") is not True:
            assert time.monotonic() < end, (script, self.value("document.body.innerText"))
            time.sleep(0.02)

    def press(self, key: str) -> None:
        text = {"text": "\r" if key == "Enter" else key} if len(key) == 1 or key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=KEY_CODES.get(key, ord(key[0].upper())), **text)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def opened(url: str, profile: Path) -> Iterator[Page]:
    """`url` in a browser of its own. Skips the test where there is no Chromium."""
    program = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("no Chromium on this machine, so nobody can press a key on the page")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0", "--window-size=1200,800"]
    command = [program, *options, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = _debugger(profile / "DevToolsActivePort", process)
        with connect(address, max_size=None) as socket:
            page = Page(socket)
            page.call("Page.navigate", url=url)
            yield page
            page.call("Browser.close")
        process.wait(timeout=20)
    finally:
        process.kill()
        process.wait()


def _debugger(port_file: Path, process: subprocess.Popen[bytes]) -> str:
    end = time.monotonic() + 60
    while not port_file.exists() or len(port_file.read_text().splitlines()) < 2:
        assert process.poll() is None, "Chromium ended before it answered"
        assert time.monotonic() < end, "Chromium did not start within a minute"
        time.sleep(0.05)
    port = port_file.read_text().splitlines()[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=20) as answer:
        return str(next(page["webSocketDebuggerUrl"] for page in json.load(answer) if page["type"] == "page"))
