"""Load on `rlhf serve`: is a request lost or mixed up, what does the front cost beside the engine alone, and what do
clients see of a promotion and of an engine that is killed?

    python -m benchmarks.serve_load --requests 2000 --concurrency 32 --json
    python -m benchmarks.serve_load --promote RUN --json
    python -m benchmarks.serve_load --feedback --json

Run it in a project that has run. Each greedy reply to a held-out prompt must be the one that Transformers gives with
the model that answered. `engine_rate` is that of the same client on the engine without the front, `share_of_engine`
the median ratio of blocks in turn; `added_ms_median` compares single requests.
With --promote the champion is served. RUN is promoted (`rlhf promote`) under load, then `rlhf rollback` brings the
champion back, then the engine is killed, each during --requests or more.
With --feedback every reply is rated, and the server is killed with SIGKILL half way: words that were answered with 200
and are not in the store are lost, and those that are there twice are double.
"""

import argparse
import asyncio
import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that it runs as a file, too

import httpx
import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cli.commands.export import exported
from cli.run_models import CHAMPION, run_id_of
from config import jsonl
from config.ports import free_port
from config.workspace.exported import gguf_path, read_exported
from config.workspace.feedback import FEEDBACK
from config.workspace.login import SERVE_KEY
from serving.settings import QUEUE
from training.export.llama_cpp import SLOTS, serving

MAX_TOKENS = 48
BLOCKS = 4
SINGLES = 100
"""Requests of each side for the time that the front adds."""

