"""Load on `rlhf serve`: is a request lost or mixed up, and what does the front cost beside the
engine alone?

    python -m benchmarks.serve_load --requests 2000 --concurrency 32 --json

Run it in a project that has run. Each greedy reply to a held-out prompt must
be the one that Transformers gives. `engine_rate` is that of the same client on the engine without
the front; `added_ms_median` compares single requests, front and engine in turn.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that it runs as a file, too

import httpx
import psutil
import torch
from transformers import AutoModelForCausalLM

from config import jsonl
from config.ports import free_port
from serving.engines import Engine
from serving.limits import Sampling
from serving.run import QUEUE, SERVE_KEY, SLOTS

MAX_TOKENS = 48
GREEDY = Sampling(MAX_TOKENS, 0.0, 1.0, None, stream=False)
SINGLES = 100
"""Requests of each side for the time that the front adds."""

Ask = Callable[[int], Awaitable[str]]
"""Asks the prompt of that number, and gives the text of the reply."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", default="last", help="a run, or champion (default last)")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--json", action="store_true", help="print JSON, not lines")
    given = parser.parse_args()
    if not 1 <= given.concurrency <= SLOTS + QUEUE:
        parser.error(f"--concurrency must be 1 to {SLOTS + QUEUE}: the front refuses more")
    found = asyncio.run(measured(given.run, given.requests, given.concurrency))
    if given.json:
        print(json.dumps(found, indent=2))
    else:
        for name, value in found.items():
            print(f"{name:<18} {value:.4g}" if isinstance(value, float) else f"{name:<18} {value}")


async def measured(run: str, requests: int, concurrency: int) -> dict[str, Any]:
    """The figures."""
    from cli.export import exported

    folder, port = exported(Path.cwd(), run), free_port()
    rows = jsonl.plain(Path("data/prepared/prompts/test.jsonl"))
    prompts = [row["prompt"] for row in rows][:200]
    server = subprocess.Popen(
        [Path(sys.executable).with_name("rlhf"), "serve", folder.name, "--port", str(port)],
        stdout=subprocess.DEVNULL,
    )
    engine = Engine(folder, "f32", SLOTS, torch.get_num_threads())
    try:
        await engine.wait()
        ids = [engine.prompts.of_text(prompt) for prompt in prompts]
        expected = offline(folder, ids, engine)
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False
        ) as client:
            began = time.monotonic()
            while not await is_up(client):
                if time.monotonic() > began + 60:
                    raise SystemExit("rlhf serve is not up after a minute")
                await asyncio.sleep(0.05)
            client.headers["Authorization"] = f"Bearer {SERVE_KEY.read_text()}"

            async def by_front(number: int) -> str:
                message = {"role": "user", "content": prompts[number % len(prompts)]}
                body = {"messages": [message], "temperature": 0, "max_tokens": MAX_TOKENS}
                answer = await client.post("/v1/chat/completions", json=body)
                answer.raise_for_status()
                text: str = answer.json()["choices"][0]["message"]["content"]
                return text

            async def by_engine(number: int) -> str:
                (part,) = [part async for part in engine.generate(ids[number % len(ids)], GREEDY)]
                return engine.prompts.text(part.ids).strip()

            await load(by_front, requests // 10, concurrency)  # warm, for memory too
            before = memory(server.pid)
            replies, rate = await load(by_front, requests, concurrency)
            growth = memory(server.pid) / before - 1
            _, engine_rate = await load(by_engine, requests, concurrency)
            # in blocks: threads of an engine spin for a while after a reply, on the other's cores
            sides = (by_front, by_engine) * 2
            singles = [
                median([await seconds(ask, number) for number in range(SINGLES)]) for ask in sides
            ]
    finally:
        server.terminate()
        server.wait(60)
        await engine.stop()
    wrong = [
        number
        for number, reply in enumerate(replies)
        if reply is not None and reply != expected[number % len(expected)]
    ]
    return {
        "requests": requests,
        "concurrency": concurrency,
        "failed": replies.count(None),
        "mixed_up": len(wrong),
        "rate": rate,
        "engine_rate": engine_rate,
        "added_ms_median": 1000 * (singles[0] - singles[1] + singles[2] - singles[3]) / 2,
        "rss_growth": growth,
    }


def offline(folder: Path, ids: Sequence[list[int]], engine: Engine) -> list[str]:
    """Transformers' greedy replies."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    found = []
    for prompt in ids:
        with torch.no_grad():
            tokens = model.generate(
                torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False
            )
        found.append(engine.prompts.text(tokens[0, len(prompt) :].tolist()).strip())
    return found


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
    return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))


if __name__ == "__main__":
    main()
