"""Every stage with a reward function in place of the reward model."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from config import jsonl
from config.errors import DataError, ParamsError
from config.load import validate, write
from config.prerequisites import require_reward_function
from config.records import UsageRow
from tests.training.support.processes import killed_stopped_and_resumed, metric_rows, metrics, start
from tests.training.support.tiny import files, open_stage, params, work
from training.inference.trained_models import TrainedModels
from training.modeling.tokenizer import load_tokenizer
from training.preparation.prompts import read_prompts
from training.process.stage import Stage
from training.rewards.episodes import episode_rewards
from training.rewards.function import Call, RewardFunction

pytestmark = pytest.mark.usefixtures("forks")

Project = Callable[..., Path]
FUNCTION: dict[str, Any] = {"kind": "function", "path": "mine.py:score", "timeout_seconds": 5.0}
LENGTH = "def score(prompt, response, row):\n    return len(response) / 100\n"
SECTIONS: dict[str, Any] = {"reward": FUNCTION, "ppo": {"value_init": "sft"}}


def with_function(project: Project, method: str, code: str = LENGTH, **sections: Any) -> Path:
    """A project in which the stages before `method`'s have run."""
    root = project("reward", **SECTIONS | {"align": {"method": method}} | sections)
    (root / "mine.py").write_text(code)
    work(root, "reward")
    return root


def test_the_reward_stage_says_how_the_function_judges_the_held_out_pairs(project: Project) -> None:
    root = with_function(project, "rloo")
    result = metrics(root, "reward")
    pairs = list(jsonl.plain(root / "data/prepared/preference/test.jsonl"))
    right = [
        0.5 + 0.5 * ((len(a) > len(b)) - (len(a) < len(b)))
        for a, b in ((pair["chosen"], pair["rejected"]) for pair in pairs)
    ]
    assert result["accuracy"] == pytest.approx(sum(right) / len(right))
    assert result["test_pairs"] == len(pairs)
    assert result["ece"] is None
    assert result["baseline_longer_wins"] == metrics(root, "data")["baseline_longer_wins"]
    assert 0 < result["seconds_per_reply"] < 1
    before = files(root / "models/reward")
    shutil.rmtree(root / "checkpoints/reward", ignore_errors=True)
    work(root, "reward")
    assert files(root / "models/reward") == before  # or whatever learns from it would learn again
    assert (root / "models/reward/function.py").read_text() == LENGTH


@pytest.mark.parametrize("method", ["ppo", "rloo", "grpo"])
def test_a_method_learns_from_it_and_an_evaluation_asks_it(project: Project, method: str) -> None:
    root = with_function(project, method)
    work(root, method)
    rows = list(jsonl.read(root / f"runs/{method}/usage.jsonl", UsageRow).rows)
    scored = [row for row in rows if row.phase == "score"]
    assert len(scored) == 8
    assert all(row.seconds > 0.01 for row in scored)  # a process of its own, which is paid for
    samples = list(jsonl.plain(root / f"runs/{method}/samples.jsonl"))
    assert samples
    for sample in samples:
        assert sample["score"] == pytest.approx(len(sample["response"]) / 100)
    work(root, "evaluate")
    shown = list(jsonl.plain(root / "evaluation/samples.jsonl"))
    for row in shown:
        assert row["reward_aligned"] == pytest.approx(len(row["aligned"]) / 100)
    texts = [row["aligned"] for row in shown]
    scores = TrainedModels(root).scores([row["prompt"] for row in shown], texts)
    assert scores == pytest.approx([len(text) / 100 for text in texts])


@pytest.mark.integration
def test_two_processes_share_its_calls_and_a_killed_run_ends_with_the_same_bits(
    project: Project, tmp_path: Path
) -> None:
    root = with_function(project, "rloo")
    killed_stopped_and_resumed(root, "rloo", kill_at=4, stop_at=6)
    undisturbed = with_function(project, "rloo", name="undisturbed")
    work(undisturbed, "rloo")
    assert files(root / "models/rloo") == files(undisturbed / "models/rloo")
    two = with_function(project, "rloo", name="two")
    process = start(two, "rloo", processes=2)
    assert process.communicate()[1] is not None
    assert process.returncode == 0
    scores = [[row.values["score"] for row in metric_rows(at, "rloo")] for at in (two, undisturbed)]
    assert scores[0][0] == pytest.approx(scores[1][0])