Ask = Callable[[int], Awaitable[str]]
"""Asks the prompt of that number, and gives the text of the reply."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", default="last", help="a run, or champion (default last)")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--promote", metavar="RUN", help="measure a promotion, and a kill")
    parser.add_argument("--feedback", action="store_true", help="rate every reply, and kill the server")
    parser.add_argument("--json", action="store_true", help="print JSON, not lines")
    given = parser.parse_args()
    if not 1 <= given.concurrency <= SLOTS + QUEUE:
        parser.error(f"--concurrency must be 1 to {SLOTS + QUEUE}: the front refuses more")
    completed = asyncio.run(
        swapped(given.promote, given.requests, given.concurrency)
        if given.promote
        else rated(given.run, given.requests, given.concurrency)
        if given.feedback
        else measured(given.run, given.requests, given.concurrency)
    )
    if given.json:
        print(json.dumps(completed, indent=2))
    else:
        for name, value in completed.items():
            print(f"{name:<18} {value:.4g}" if isinstance(value, float) else f"{name:<18} {value}")


def rlhf(*words: str) -> list[str]:
    return [str(Path(sys.executable).with_name("rlhf")), *words]


def held_out() -> list[str]:
    return [row["prompt"] for row in jsonl.plain(Path("data/prepared/prompts/test.jsonl"))][:200]


class Served(NamedTuple):
    """`rlhf serve` of a run, and a client of it."""

    process: "subprocess.Popen[bytes]"
    client: httpx.AsyncClient
    up_seconds: float
    """From the command to /health."""


async def reply(client: httpx.AsyncClient, prompt: str) -> tuple[str, str]:
    """The model that answered, and its reply."""
    message = {"role": "user", "content": prompt}
    body = {"messages": [message], "temperature": 0, "max_tokens": MAX_TOKENS}
    answer = await client.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    content = answer.json()
    return content["model"], content["choices"][0]["message"]["content"]


@asynccontextmanager
async def served(run: str, *options: str) -> AsyncIterator[Served]:
    port = free_port()
    began = time.monotonic()
    process = subprocess.Popen(rlhf("serve", run, "--port", str(port), *options), stdout=subprocess.DEVNULL)
    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False)
    try:
        while not await is_up(client):
            if process.poll() is not None or time.monotonic() > began + 60:
                raise SystemExit("rlhf serve is not up after a minute")
            await asyncio.sleep(0.02)
        client.headers["Authorization"] = f"Bearer {SERVE_KEY.read_text()}"
        yield Served(process, client, time.monotonic() - began)
    finally:
        process.terminate()
        process.wait(60)
        await client.aclose()


async def measured(run: str, requests: int, concurrency: int) -> dict[str, Any]:
    """Load on the front and on the engine alone."""
    folder, prompts = exported(Path.cwd(), run), held_out()
    expected, length = offline(folder, prompts), read_exported(folder).context_length
    with serving(gguf_path(folder, "f32"), length, SLOTS + QUEUE) as (address, key):
        headers = {"Authorization": f"Bearer {key}"}
        alone = httpx.AsyncClient(base_url=address, headers=headers, timeout=120, trust_env=False)
        async with alone, served(folder.name) as front:

            async def by_front(number: int) -> str:
                return (await reply(front.client, prompts[number % len(prompts)]))[1]

            async def by_engine(number: int) -> str:
                return (await reply(alone, prompts[number % len(prompts)]))[1]

            await load(by_front, requests // 10, concurrency)  # warm, for memory too
            before = memory(front.process.pid)
            replies, rates = [], []
            for _ in range(BLOCKS):  # in turn, as the machine's pace changes
                block, rate = await load(by_front, requests // BLOCKS, concurrency)
                replies.append(block)
                rates.append((rate, (await load(by_engine, requests // BLOCKS, concurrency))[1]))
            growth = memory(front.process.pid) / before - 1
            # in blocks: threads of an engine spin for a while after a reply, on the other's cores
            sides = (by_front, by_engine) * 2
            singles = [median([await seconds(ask, number) for number in range(SINGLES)]) for ask in sides]
    wrong = [
        reply
        for block in replies
        for number, reply in enumerate(block)
        if reply is not None and reply != expected[number % len(expected)]
    ]
    return {
        "requests": sum(map(len, replies)),
        "concurrency": concurrency,
        "failed": sum(block.count(None) for block in replies),
        "mixed_up": len(wrong),
        "rate": median([rate for rate, _ in rates]),
        "engine_rate": median([alone for _, alone in rates]),
        "share_of_engine": median([rate / alone for rate, alone in rates]),
        "added_ms_median": 1000 * (singles[0] - singles[1] + singles[2] - singles[3]) / 2,
        "rss_growth": growth,
        "up_seconds": front.up_seconds,
    }


class Answer(NamedTuple):
    """To one request under load."""

    time: float
    model: str
    """Empty if the request failed."""
    is_right: bool
    says_when: bool
    """It failed with 503 and Retry-After."""


async def rated(run: str, requests: int, concurrency: int) -> dict[str, Any]:
    """Every reply is rated by a user of its own, with a kill of the server half way."""
    prompts, answered, seconds_of = held_out(), set[tuple[str, str]](), list[float]()

    async def work(front: Served, numbers: Iterator[int], until: int) -> None:
        for number in numbers:
            user = f"user {number}"
            body = {"messages": [{"role": "user", "content": prompts[number % len(prompts)]}], "max_tokens": 8}
            try:
                identity = (await front.client.post("/v1/chat/completions", json=body)).json()["id"]
                began = time.perf_counter()
                said = await front.client.post("/v1/feedback", json={"id": identity, "rating": "up", "user": user})
                seconds_of.append(time.perf_counter() - began)
                if said.status_code == 200:
                    answered.add((user, identity))
            except (httpx.TransportError, KeyError, ValueError):
                return
            if len(answered) >= until:
                front.process.kill()

    numbers = iter(range(requests))
    for until in (requests // 2, 2 * requests):
        async with served(run, "--keep-replies", "1") as front:
            await asyncio.gather(*(work(front, numbers, until) for _ in range(concurrency)))
    with closing(sqlite3.connect(FEEDBACK)) as store:
        kept = store.execute("SELECT user, reply FROM words WHERE user LIKE 'user %'").fetchall()
    return {
        "requests": requests,
        "rated": len(answered),
        "lost": len(answered - set(kept)),
        "double": len(kept) - len(set(kept)),
        "rating_ms_median": 1000 * median(seconds_of),
    }


async def swapped(run: str, requests: int, concurrency: int) -> dict[str, Any]:
    """A promotion, a rollback and a kill, each under a load of its own."""
    prompts = held_out()
    before, after = (run_id_of(Path.cwd(), name) for name in (CHAMPION, run))
    expected = {name: offline(exported(Path.cwd(), name), prompts) for name in (before, after)}
    async with served(CHAMPION) as front:

        async def under_load(model: str) -> list[Answer]:
            """At least `requests` answers, and until one is the model's."""
            answers: list[Answer] = []

            async def ask(number: int) -> str:
                prompt = number % len(prompts)
                try:
                    name, text = await reply(front.client, prompts[prompt])
                except httpx.HTTPStatusError as error:
                    response = error.response
                    says_when = response.status_code == 503 and "Retry-After" in response.headers
                    answers.append(Answer(time.monotonic(), "", False, says_when))
                    await asyncio.sleep(0.05)
                    return ""
                is_right = text == expected[name][prompt]
                answers.append(Answer(time.monotonic(), name, is_right, False))
                return text

            deadline = time.monotonic() + 120
            while not any(answer.model == model for answer in answers[-concurrency:]):
                if time.monotonic() > deadline:
                    raise SystemExit(f"{model} does not answer after two minutes")
                await load(ask, requests, concurrency)
            return answers

        result: dict[str, Any] = {"up_seconds": front.up_seconds}
        for command, model in ((["promote", run, "--yes"], after), (["rollback", "--yes"], before)):
            began = time.monotonic()
            decision = subprocess.Popen(rlhf(*command, "--why", "benchmarks.serve_load"))
            answers = await under_load(model)
            decision.wait()
            result |= counted(command[0], answers)
            result[f"{command[0]}_seconds"] = min(answer.time for answer in answers if answer.model == model) - began
        began = time.monotonic()
        for child in psutil.Process(front.process.pid).children():
            child.kill()
        answers = await under_load(before)
        failures = [answer for answer in answers if not answer.model]
        result |= counted("kill", answers)
        result["kill_without_retry_after"] = sum(not failure.says_when for failure in failures)
        result["kill_seconds"] = max((failure.time for failure in failures), default=began) - began
    return result


