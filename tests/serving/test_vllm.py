"""The real vLLM behind the front, where RLHF_VLLM names one."""

import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from config.child import VLLM_VARIABLE
from tests.serving.fronts import Served, made_export
from tests.training.support import tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which(os.environ.get(VLLM_VARIABLE, "")) is None, reason="RLHF_VLLM names no vLLM"),
]
PROMPTS = [f"hello , my kettle is cracked . order number {n} ." for n in range(24)]


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "WIDTH", 64)  # vLLM has no attention for heads below 32
        model = tiny.policy(3, "qwen3")
    return made_export(tmp_path_factory.mktemp("exports") / "first", model)


@pytest.fixture(scope="module")
def served(export: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    result = Served(tmp_path_factory.mktemp("front"), export, engine="vllm", queue=8)
    yield result
    assert result.end() == 0


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"]).replace("\ufffd", "")


def test_greedy_replies_are_those_of_transformers(served: Served, export: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForCausalLM.from_pretrained(export).eval()
    with ThreadPoolExecutor(8) as threads:
        result = list(threads.map(lambda each: text_of(served.ask(each, max_tokens=12)), PROMPTS))
    for prompt, reply in zip(PROMPTS, result, strict=True):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False, return_tensors="pt"
        )
        with torch.no_grad():
            tokens = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        assert reply == tokenizer.decode(tokens, skip_special_tokens=True).replace("\ufffd", "")


def test_its_words_its_limits_and_its_counts_pass_the_front(served: Served) -> None:
    history = [{"role": role, "content": "a ."} for role in ("user", "assistant", "user")]
    assert served.ask("hello", model="champion", max_tokens=1).status_code == 200
    refused = served.ask("", messages=history)
    assert (refused.status_code, "single prompts" in refused.text) == (400, True)
    with ThreadPoolExecutor(24) as threads:
        codes = {item.status_code for item in threads.map(served.ask, PROMPTS)}
    assert codes == {200, 429}
    body = {"messages": history[:1], "max_tokens": 5, "stream": True}
    with served.client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert '"usage"' not in "".join(lines)
    metrics = dict(
        line.rsplit(" ", 1) for line in served.client.get("/metrics").text.splitlines() if line.startswith("rlhf_")
    )
    assert float(metrics["rlhf_reply_tokens_total"]) > 5
    assert float(metrics["rlhf_time_to_first_token_seconds_count"]) == 1


def test_a_killed_engine_is_started_again(served: Served) -> None:
    (engine,) = served.engines("vllm")
    engine.kill()
    deadline, codes = time.monotonic() + 300, set()
    while (answer := served.ask("hello", max_tokens=3)).status_code != 200:
        codes.add((answer.status_code, answer.headers.get("Retry-After")))
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert codes == {(503, "1")}