@pytest.mark.integration
def test_a_killed_stage_leaves_no_process_of_the_function(project: Project) -> None:
    slow = "import time\ndef score(*call):\n    time.sleep(4)\n    return 1.0\n"
    root = with_function(project, "rloo")
    (root / "models/reward/function.py").write_text(slow)
    process = start(root, "rloo")
    deadline = time.monotonic() + 60
    while not (workers := running(root)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.communicate()
    while any(worker.is_running() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def running(root: Path) -> list[psutil.Process]:
    """The processes that run the project's function."""
    result = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if str(root.resolve() / "models/reward/function.py") in line and "worker.py" in str(line):
            result.append(process)
    return result


def test_a_failing_function_ends_the_reward_stage_before_anything_is_sampled(project: Project) -> None:
    code = "def score(prompt, response, row):\n    return 1 / len(response)\n"
    with pytest.raises(DataError, match=r"raised ZeroDivisionError: .* for the response '' to"):
        with_function(project, "rloo", code)


def test_a_function_that_tells_no_replies_apart_is_refused(project: Project) -> None:
    with pytest.raises(DataError, match=r"reward.path=mine.py:score gives 0.5 to each of \d+ replies"):
        with_function(project, "rloo", "def score(prompt, response, row):\n    return 0.5\n")


def test_a_function_that_likes_empty_replies_is_a_warning(project: Project, caplog: pytest.LogCaptureFixture) -> None:
    root = with_function(project, "rloo", "def score(prompt, response, row):\n    return -len(response) / 100\n")
    assert metrics(root, "reward")["empty_as_good"] is True
    assert "a model can learn to say nothing" in caplog.text


# ---------------------------------------------------------------- data without preferences

WORDS = ["kettle", "lid", "cord", "spout", "base", "switch", "jug", "plug"]


def problems(path: Path) -> None:
    """Instructions with columns of their own."""
    rows = [
        {
            "question": f"{WORDS[i % 8]} {WORDS[i // 8 % 8]} {i // 64} {i % 7} + {i % 5} ?",
            "solution": f"{WORDS[i % 8]} #### {i % 7 + i % 5}",
            "level": i % 3,
        }
        for i in range(240)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def instructions(tmp_path: Path) -> dict[str, Any]:
    problems(tmp_path / "problems.jsonl")
    content = params().model_dump(mode="json")
    content["data"] |= {
        "source": {
            "kind": "file", "path": str(tmp_path / "problems.jsonl"), "format": "instructions",
            "columns": {"prompt": "question", "completion": "solution"},
        }
    }  # fmt: skip
    content["align"] = {"method": "rloo"}
    content["reward"] = FUNCTION
    content["ppo"]["value_init"] = "sft"
    return content


def test_instructions_alone_are_enough_and_the_function_gets_their_other_columns(tmp_path: Path) -> None:
    root = tmp_path / "project"
    root.mkdir()
    write(validate(instructions(tmp_path), "test"), root / "params.yaml")
    work(root, "data")
    first = next(jsonl.plain(root / "data/prepared/prompts/train.jsonl"))
    assert set(first) == {"prompt", "row"}
    assert set(first["row"]) == {"completion", "level"}
    assert (root / "data/prepared/preference/train.jsonl").read_text() == ""
    assert metrics(root, "data")["baseline_bow"] is None
    (root / "mine.py").write_text(
        "def score(prompt, response, row):\n"
        "    assert row['level'] in (0, 1, 2)\n"
        "    return float(response == row['completion'])\n"
    )
    for stage in ("sft", "reward", "rloo", "evaluate"):
        work(root, stage)
    result = metrics(root, "reward")
    assert result["accuracy"] is None
    assert result["score_mean"] == 1.0  # of the known answers; empty replies are tried too
    assert metrics(root, "evaluate")["reward_aligned"] >= 0.0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"reward": params().reward.model_dump()}, "has no preferences, and reward.kind=model"),
        ({"align": {"method": "dpo"}}, "has no preferences, and align.method=dpo learns"),
    ],
)
def test_what_needs_preferences_is_refused_without_any(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=f"data.source.format=instructions {told}"):
        validate(instructions(tmp_path) | change, "test")