def counted(event: str, answers: Sequence[Answer]) -> dict[str, int]:
    return {
        f"{event}_requests": len(answers),
        f"{event}_failed": sum(not answer.model for answer in answers),
        f"{event}_mixed_up": sum(not answer.is_right for answer in answers if answer.model),
    }


def offline(folder: Path, prompts: Sequence[str]) -> list[str]:
    """Transformers' greedy replies."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    result = []
    for prompt in prompts:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False, return_tensors="pt")
        with torch.no_grad():
            tokens = model.generate(ids, max_new_tokens=MAX_TOKENS, do_sample=False)
        result.append(tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True))
    return result


async def is_up(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == 200
    except httpx.TransportError:
        return False


async def load(ask: Ask, requests: int, concurrency: int) -> tuple[list[str | None], float]:
    """Replies in order, None for one that failed, and requests a second."""
    replies: list[str | None] = [None] * requests
    numbers = iter(range(requests))

    async def work() -> None:
        for number in numbers:
            try:
                replies[number] = await ask(number)
            except Exception as error:  # noqa: BLE001 -- whatever it is, the request failed
                print(f"request {number}: {error!r}", file=sys.stderr)

    began = time.monotonic()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return replies, requests / (time.monotonic() - began)


async def seconds(ask: Ask, number: int) -> float:
    began = time.perf_counter()
    await ask(number)
    return time.perf_counter() - began


def memory(pid: int) -> int:
    """Bytes of the front and its engine."""
    process = psutil.Process(pid)
    return sum(child.memory_info().rss for child in (process, *process.children(recursive=True)))


if __name__ == "__main__":
    main()
