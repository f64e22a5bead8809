"""`rlhf bench` on a real front, and on endpoints that are dead, slow or no API at all."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from cli.main import app
from config.compose import compose
from config.errors import EnvironmentFault
from config.load import dump, read, validate
from config.ports import free_port
from config.workspace.benchmarked import Limits
from serving.bench.endpoint import ChatEndpoint
from serving.bench.loads import LoadSpec, measure
from tests.conftest import ROOT
from tests.serving.fronts import Served, made_export
from tests.training.support.tiny import policy, settings, tokenizer
from training.modeling.models import base_model

pytestmark = pytest.mark.integration
PROMPTS = [f"hello , my kettle number {n} is cracked ." for n in range(50)]
PAYLOADS = [
    {"messages": [{"role": "user", "content": prompt}], "max_tokens": 24, "temperature": 1.0} for prompt in PROMPTS
]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("front")
    result = Served(root, made_export(root / "model", policy(3, "qwen3")), slots=8)
    yield result
    assert result.end() == 0


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    content = compose(read(ROOT / "recipes/demo.yaml"), {}, ["evaluate.max_new_tokens=24"])
    (tmp_path / "params.yaml").write_text(dump(validate(content, "demo")))
    prepared = tmp_path / "data/prepared/prompts"
    prepared.mkdir(parents=True)
    (prepared / "test.jsonl").write_text("".join(f'{{"prompt": "{p}"}}\n' for p in PROMPTS))
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def outside(url: str, key: str, clients: int, seconds: float) -> float:
    """Output tokens a second by a client of its own."""
    tokens, began = 0, time.perf_counter()
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(headers=headers, timeout=60, trust_env=False) as client:

        async def work(place: int) -> None:
            nonlocal tokens
            while time.perf_counter() < began + seconds:
                place += 1
                body = PAYLOADS[place % len(PAYLOADS)] | {"stream": True, "stream_options": {"include_usage": True}}
                async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
                    parts = [line async for line in answer.aiter_lines() if '"usage"' in line]
                tokens += json.loads(parts[-1].removeprefix("data: "))["usage"]["completion_tokens"]

        await asyncio.gather(*(work(7 * place) for place in range(clients)))
    return tokens / (time.perf_counter() - began)


@pytest.mark.slow  # compares speeds
def test_an_outside_client_measures_the_same_rate(tmp_path: Path) -> None:
    tiny = settings("qwen3")
    assert tiny.random is not None
    wide = tiny.random.model_copy(update={"width": 512, "layers": 8, "heads": 8, "kv_heads": 8, "mlp_width": 1536})
    model = base_model(tiny.model_copy(update={"random": wide}), tokenizer(), seed=3)
    # large, so that the engine is busy and not its clients
    front = Served(tmp_path, made_export(tmp_path / "large", model), slots=8)
    endpoint = ChatEndpoint(f"{front.url}/v1", "large", front.key, 60.0)
    ratios = []
    for _ in range(3):  # pairs, as the machine's pace changes
        before = asyncio.run(outside(front.url, front.key, 4, 6.0))
        load = next(measure(endpoint, [LoadSpec(4)], PAYLOADS, 6.0, Limits()))
        after = asyncio.run(outside(front.url, front.key, 4, 6.0))
        assert load.failed == 0
        ratios.append(2 * load.tokens_per_second / (before + after))
    endpoint.stop()
    assert front.end() == 0
    assert sorted(ratios)[1] == pytest.approx(1.0, abs=0.1)


def test_a_closed_loop_measures_a_real_server(front: Served) -> None:
    endpoint = ChatEndpoint(f"{front.url}/v1", "model", front.key, 60.0)
    load = next(measure(endpoint, [LoadSpec(3)], PAYLOADS, 1.5, Limits()))
    endpoint.stop()
    assert load.failed == 0
    assert load.requests > 3
    assert load.tpot_ms is not None
    assert load.ttft_ms is not None
    assert 10 < load.usage.output_tokens / (load.replies_per_second * load.seconds) < 24.001  # at most 24 each
    assert load.usage.prefill_seconds > 0  # llama.cpp's own


def test_a_closed_loop_keeps_its_requests_at_work() -> None:
    handler = type("Paced", (Strange,), {"way": "slow", "pace_seconds": 0.15})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = ChatEndpoint(f"http://127.0.0.1:{server.server_port}/v1", "model", None, 60.0)
    load = next(measure(endpoint, [LoadSpec(3)], PAYLOADS, 4.0, Limits()))
    endpoint.stop()
    server.shutdown()
    server.server_close()
    # Little's law: running requests = rate x time of a reply. The server sleeps for most of that time, so that a busy
    # machine changes neither much.
    assert load.failed == 0
    assert load.ttft_ms is not None
    assert load.replies_per_second * 4 * 0.15 == pytest.approx(3, rel=0.4)
    assert load.ttft_ms.p50 == pytest.approx(150, rel=0.5)


def test_requests_arrive_at_their_rate_whatever_is_at_work(front: Served) -> None:
    endpoint = ChatEndpoint(f"{front.url}/v1", "model", front.key, 60.0)
    load = next(measure(endpoint, [LoadSpec(requests_per_second=20.0)], PAYLOADS, 2.0, Limits()))
    endpoint.stop()
    assert load.failed == 0
    assert load.requests == pytest.approx(40, abs=25)  # Poisson
    assert load.usage.busy_seconds < load.usage.wall_seconds


def test_clients_share_the_prompts_and_wait_for_arrivals() -> None:
    endpoint = ChatEndpoint("http://127.0.0.1:1/v1", "model", None, 1.0)
    endpoint.send_in_turn(PAYLOADS[:3])
    sent = [endpoint.prepare_payload(PAYLOADS[9])["messages"] for _ in range(4)]
    assert sent == [PAYLOADS[place]["messages"] for place in (0, 1, 2, 0)]
    began = time.perf_counter()
    endpoint.send_in_turn(PAYLOADS[:3], [began + 0.3])
    assert endpoint.prepare_payload({})["messages"] == PAYLOADS[0]["messages"]
    assert 0.3 <= time.perf_counter() - began < 1
    endpoint.stop()


def test_the_record_has_every_load_and_the_knee(front: Served, project: Path) -> None:
    result = bench(front, "--concurrency", "1,2", "--rate", "5", "--seconds", "1.5")
    assert [(load["concurrency"], load["requests_per_second"]) for load in result["loads"]] == [
        (1, None), (2, None), (None, 5.0),
    ]  # fmt: skip
    for load in result["loads"]:
        assert load["failed"] == 0
        price = load["price"]["allocation"]
        hourly = 0.10 / 3600
        tokens = load["tokens_per_second"] + load["input_tokens_per_second"]
        assert load["usd_per_million_tokens"] == pytest.approx(1e6 * hourly / tokens)
        assert price["blended"] == load["usd_per_million_tokens"]
        assert {"p50", "p95", "p99"} == set(load["ttft_ms"]) == set(load["tpot_ms"])
    assert result["knee"]["concurrency"] in (1, 2)
    assert (result["engine"], result["weights"], result["slots"]) == ("llama_cpp", "f32", 8)
    assert result["loads"][0]["planned_tokens_per_second"] is None  # no run of this project
    assert result["interrupted"] is False


def bench(front: Served, *options: str) -> Any:
    result = CliRunner(env={"RLHF_SERVE_KEY": front.key}).invoke(
        app, ["bench", front.url, "--json", *options], catch_exceptions=False
    )
    assert result.exit_code == 0
    return json.loads(result.stdout)


def test_the_keys_and_the_rates_that_cannot_be_are_refused(front: Served, project: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"refuses the key \(HTTP 401\)"):
        CliRunner(env={"RLHF_SERVE_KEY": "wrong"}).invoke(app, ["bench", front.url], catch_exceptions=False)


def test_ctrl_c_keeps_the_loads_that_were_measured(front: Served, project: Path) -> None:
    command = [sys.executable, "-m", "cli.main", "bench", front.url, "--json"]
    command += ["--concurrency", ",".join(map(str, range(1, 41))), "--seconds", "2"]
    environment = {**os.environ, "RLHF_SERVE_KEY": front.key, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, cwd=project, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    first = process.stderr.readline()
    assert first.startswith("concurrency 1: ")
    time.sleep(0.7)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 60  # the other loads take 80 s
    assert process.returncode == 130
    content = json.loads(out)
    assert [load["concurrency"] for load in content["loads"]] == [1]
    assert content["interrupted"] is True
    assert "Traceback" not in err
    assert "stopped" in err


class Strange(BaseHTTPRequestHandler):
    """An endpoint that is wrong in one of many ways."""

    way = ""
    pace_seconds = 0.5
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.way == "html":
            return self.answer(200, "text/html", b"<html>hello</html>")
        if self.way == "404":
            return self.answer(404, "application/json", b'{"detail": "Not BenchResult"}')
        if self.way == "401":
            return self.answer(401, "application/json", b"{}")
        return self.answer(200, "application/json", b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.way == "no_stream":
            return self.answer(200, "application/json", b'{"choices": []}')
        if self.way == "refuses":
            body = b'{"error": {"message": "max_tokens is too large."}}'
            return self.answer(400, "application/json", body)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for _ in range(4):
            time.sleep(self.pace_seconds)
            self.wfile.write(b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n')
        self.wfile.write(b"data: [DONE]\n\n")
        return None

    def answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("dead", "does not answer"),
        ("401", r"refuses the key \(HTTP 401\)\. Set RLHF_SERVE_KEY"),
        ("404", "HTTP 404. Is it the API"),
        ("html", "it is not an OpenAI-compatible API"),
        ("no_stream", "does not stream a reply"),
        ("refuses", "HTTP 400: max_tokens is too large"),
        ("slow", "needs about 1[234] s for a reply of 24 tokens, and a load lasts 10 s. Set"),
    ],
)
def test_an_endpoint_that_cannot_be_measured_gives_one_line(way: str, told: str, project: Path) -> None:
    port = free_port()
    if way != "dead":
        handler = type("Way", (Strange,), {"way": way})
        server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(EnvironmentFault, match=told) as raised:
            CliRunner().invoke(app, ["bench", f"http://127.0.0.1:{port}/v1"], catch_exceptions=False)
        assert "\n" not in str(raised.value)
    finally:
        if way != "dead":
            server.shutdown()
            server.server_close()


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--concurrency=0", "--concurrency=0 is out of range: whole numbers from 1 to 1024"),
        ("--concurrency=two", "--concurrency=two is out of range"),
        ("--rate=-1", "--rate=-1 is out of range: numbers from 0.01 to 1000"),
        ("--concurrency=", "there is no load to measure"),
    ],
)
def test_a_load_that_cannot_be_is_refused(option: str, told: str, project: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "http://127.0.0.1:1", option])
    assert told in str(result.exception)
