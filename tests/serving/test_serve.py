"""The front and a real engine, as processes, on a small model."""

import asyncio
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch
from transformers import PreTrainedModel

from config.errors import EnvironmentFault
from config.ports import free_port
from config.workspace.served import served_of
from serving.engines import EngineGone, Part, Vllm
from serving.limits import Sampling
from serving.prompts import Prompt
from serving.settings import Settings
from tests.conftest import ROOT
from tests.serving.fronts import PROGRAM, Served, made_export
from tests.training.support.tiny import CONTEXT, policy, tokenizer
from training.export.package import gguf_path
from training.modeling.tokenizer import decode_response, encode_prompt

pytestmark = pytest.mark.integration
PROMPTS = [f"hello , my kettle is cracked . order number {n} ." for n in range(24)]


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {name: policy(seed, "qwen3") for name, seed in (("first", 3), ("second", 4))}


@pytest.fixture(scope="module")
def exports(
    models: dict[str, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("exports")
    return {name: made_export(root / name, model) for name, model in models.items()}


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(export: Path, **settings: Any) -> Served:
        started.append(Served(tmp_path, export, **settings))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.end()


@pytest.fixture(scope="module")
def shared(exports: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One front for the tests that leave it as it is."""
    made = Served(tmp_path_factory.mktemp("front"), exports["first"])
    yield made
    assert made.end() == 0


def offline(model: PreTrainedModel, prompt: str, max_tokens: int) -> str:
    ids = encode_prompt(tokenizer(), prompt)
    with torch.no_grad():
        tokens = model.generate(
            torch.tensor([ids]), max_new_tokens=max_tokens, do_sample=False,
            eos_token_id=tokenizer().eos_token_id, pad_token_id=tokenizer().pad_token_id,
        )  # fmt: skip
    return decode_response(tokenizer(), tokens[0, len(ids) :].tolist())


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    found: str = response.json()["choices"][0]["message"]["content"]
    return found


def test_requests_side_by_side_each_get_the_reply_that_transformers_gives(
    shared: Served, models: dict[str, PreTrainedModel]
) -> None:
    assert shared.said[0] == f"Serving first at {shared.url}/v1\n"
    assert shared.said[1] == "Key     in .rlhf/serve.key\n"
    with ThreadPoolExecutor(8) as threads:
        found = list(
            threads.map(lambda prompt: text_of(shared.ask(prompt, max_tokens=12)), PROMPTS)
        )
    assert found == [offline(models["first"], prompt, 12) for prompt in PROMPTS]
    assert len(set(found)) > 10


def test_a_streamed_reply_is_the_whole_one_in_pieces(shared: Served) -> None:
    body = {
        "messages": [{"role": "user", "content": PROMPTS[0]}],
        "temperature": 0, "max_tokens": 12, "stream": True,
    }  # fmt: skip
    with shared.client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    parts = [json.loads(line)["choices"][0] for line in lines]
    assert len(parts) > 3
    assert parts[-1]["finish_reason"] == "length"
    whole = text_of(shared.ask(PROMPTS[0], max_tokens=12))
    streamed = "".join(part["delta"]["content"] for part in parts).strip()
    # a model with random weights ends in half a character, which is not streamed
    assert streamed.replace("�", "") == whole.replace("�", "")


def test_a_streamed_reply_ends_with_its_tokens_if_asked_to(shared: Served) -> None:
    body = {
        "messages": [{"role": "user", "content": PROMPTS[0]}], "temperature": 0, "max_tokens": 12,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    with shared.client.stream("POST", "/v1/chat/completions", json=body) as response:
        chunks = [line.removeprefix("data: ") for line in response.iter_lines() if line][:-1]
    last = json.loads(chunks[-1])
    whole = shared.ask(PROMPTS[0], max_tokens=12).json()
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert 0 < last["timings"]["prompt_ms"] + last["timings"]["predicted_ms"] < 60_000
    assert "usage" not in json.loads(chunks[-2])


def test_the_front_prices_what_it_serves(
    front: Callable[..., Served], exports: dict[str, Path], tmp_path: Path
) -> None:
    made = front(exports["first"])
    for stream in (True, False):
        made.ask(PROMPTS[0], max_tokens=12, stream=stream)
    metrics = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in made.client.get("/metrics").text.splitlines()
        if line.startswith("llm_")
    }
    assert len(metrics) == 2 + 2 * 3
    model = 'model_name="assistant",model_version="first"'
    name = "llm_cost_per_million_tokens"
    assert all(model in key for key in metrics)
    by_phase = {
        phase: next(
            value
            for key, value in metrics.items()
            if key.startswith(name) and f'phase="{phase}"' in key and 'basis="allocation"' in key
        )
        for phase in ("", "prompt", "generation")
    }
    assert min(by_phase.values()) > 0
    assert made.end() == 0
    row = served_of(tmp_path, "first")
    assert row.tokens == 2 * (len(encode_prompt(tokenizer(), PROMPTS[0])) + 12)
    assert row.usd > 0


def test_a_completion_reads_its_prompt_as_chat_does(shared: Served) -> None:
    body = {"prompt": PROMPTS[1], "temperature": 0, "max_tokens": 12, "model": "first"}
    found = shared.client.post("/v1/completions", json=body).json()
    whole = shared.ask(PROMPTS[1], max_tokens=12).json()
    assert found["choices"][0]["text"] == whole["choices"][0]["message"]["content"]
    assert found["usage"] == whole["usage"]
    assert found["usage"]["prompt_tokens"] == len(encode_prompt(tokenizer(), PROMPTS[1]))


def test_the_key_is_shown_on_a_terminal(exports: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "wanted").write_text(str(exports["first"]))
    ours, theirs = pty.openpty()
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        str(tmp_path),
        "llama_cpp",
        str(free_port()),
        "1",
        "1",
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=theirs)
    try:
        with os.fdopen(ours, encoding="utf-8") as terminal:
            said = [terminal.readline(), terminal.readline()]
            key = (tmp_path / ".rlhf/serve.key").read_text()
            assert said[1].split() == ["Key", key, "(in", ".rlhf/serve.key)"]
    finally:
        process.terminate()
        process.wait(60)
        os.close(theirs)
    assert (tmp_path / ".rlhf/serve.key").stat().st_mode & 0o777 == 0o600


def test_the_openai_package_is_answered(shared: Served, models: dict[str, PreTrainedModel]) -> None:
    with httpx.Client(trust_env=False) as http:
        client = openai.OpenAI(base_url=f"{shared.url}/v1", api_key=shared.key, http_client=http)
        assert [model.id for model in client.models.list()] == ["first"]
        settings: dict[str, Any] = {
            "model": "first", "messages": [{"role": "user", "content": PROMPTS[2]}],
            "temperature": 0, "max_tokens": 12,
        }  # fmt: skip
        whole = client.chat.completions.create(**settings)
        assert whole.choices[0].message.content == offline(models["first"], PROMPTS[2], 12)
        assert whole.usage is not None
        assert 0 < whole.usage.completion_tokens <= 12
        parts = list(client.chat.completions.create(**settings, stream=True))
        streamed = "".join(part.choices[0].delta.content or "" for part in parts)
        assert streamed.replace("�", "") == str(whole.choices[0].message.content).replace("�", "")
        assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        text = client.completions.create(
            model="first", prompt=PROMPTS[2], temperature=0, max_tokens=12
        )
        assert text.choices[0].text == whole.choices[0].message.content
        with pytest.raises(openai.NotFoundError, match="gpt-5"):
            client.chat.completions.create(**{**settings, "model": "gpt-5"})
        with pytest.raises(openai.BadRequestError, match="max_tokens=-1"):
            client.chat.completions.create(**{**settings, "max_tokens": -1})
        wrong = client.with_options(api_key="wrong")
        with pytest.raises(openai.AuthenticationError, match="key is missing or wrong"):
            wrong.models.list()


def test_transformers_serves_what_has_no_gguf_file(
    front: Callable[..., Served], tmp_path: Path
) -> None:
    model = policy(6, "qwen3")
    folder = made_export(tmp_path / "plain", model)
    shutil.rmtree(folder / "gguf")
    served = front(folder, engine="transformers")
    whole = served.ask(PROMPTS[0], max_tokens=12)
    assert text_of(whole) == offline(model, PROMPTS[0], 12)
    assert whole.json()["usage"]["completion_tokens"] <= 12
    drawn = [
        text_of(served.ask(PROMPTS[0], temperature=1.5, seed=seed, max_tokens=12))
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert text_of(served.ask(PROMPTS[0], max_tokens=12)) == text_of(whole)
    body = {**SAY, "temperature": 0, "max_tokens": 12, "stream": True}
    with served.client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    parts = [json.loads(line)["choices"][0] for line in lines]
    streamed = "".join(part["delta"]["content"] for part in parts).strip()
    assert streamed.replace("�", "") == offline(model, "hello", 12).replace("�", "")
    assert parts[-1]["finish_reason"] in ("stop", "length")


def test_vllm_is_started_with_the_export_and_asked_by_token_ids(
    exports: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "vllm"
    command.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$0.said"\n')
    command.chmod(0o755)
    monkeypatch.setenv("RLHF_VLLM", str(command))
    engine = Vllm(exports["first"], Settings("vllm", "f32", 4, 1))
    with pytest.raises(EngineGone, match="vLLM could not load"):
        asyncio.run(engine.wait())
    said = (tmp_path / "vllm.said").read_text().splitlines()
    assert said[:2] == ["serve", str(exports["first"])]
    assert said[said.index("--max-model-len") + 1] == str(CONTEXT)
    sampling = Sampling(max_tokens=5, temperature=0.0, top_p=1.0, seed=None, stream=False)
    path, body = engine.request(Prompt("", [3, 4]), sampling)
    assert (path, body["prompt"], body["max_tokens"]) == ("/v1/completions", [3, 4], 5)
    ids = encode_prompt(tokenizer(), "hello")
    answer = {"choices": [{"text": "?", "token_ids": ids, "finish_reason": "stop"}]}
    assert engine.part(answer, 0, sampling) == Part(engine.prompts.text(ids), len(ids), "stop")


def test_an_engine_that_is_not_installed_is_refused_in_one_line(
    exports: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_VLLM", "/nowhere/vllm")
    with pytest.raises(EnvironmentFault, match=r"no command vllm \(/nowhere/vllm\)"):
        Vllm(exports["first"], Settings("vllm", "f32", 4, 1))


def test_a_seed_repeats_a_sampled_reply(shared: Served) -> None:
    drawn = [
        text_of(shared.ask(PROMPTS[0], temperature=1.5, seed=seed, max_tokens=12))
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


SAY = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    ("body", "headers", "status", "words"),
    [
        (SAY, {"Authorization": "Bearer wrong"}, 401, "the key is missing or wrong"),
        (SAY, {"Authorization": ""}, 401, "the key is missing or wrong"),
        (SAY, {"Host": "evil.example"}, 403, "Host 'evil.example' is not served here"),
        (SAY, {"Origin": "https://evil.example"}, 403, "may not use this server"),
        (b"{half", {}, 400, "the request is not JSON"),
        (b"[1]", {}, 400, "is a list; an object is needed"),
        (b"[" * 100_000, {}, 400, "the request is not JSON"),
        (b" " * (4 * 2**20 + 1), {}, 413, "over 4 MiB"),
        ({**SAY, "model": "gpt-5"}, {}, 404, "model='gpt-5' is not served here; first is"),
        ({**SAY, "max_tokens": -1}, {}, 400, "max_tokens=-1 must be a number from 1 to"),
        ({**SAY, "max_tokens": 10**9}, {}, 400, "max_tokens=1000000000 must be"),
        ({**SAY, "max_tokens": 1.5}, {}, 400, "max_tokens=1.5 must be"),
        ({**SAY, "temperature": "hot"}, {}, 400, "temperature='hot' must be"),
        ({**SAY, "temperature": float("nan")}, {}, 400, "temperature=nan must be"),
        ({**SAY, "n": 2}, {}, 400, "n=2 must be 1"),
        ({**SAY, "seed": "x"}, {}, 400, "seed='x' is not an integer"),
        ({**SAY, "stream": 1}, {}, 400, "stream=1 must be true or false"),
        ({**SAY, "stream_options": {"include_usage": True}}, {}, 400, "with stream: true"),
        ({**SAY, "stream": True, "stream_options": 3}, {}, 400, "stream_options=3 must be an obj"),
        ({"messages": []}, {}, 400, "messages must be a list of at least one"),
        ({"messages": [{"role": "user"}]}, {}, 400, "messages[0] needs a role and a text"),
        (
            {"messages": [{"role": "user", "content": "kettle " * 200}]}, {}, 400,
            f"the context of {CONTEXT} leaves no room for a reply",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_a_status_and_one_line(
    shared: Served, body: Any, headers: dict[str, str], status: int, words: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    found = shared.client.post("/v1/chat/completions", content=content, headers=headers)
    message = found.json()["error"]["message"]
    assert (found.status_code, "\n" in message) == (status, False)
    assert words in message
    assert shared.ask("hello", max_tokens=1).status_code == 200


def test_a_client_that_goes_away_ends_its_generation(shared: Served) -> None:
    body = {**SAY, "stream": True, "temperature": 5.0}
    with shared.client.stream("POST", "/v1/chat/completions", json=body) as response:
        next(response.iter_lines())
    deadline = time.monotonic() + 10
    while shared.at_work() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert shared.at_work() == 0


def test_more_than_the_queue_holds_is_told_to_come_again(
    front: Callable[..., Served], exports: dict[str, Path]
) -> None:
    served = front(exports["first"], slots=1, queue=0)
    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(lambda prompt: served.ask(prompt, temperature=9.0), PROMPTS))
    codes = {response.status_code for response in found}
    assert codes == {200, 429}
    refused = next(response for response in found if response.status_code == 429)
    assert refused.headers["Retry-After"] == "1"


def answered_after_restart(served: Served) -> httpx.Response:
    deadline = time.monotonic() + 20
    found = served.ask("hello", max_tokens=3)
    while found.status_code == 503 and time.monotonic() < deadline:
        assert found.headers["Retry-After"] == "1"
        time.sleep(0.1)
        found = served.ask("hello", max_tokens=3)
    assert found.status_code == 200
    return found


def test_an_engine_that_is_killed_is_started_again(
    front: Callable[..., Served], exports: dict[str, Path]
) -> None:
    served = front(exports["first"])
    (engine,) = served.engines()
    engine.kill()
    answered_after_restart(served)
    assert [one.pid for one in served.engines()] != [engine.pid]


def test_a_promotion_under_load_loses_no_request_and_mixes_none_up(
    front: Callable[..., Served], exports: dict[str, Path], models: dict[str, PreTrainedModel]
) -> None:
    served = front(exports["first"])
    expected = {
        (name, prompt): offline(model, prompt, 8)
        for name, model in models.items()
        for prompt in PROMPTS[:6]
    }
    seen: list[str] = []

    def ask(number: int) -> None:
        if number == 40:
            served.want(exports["second"])
        prompt = PROMPTS[number % 6]
        answer = served.ask(prompt, max_tokens=8)
        name = answer.json().get("model", answer.text)
        assert text_of(answer) == expected[name, prompt]
        seen.append(name)
        time.sleep(0.01)

    deadline, number = time.monotonic() + 30, 0
    with ThreadPoolExecutor(4) as threads:
        while len(set(seen)) < 2 and time.monotonic() < deadline:
            list(threads.map(ask, range(number, number + 50)))
            number += 50
    assert set(seen) == {"first", "second"}
    deadline = time.monotonic() + 10
    while len(served.engines()) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(served.engines()) == 1, "the old one is gone"


def test_a_successor_that_does_not_load_leaves_the_engine_at_work(
    front: Callable[..., Served], exports: dict[str, Path], tmp_path: Path
) -> None:
    served = front(exports["first"])
    broken = made_export(tmp_path / "broken", policy(5, "qwen3"))
    gguf_path(broken, "f32").write_bytes(b"half a file")
    served.want(broken)
    time.sleep(3)
    assert served.ask("hello", max_tokens=3).json()["model"] == "first"
    (engine,) = served.engines()
    engine.kill()
    assert answered_after_restart(served).json()["model"] == "first"


def test_sigterm_answers_what_is_at_work_and_ends_the_engine(
    front: Callable[..., Served], exports: dict[str, Path]
) -> None:
    served = front(exports["first"])
    (engine,) = served.engines()
    with ThreadPoolExecutor(1) as threads:
        reply = threads.submit(served.ask, "hello", temperature=9.0)
        time.sleep(0.05)
        served.process.send_signal(signal.SIGTERM)
        assert reply.result(60).status_code == 200
    assert served.end() == 0
    assert not engine.is_running()


def test_an_engine_does_not_outlive_a_front_that_is_killed(
    front: Callable[..., Served], exports: dict[str, Path]
) -> None:
    served = front(exports["first"])
    (engine,) = served.engines()
    served.process.kill()
    served.end()
    psutil.wait_procs([engine], timeout=10)
    assert not engine.is_running()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_engine_starts_ends_both(
    exports: dict[str, Path], tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "wanted").write_text(str(exports["first"]))
    arguments = (tmp_path, "transformers", free_port(), 1, 1)  # takes seconds to start
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, *map(str, arguments)], cwd=ROOT)
    deadline = time.monotonic() + 20
    while not (children := psutil.Process(process.pid).children()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.2)
    process.send_signal(number)
    assert process.wait(20) == 0
    psutil.wait_procs(children, timeout=10)
    assert not any(child.is_running() for child in children)


@pytest.mark.parametrize("what", ["port", "export", "file"])
def test_a_front_that_cannot_start_says_why_in_one_line(
    exports: dict[str, Path], shared: Served, tmp_path: Path, what: str
) -> None:
    folder, port = exports["first"], free_port()
    if what == "port":
        port, words = shared.port, f"port {shared.port} is in use"
    else:
        folder = made_export(tmp_path / "export", policy(5, "qwen3"))
        spoilt = folder / "tokenizer.json" if what == "export" else gguf_path(folder, "f32")
        spoilt.write_text("{")
        words = "is not a complete export" if what == "export" else "llama.cpp could not load"
    (tmp_path / "wanted").write_text(str(folder))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), "llama_cpp", str(port), "1", "1"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
