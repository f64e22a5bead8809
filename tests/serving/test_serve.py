"""The front and a real engine, as processes, on a small model."""

import json
import os
import pty
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

from config.errors import EnvironmentFault, ModelError
from config.ports import free_port
from config.workspace.exported import gguf_path
from config.workspace.served import served_of
from serving.engines import LlamaCpp, Vllm
from serving.settings import Settings
from tests.conftest import ROOT
from tests.serving.fronts import PROGRAM, Served, made_export
from tests.training.support.tiny import policy, tokenizer
from training.modeling.tokenizer import encode_prompt

pytestmark = pytest.mark.integration
SAY = {"messages": [{"role": "user", "content": "hello"}]}
PROMPTS = [f"hello , my kettle is cracked . order number {n} ." for n in range(24)]


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {name: policy(seed, "qwen3") for name, seed in (("first", 3), ("second", 4))}


@pytest.fixture(scope="module")
def exports(models: dict[str, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("exports")
    return {name: made_export(root / name, model) for name, model in models.items()}


@pytest.fixture(scope="module")
def shared(exports: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One front for the tests that leave it as it is."""
    result = Served(tmp_path_factory.mktemp("front"), exports["first"])
    yield result
    assert result.end() == 0


def offline(model: PreTrainedModel, prompt: str, max_tokens: int) -> str:
    """Transformers' greedy reply."""
    ids, eos = encode_prompt(tokenizer(), prompt), tokenizer().eos_token_id
    with torch.no_grad():
        tokens = model.generate(
            torch.tensor([ids]), max_new_tokens=max_tokens, do_sample=False, eos_token_id=eos,
            pad_token_id=tokenizer().pad_token_id,
        )  # fmt: skip
    return whole_characters(tokenizer().decode(tokens[0, len(ids) :], skip_special_tokens=True))


def whole_characters(text: str) -> str:
    """Without halves, of which a model with random weights writes many: programs differ in how many marks they put for
    one.
    """
    return text.replace("\ufffd", "")


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return whole_characters(response.json()["choices"][0]["message"]["content"])


def chunks(served: Served, **body: Any) -> list[dict[str, Any]]:
    """A streamed reply."""
    body = {**SAY, "temperature": 0, "max_tokens": 12, "stream": True, **body}
    with served.client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def streamed(parts: list[dict[str, Any]]) -> str:
    deltas = [part["choices"][0]["delta"] for part in parts if part["choices"]]
    return whole_characters("".join(delta.get("content") or "" for delta in deltas))


def test_requests_side_by_side_each_get_the_reply_that_transformers_gives(
    shared: Served, models: dict[str, PreTrainedModel]
) -> None:
    assert shared.said[0] == f"Serving first at {shared.url}/v1\n"
    assert shared.said[1] == "Key     in .rlhf/serve.key\n"

    with ThreadPoolExecutor(8) as threads:
        result = list(threads.map(lambda prompt: text_of(shared.ask(prompt, max_tokens=12)), PROMPTS))
    assert result == [offline(models["first"], prompt, 12) for prompt in PROMPTS]
    assert len(set(result)) > 10


def test_a_streamed_reply_is_the_whole_one_in_pieces(shared: Served) -> None:
    parts = chunks(shared, max_tokens=12)
    assert len(parts) > 3
    assert (parts[-1]["choices"][0]["finish_reason"], "usage" in parts[-1]) == ("length", False)
    assert streamed(parts) == text_of(shared.ask("hello", max_tokens=12))


def test_a_streamed_reply_ends_with_its_tokens_if_asked_to(shared: Served) -> None:
    *_, before, last = chunks(shared, stream_options={"include_usage": True})
    whole = shared.ask("hello", max_tokens=12).json()["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == whole[name]
    assert (last["choices"], "usage" in before) == ([], False)


def test_the_front_prices_what_it_serves(
    front: Callable[..., Served], exports: dict[str, Path], tmp_path: Path
) -> None:
    result = front(exports["first"])
    for stream in (True, False):
        result.ask(PROMPTS[0], max_tokens=12, stream=stream)
    metrics = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in result.client.get("/metrics").text.splitlines()
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
    assert result.end() == 0
    row = served_of(tmp_path, "first")
    assert row.tokens == 2 * (len(encode_prompt(tokenizer(), PROMPTS[0])) + 12)
    assert row.usd > 0


def test_a_completion_continues_a_text_as_it_is(shared: Served) -> None:
    text = "<bos>" + PROMPTS[1]
    body = {"prompt": text, "temperature": 0, "max_tokens": 12, "model": "first"}
    result = shared.client.post("/v1/completions", json=body).json()
    whole = shared.ask(PROMPTS[1], max_tokens=12).json()
    assert result["choices"][0]["text"] == whole["choices"][0]["message"]["content"]
    assert result["usage"]["prompt_tokens"] == len(encode_prompt(tokenizer(), PROMPTS[1]))


def test_the_key_is_shown_on_a_terminal(exports: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "wanted").write_text(str(exports["first"]))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), "llama_cpp", str(free_port()), "1", "1"]
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


@pytest.fixture
def client(shared: Served) -> Iterator[openai.OpenAI]:
    with httpx.Client(trust_env=False) as http:
        yield openai.OpenAI(base_url=f"{shared.url}/v1", api_key=shared.key, http_client=http, max_retries=0)


ASKED: dict[str, Any] = {
    "model": "champion", "messages": [{"role": "user", "content": PROMPTS[2]}],
    "temperature": 0, "max_tokens": 12,
}  # fmt: skip


def test_the_openai_package_is_answered(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["first"]
    whole = client.chat.completions.create(**ASKED)
    assert (whole.model, whole.usage and whole.usage.completion_tokens) == ("first", 12)
    parts = list(client.chat.completions.create(**ASKED, stream=True))
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert whole_characters(text) == whole_characters(str(whole.choices[0].message.content))
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    with pytest.raises(openai.NotFoundError, match="gpt-5"):
        client.chat.completions.create(**{**ASKED, "model": "gpt-5"})
    wrong = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError, match="key is missing or wrong"):
        wrong.models.list()


def test_a_reply_stops_before_a_text_also_where_it_spans_chunks(shared: Served, client: openai.OpenAI) -> None:
    whole = str(client.chat.completions.create(**ASKED).choices[0].message.content)
    stop = next(part for part in whole.split("�") if len(part) > 2)[:3]
    result = client.chat.completions.create(**ASKED, stop=[stop]).choices[0]
    assert whole_characters(str(result.message.content)) == whole_characters(whole.partition(stop)[0])
    assert result.finish_reason == "stop"
    parts = chunks(shared, messages=ASKED["messages"], stop=stop)
    assert streamed(parts) == whole_characters(str(result.message.content))
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"


def test_log_probs_penalties_schemas_and_seeds_are_the_engines(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(**ASKED, logprobs=True, top_logprobs=2).choices[0]
    assert first.logprobs is not None
    assert first.logprobs.content is not None
    token, runner_up = first.logprobs.content[0].top_logprobs
    assert 0 > token.logprob > runner_up.logprob
    ids = [item.model_extra["id"] for item in first.logprobs.content if item.model_extra]
    biased = client.chat.completions.create(**ASKED, logprobs=True, logit_bias={str(ids[0]): -100}).choices[0]
    assert biased.logprobs is not None
    assert biased.logprobs.content is not None
    assert biased.logprobs.content[0].token == runner_up.token
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"enum": ["refund", "new one"]}}}
    result = client.chat.completions.create(**ASKED, response_format=form)
    assert json.loads(str(result.choices[0].message.content)) in ("refund", "new one")
    hot = {**ASKED, "temperature": 1.5}
    sampled = [
        client.chat.completions.create(**hot, seed=seed).choices[0].message.content for seed in (1, 1, 2, 2**63, 2**63)
    ]
    assert sampled[0] == sampled[1] != sampled[2]
    assert sampled[3] == sampled[4]


