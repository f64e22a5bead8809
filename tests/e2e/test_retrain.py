"""The retrain cycle on a small helpdesk: nothing new is skipped, honest votes are promoted, poisoned ones are not, and
there is a way back.
"""

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from config import jsonl
from config.load import load, write
from config.ports import free_port
from config.records import AttemptRow, stages_of
from config.sections.data import HelpdeskSource
from config.workspace.champions import read_record
from labelling.votes import VOTES_FILE, Pair, Vote, append
from tasks.servers.plans import prefect_plan
from tasks.servers.processes import start, stop
from tests.conftest import ROOT
from tests.support.stage_server import forked_stages
from training.preparation.cleaning import same_prompt_key
from training.worlds.helpdesk import prompts, read_case, reply

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2400)]

SMALL = (
    "model.random.width=64",
    "model.random.layers=2",
    "model.random.mlp_width=128",
    "model.random.vocab_size=400",
    "data.source={kind: helpdesk, sft_rows: 3000, preference_rows: 400, prompt_rows: 1200, "
    "temperature: 0.1, quality: 0.6}",
    "data.test_fraction=0.2",
    "sft.epochs=2.0",
    "sft.learning_rate=4.0e-3",
    "reward.epochs=2.0",
    "reward.batch_size=32",
    "reward.micro_batch_size=32",
    "ppo.updates=20",
    "ppo.learning_rate=5.0e-4",
    "ppo.value_learning_rate=5.0e-4",
    "ppo.max_new_tokens=32",
    "evaluate.prompts=240",
    "evaluate.max_new_tokens=32",
)
"""Large enough that a reward model learns from votes what a good reply is, and PPO from it."""
FIRST = ("ppo.updates=1",)
"""The first champion is hardly more than its SFT model."""
HONEST, POISONED = 1500, 3000


class Project(NamedTuple):
    root: Path

    def rlhf(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "cli.main", *arguments], cwd=self.root,
            capture_output=True, text=True, timeout=1200, check=False,
        )  # fmt: skip

    def retrain(self) -> dict[str, Any]:
        done = self.rlhf("retrain", "--json")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def starts(self) -> dict[str, int]:
        """Processes of each stage so far."""
        rows = {
            stage: jsonl.read(self.root / "runs" / stage / "attempts.jsonl", AttemptRow).rows
            for stage in stages_of("ppo")
        }
        return {stage: sum(row.event == "start" for row in item) for stage, item in rows.items()}

    def champion(self) -> str:
        champion = read_record(self.root).champion
        assert champion is not None
        return champion.run_id

    def alias(self, name: str) -> str:
        """DVC's digest of the model that MLflow's registry has under an alias."""
        from mlflow import MlflowClient

        version = MlflowClient(f"sqlite:///{self.root / 'mlflow.db'}").get_model_version_by_alias(
            "helpdesk-assistant", name
        )
        return str(version.tags["dvc.digest"])


@pytest.fixture(scope="module")
def project(new_checkout: Callable[[], Path]) -> Iterator[Project]:
    """A checkout with a first champion, and a Prefect server of its own."""
    result = Project(new_checkout())
    write(load(ROOT / "recipes" / "demo.yaml", [*SMALL, *FIRST]), result.root / "params.yaml")
    with forked_stages() as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            start(result.root, [prefect_plan(result.root, free_port())])
            done = result.rlhf("run")
            assert done.returncode == 0, done.stderr
            done = result.rlhf("promote", "last", "--yes", "--why", "the first one")
            assert done.returncode == 0, done.stderr
            write(load(ROOT / "recipes" / "demo.yaml", list(SMALL)), result.root / "params.yaml")
            yield result
        finally:
            stop(result.root)


def vote(project: Project, count: int, seed: int, prefer_careless: bool) -> None:
    """Votes on pairs of a careful and a careless reply, shown in either order."""
    source = HelpdeskSource(
        kind="helpdesk", sft_rows=1, preference_rows=1, prompt_rows=2 * count, temperature=0.1, quality=0.6
    )
    rng, texts = random.Random(seed), [row["prompt"] for row in prompts(source, seed)]
    votes: list[Vote] = []
    while len(votes) < count:
        prompt = texts.pop()
        careful, careless = (reply(read_case(prompt), quality, rng) for quality in (1.0, 0.3))
        if careful == careless:
            continue
        preferred, other = (careless, careful) if prefer_careless else (careful, careless)
        first = rng.random() < 0.5
        votes.append(
            Vote(Pair(prompt, *((preferred, other) if first else (other, preferred))), "ada", 1 if first else 2)
        )
    append(project.root / VOTES_FILE, votes)


def test_honest_votes_are_learnt_from_and_the_better_model_is_promoted(project: Project) -> None:
    first, before = project.champion(), project.starts()
    vote(project, HONEST, seed=11, prefer_careless=False)
    with (project.root / VOTES_FILE).open("a") as file:
        file.write('{"prompt": "hello , my lamp is cra')  # somebody pulled the plug
    ended = project.retrain()
    assert ended["outcome"] == "promoted", ended["said"]
    assert ended["contest"]["judge"] == "the gold score"
    assert ended["contest"]["win_rate"]["low"] > 0.5
    assert ended["contest"]["gold"]["low"] > 0
    assert ended["examination"]["refused"] == 1
    assert sum(ended["examination"]["added"].values()) >= 0.9 * HONEST
    assert project.champion() == ended["run_id"] != first
    record = read_record(project.root)
    assert record.previous is not None
    assert record.previous.run_id == first
    assert (record.events[-1].by, record.events[-1].before) == ("retrain", first)
    # votes teach no tokens, so the SFT model is the same
    assert {stage: count - before[stage] for stage, count in project.starts().items()} == {
        "data": 1, "sft": 0, "reward": 1, "ppo": 1, "evaluate": 1,
    }  # fmt: skip
    lock = yaml.safe_load((project.root / "dvc.lock").read_text())
    assert project.alias("champion") == next(
        out["md5"] for out in lock["stages"]["align@ppo"]["outs"] if out["path"] == "models/ppo"
    )
    assert project.alias("previous") == record.previous.model_digest


def test_champion_and_challenger_were_asked_prompts_that_neither_was_trained_on(project: Project) -> None:
    prepared = [project.root / "data/prepared", *(project.root / "champions").glob("*/data/prepared")]
    assert len(prepared) == 3
    trained = {
        same_prompt_key(row["prompt"])
        for folder in prepared
        for path in folder.glob("*/train.jsonl")
        for row in jsonl.plain(path)
    }
    held_out = {
        same_prompt_key(row["prompt"]) for folder in prepared for row in jsonl.plain(folder / "prompts/test.jsonl")
    }
    assert len(held_out) > 200
    assert not trained & held_out


def test_poisoned_votes_are_trained_on_and_not_promoted(project: Project) -> None:
    champion, digest, events = (project.champion(), project.alias("champion"), len(read_record(project.root).events))
    vote(project, POISONED, seed=12, prefer_careless=True)
    ended = project.retrain()
    assert ended["outcome"] == "kept", ended["said"]
    assert "wins against the champion fails" in ended["said"]
    assert ended["run_id"] != champion
    assert ended["contest"]["win_rate"]["low"] < 0.5
    assert ended["examination"]["accuracy"]["high"] < 0.5, (
        "the champion's reward model disagrees with votes that are turned round"
    )
    assert (project.champion(), project.alias("champion"), len(read_record(project.root).events)) == (
        champion,
        digest,
        events,
    )
    page = Path(ended["page"]).read_text()
    assert "**fails**" in page
    assert "not checked: retrain.safety_source names no safety prompts" in page