# ---------------------------------------------------------------- known before money is spent


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"ppo": {"value_init": "reward"}}, "ppo.value_init=reward needs a reward model, and"),
        ({"reward": FUNCTION | {"path": "mine.py"}}, "reward"),
        ({"reward": FUNCTION | {"timeout_seconds": 0.0}}, "timeout_seconds"),
        (
            {"evaluate": {"judge": {"kind": "reward_model", "path": None}}},
            "evaluate.judge.path=null trains a reward model",
        ),
    ],
)
def test_settings_that_need_a_reward_model_are_refused(sections: dict, told: str) -> None:
    with pytest.raises(ParamsError, match=told):
        params(**SECTIONS | sections)


@pytest.mark.parametrize(
    ("path", "code", "told"),
    [
        ("other.py:score", LENGTH, "other.py does not exist. Put the file there"),
        ("mine.py:other", LENGTH, "mine.py has no function other"),
        ("mine.py:score", "def score(:", "mine.py line 1 cannot be read: invalid syntax"),
        ("../mine.py:score", LENGTH, "is outside of the project"),
    ],
)
def test_a_function_that_is_not_there_is_known_before_the_run(path: str, code: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(code)
    wanted = params(**SECTIONS | {"reward": FUNCTION | {"path": path}})
    with pytest.raises(ParamsError, match=told) as raised:
        require_reward_function(tmp_path, wanted)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("code", [LENGTH, "score = len", "from json import loads as score"])
def test_a_function_may_be_defined_assigned_or_imported(code: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(code)
    require_reward_function(tmp_path, params(**SECTIONS))
    require_reward_function(tmp_path, params())


def test_a_changed_function_is_another_input(project: Project) -> None:
    root = with_function(project, "rloo")
    before = open_stage(root, "reward")[0].fingerprint
    (root / "mine.py").write_text(LENGTH + "\n")
    assert open_stage(root, "reward")[0].fingerprint != before


def test_exact_match_compares_the_last_numbers() -> None:
    from recipes.exact_match import score

    row = {"completion": "She has 48 + 24 = 72.\n#### 1,072"}
    assert score("", "So it is 1072.", row) == 1.0
    assert score("", "It is 1,072.0", row) == 1.0
    assert score("", "72", row) == 0.0
    assert score("", "no number", row) == 0.0
    assert score("", "", {}) == 0.0


def test_a_function_of_the_project_is_the_one_that_was_tried(project: Project) -> None:
    root = with_function(project, "rloo")
    (root / "mine.py").write_text("def score(*call): return -1.0")
    first = RewardFunction(root / "models/reward", root)
    assert first.scores([Call("a", "x" * 50, {})]) == [0.5]


def test_episodes_of_equal_prompts_are_scored_by_their_own_rows(tmp_path: Path) -> None:
    """The answer of the second row would be wrong for the first."""
    root = tmp_path / "project"
    root.mkdir()
    content = instructions(tmp_path)
    rows = [{"question": f"what is {i // 2} ?", "solution": str(i % 2)} for i in range(60)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write(validate(content, "test"), root / "params.yaml")
    (root / "mine.py").write_text("def score(prompt, response, row):\n    return 1.0 + 2 * int(row['completion'])\n")
    for stage in ("data", "sft", "reward"):
        work(root, stage)
    stage = Stage("rloo", (), (), root)
    prompts, tokenizer = read_prompts(stage), load_tokenizer(root / "data/tokenizer")
    rewards = episode_rewards(stage, tokenizer, prompts)
    assert rewards is not None
    solutions = [row["row"]["completion"] for row in jsonl.plain(root / "data/prepared/prompts/train.jsonl")]
    assert prompts[0] == prompts[1]
    scores = rewards.scores(range(len(prompts)), [[5]] * len(prompts))
    assert scores.tolist() == [1.0 + 2 * int(solution) for solution in solutions]
    assert {*solutions} == {"0", "1"}
