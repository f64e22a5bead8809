"""The circle: serve the champion, rate what it replies, train on the thumbs, contest, promote."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from config.load import load, write
from config.ports import free_port
from config.sections.data import HelpdeskSource
from config.workspace.champions import read_record
from tasks.servers.plans import prefect_plan
from tasks.servers.processes import start, stop
from tests.conftest import ROOT
from tests.support.stage_server import forked_stages
from training.worlds.helpdesk import gold_score, prompts

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

SMALL = (
    "model.random.width=64",
    "model.random.layers=2",
    "model.random.mlp_width=128",
    "model.random.vocab_size=400",
    "data.source={kind: helpdesk, sft_rows: 3000, preference_rows: 30, prompt_rows: 1200, "
    "temperature: 0.1, quality: 0.6}",
    "data.test_fraction=0.2",
    "data.feedback_source=data/labels/feedback.jsonl",
    "sft.epochs=2.0",
    "sft.learning_rate=4.0e-3",
    "reward={kind: function, path: 'recipes/right_reply.py:score', timeout_seconds: 10.0}",
    "align.method=kto",
    "kto.epochs=8.0",
    "kto.learning_rate=5.0e-4",
    "kto.batch_size=16",
    "kto.micro_batch_size=16",
    "evaluate.prompts=240",
    "evaluate.max_new_tokens=32",
    "retrain.min_new_rows=100",
)
"""Large enough that a model learns from 200 thumbs; 30 pairs teach it nothing."""
CONVERSATIONS, GOOD = 200, 0.6
"""How many are rated, and the gold score from which a reply is good."""


@pytest.fixture(scope="module")
def project(new_checkout: Callable[[], Path]) -> Iterator[Path]:
    """A checkout whose champion is hardly more than its SFT model, and a Prefect server of its own."""
    root = new_checkout()
    write(load(ROOT / "recipes" / "demo.yaml", [*SMALL, "kto.max_steps=1"]), root / "params.yaml")
    with forked_stages() as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            start(root, [prefect_plan(root, free_port())])
            rlhf(root, "run", "--yes")
            rlhf(root, "promote", "last", "--yes", "--why", "the first one")
            write(load(ROOT / "recipes" / "demo.yaml", list(SMALL)), root / "params.yaml")
            yield root
        finally:
            stop(root)


def rlhf(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "cli.main", *arguments],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def talk_and_rate(root: Path) -> tuple[int, int]:
    """Rate the champion's replies by their gold score, through the front; returns how many were rated up and down."""
    source = HelpdeskSource(
        kind="helpdesk", sft_rows=1, preference_rows=1, prompt_rows=CONVERSATIONS, temperature=0.1, quality=0.6
    )
    port, count = free_port(), {"up": 0, "down": 0}
    command = [sys.executable, "-m", "cli.main", "serve", "--port", str(port), "--keep-replies", "30"]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as served:
        try:
            assert served.stdout is not None
            assert served.stdout.readline().startswith("Serving ")
            key = (root / ".rlhf/serve.key").read_text()
            with httpx.Client(
                base_url=f"http://127.0.0.1:{port}/v1", headers={"Authorization": f"Bearer {key}"}, timeout=60,
                trust_env=False,
            ) as client:  # fmt: skip
                for number, row in enumerate(prompts(source, 77)):
                    body = {"messages": [{"role": "user", "content": row["prompt"]}], "max_tokens": 32,
                            "temperature": 1.0, "seed": number}  # fmt: skip
                    answer = client.post("/chat/completions", json=body).json()
                    gold = gold_score(row["prompt"], answer["choices"][0]["message"]["content"])
                    rating = "up" if gold >= GOOD else "down"
                    word = {"id": answer["id"], "rating": rating, "user": f"user {number}"}
                    assert client.post("/feedback", json=word).status_code == 200
                    count[rating] += 1
        finally:
            served.terminate()
    return count["up"], count["down"]


def test_thumbs_on_what_the_champion_said_make_a_better_one(project: Path) -> None:
    record = read_record(project)
    assert record.champion is not None
    first = record.champion.run_id
    up, down = talk_and_rate(project)
    assert up + down == CONVERSATIONS
    assert min(up, down) > 20
    shown = json.loads(rlhf(project, "feedback", "--json"))
    assert [(row["run_id"], row["up"], row["rated"]) for row in shown] == [(first, up, CONVERSATIONS)]
    ended: dict[str, Any] = json.loads(rlhf(project, "retrain", "--yes", "--json"))
    assert ended["outcome"] == "promoted", ended["said"]
    assert ended["contest"]["judge"] == "the gold score"
    assert ended["contest"]["gold"]["low"] > 0.05
    rated = {name: rows for name, rows in ended["examination"]["added"].items() if name.startswith("ratings/")}
    assert 0.9 * CONVERSATIONS <= sum(rated.values()) <= CONVERSATIONS  # a reply may be said twice
    assert f"{sum(rated.values())} of them ratings" in Path(ended["page"]).read_text()
    record = read_record(project)
    assert record.champion is not None
    assert record.champion.run_id == ended["run_id"] != first
    metrics = json.loads((project / "metrics/kto.json").read_text())
    assert metrics["desirable_weight"] == pytest.approx(metrics["bad_replies"] / metrics["good_replies"])
    said = rlhf(project, "feedback", "forget", "--user", "user 0")
    assert ended["run_id"] in said
    assert first not in said