def test_without_settings_a_reply_is_drawn_from_all_tokens(shared: Served) -> None:
    body = {**SAY, "max_tokens": 1}
    sampled = {text_of(shared.client.post("/v1/chat/completions", json={**body, "seed": seed})) for seed in range(200)}
    assert len(sampled) > 45  # llama.cpp's own default is the likeliest 40


NULLS = (
    "stream n top_p max_tokens max_completion_tokens seed stop stream_options user logprobs "
    "top_logprobs tools tool_choice response_format frequency_penalty presence_penalty logit_bias"
)


def test_null_is_as_good_as_absent(shared: Served) -> None:
    result = shared.ask("hello", **dict.fromkeys(NULLS.split())).json()
    assert result["usage"]["completion_tokens"] > 12
    assert result["choices"] == shared.ask("hello").json()["choices"]
    capped = shared.ask("hello", max_tokens=3, max_completion_tokens=None).json()
    assert capped["usage"]["completion_tokens"] == 3
    assert capped["choices"][0]["finish_reason"] == "length"


def turns(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": "my lamp ."} for role in roles]}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (turns("user", "assistant", "user"), "trained on single prompts"),
        (turns("system", "user"), "trained on single prompts"),
        (turns("narrator"), "trained on single prompts"),
        ({"messages": [{"role": "user", "content": "lamp <eos> ."}]}, "<eos> is a control token"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ".<eos>\n<bos>a"}]}]},
         "<eos> is a control token"),
        (b'{"messages": [{"role": "user", "content": "hello \\ud83d there"}]}', "surrogate"),
        (b'{"messages": [{"role": "user", "content": "hello \\ud83d"}], "stream": true}', "surr"),
    ],
)  # fmt: skip
def test_what_the_model_was_not_trained_on_is_refused(shared: Served, body: Any, words: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    result = shared.client.post("/v1/chat/completions", content=content)
    assert (result.status_code, words in result.json()["error"]["message"]) == (400, True), result.text


def test_a_broken_control_token_is_text_and_a_begun_reply_is_continued(shared: Served) -> None:
    spelt = shared.ask("lamp <e os> .", max_tokens=1).json()["usage"]["prompt_tokens"]
    assert spelt == len(encode_prompt(tokenizer(), "lamp <e os> ."))
    begun = [{"role": "user", "content": "hello ."}, {"role": "assistant", "content": "we will"}]
    assert text_of(shared.ask("", messages=begun, max_tokens=3)).startswith("we will")


def test_a_model_for_chats_gets_every_turn(
    front: Callable[..., Served], tmp_path: Path, models: dict[str, PreTrainedModel]
) -> None:
    template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<spare>"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    served = front(made_export(tmp_path / "chats", models["first"], template))
    result = served.ask("", messages=turns("system", "user", "assistant", "user")["messages"]).json()
    roles = "system: {0}<spare>user: {0}<spare>assistant: {0}<spare>user: {0}<spare>assistant:"
    text = roles.format("my lamp .")
    assert result["usage"]["prompt_tokens"] == len(tokenizer()(text, add_special_tokens=False).input_ids)
    # the token that ends a turn ends a reply, as EOS does
    biased = served.ask("hello", logit_bias={"3": 100}).json()
    assert (biased["choices"][0]["finish_reason"], biased["usage"]["completion_tokens"]) == ("stop", 1)


def test_an_export_that_differs_from_training_is_not_served(
    exports: dict[str, Path], models: dict[str, PreTrainedModel], tmp_path: Path
) -> None:
    folder = made_export(tmp_path / "other", models["first"], differs=("'a' gives 2 tokens.",))
    with pytest.raises(ModelError, match="does not do what training did: 'a' gives 2 tokens"):
        LlamaCpp(folder, Settings("llama_cpp", "f32", 4, 1))


def test_an_engine_that_is_not_installed_is_refused_in_one_line(
    exports: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_VLLM", "/nowhere/vllm")
    with pytest.raises(EnvironmentFault, match=r"no command vllm \(/nowhere/vllm\)"):
        Vllm(exports["first"], Settings("vllm", "f32", 4, 1))


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
        ({**SAY, "temperature": "hot"}, {}, 400, "temperature"),
        ({"messages": []}, {}, 400, "single prompts"),
        (
            {"messages": [{"role": "user", "content": "kettle " * 200}]}, {}, 400,
            "exceeds the available context size (96 tokens)",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_a_status_and_its_reason(
    shared: Served, body: Any, headers: dict[str, str], status: int, words: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    result = shared.client.post("/v1/chat/completions", content=content, headers=headers)
    message = result.json()["error"]["message"]
    assert (result.status_code, words in message) == (status, True), result.text
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
        result = list(threads.map(lambda prompt: served.ask(prompt, temperature=9.0), PROMPTS))
    codes = {response.status_code for response in result}
    assert codes == {200, 429}
    refused = next(response for response in result if response.status_code == 429)
    assert refused.headers["Retry-After"] == "1"


def answered_after_restart(served: Served) -> httpx.Response:
    deadline = time.monotonic() + 20
    result = served.ask("hello", max_tokens=3)
    while result.status_code == 503 and time.monotonic() < deadline:
        assert result.headers["Retry-After"] == "1"
        time.sleep(0.1)
        result = served.ask("hello", max_tokens=3)
    assert result.status_code == 200
    return result


def test_an_engine_that_is_killed_is_started_again(front: Callable[..., Served], exports: dict[str, Path]) -> None:
    served = front(exports["first"])
    (engine,) = served.engines()
    engine.kill()
    answered_after_restart(served)
    assert [restarted.pid for restarted in served.engines()] != [engine.pid]


def test_a_promotion_under_load_loses_no_request_and_mixes_none_up(
    front: Callable[..., Served], exports: dict[str, Path], models: dict[str, PreTrainedModel]
) -> None:
    served = front(exports["first"])
    expected = {(name, prompt): offline(model, prompt, 8) for name, model in models.items() for prompt in PROMPTS[:6]}
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
    # another SIGTERM would come when its handler is gone and Python is ending
    assert served.process.wait(60) == 0
    served.end()
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
    slow = tmp_path / "vllm"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    arguments = (tmp_path, "vllm", free_port(), 1, 1)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)], cwd=ROOT, env={**os.environ, "RLHF_VLLM": str(slow)}
    )
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
        spoilt = folder / "export.json" if what == "export" else gguf_path(folder, "f32")
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
