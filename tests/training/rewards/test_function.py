"""A reward function: what a stage gets of it, and one line for each way in which it fails."""

import json
import math
import time
from pathlib import Path

import psutil
import pytest

from config.errors import DataError, ModelError
from training.rewards.function import CARD, CODE, LOG, Call, RewardFunction, function_scores

CALLS = [
    Call("2 + 2?", "It is 4.", {"completion": "4"}),
    Call([{"role": "user", "content": "3 + 3?"}], "I do not know.", {}),
]


def function(root: Path, code: str, timeout_seconds: float = 5.0) -> RewardFunction:
    folder = root / "models/reward"
    folder.mkdir(parents=True)
    (folder / CODE).write_text(code)
    card = {"path": "mine.py:score", "timeout_seconds": timeout_seconds}
    (folder / CARD).write_text(json.dumps(card))
    return RewardFunction(folder, root)


def test_every_call_gets_prompt_response_and_row(tmp_path: Path) -> None:
    code = """
def score(prompt, response, row):
    assert isinstance(prompt, (str, list))
    return len(response) + 0.5 * ("completion" in row)
"""
    assert function(tmp_path, code).scores(CALLS) == [8.5, 14.0]
    assert RewardFunction(tmp_path / "models/reward", tmp_path).scores([]) == []


def test_it_imports_the_modules_of_its_project(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("VALUE = 3")
    code = "import helper\ndef score(prompt, response, row): return helper.VALUE"
    assert function(tmp_path, code).scores(CALLS) == [3.0, 3.0]


def test_nothing_that_it_keeps_reaches_the_next_batch(tmp_path: Path) -> None:
    code = "CALLS = []\ndef score(*call):\n    CALLS.append(call)\n    return len(CALLS)"
    first = function(tmp_path, code)
    assert first.scores(CALLS) == first.scores(CALLS) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("return 1 / 0", r"it line 2 raised ZeroDivisionError: division by zero for the response"),
        ("raise SystemExit", r"line 2 raised SystemExit for the response 'It is 4.' to '2 \+ 2"),
        ("return float('nan')", "it returned nan, a finite number is needed"),
        ("return float('inf')", "it returned inf, a finite number is needed"),
        ("return 'good'", "it returned 'good', a finite number is needed"),
        ("return None", "it returned None, a finite number is needed"),
        ("import os; os._exit(3)", r"it ended its process \(see runs/reward_function.log\)"),
        ("while True: pass", r"it took longer than 0.5 s \(reward.timeout_seconds\)"),
        ("import time; time.sleep(60)", r"it took longer than 0.5 s"),
        ("print('x' * (17 << 20)); return 1.0", "raised OSError"),
    ],
)
def test_a_function_that_fails_is_one_line(body: str, told: str, tmp_path: Path) -> None:
    seconds = 0.5 if "0.5" in told else 30.0
    code = f"def score(prompt, response, row):\n    {body}"
    first = function(tmp_path, code, timeout_seconds=seconds)
    with pytest.raises(DataError, match=told) as raised:
        first.scores(CALLS)
    message = str(raised.value)
    assert message.startswith("reward.path=mine.py:score: it ")
    assert message.endswith("Fix the function.")
    assert "\n" not in message
    assert not [child for child in psutil.Process().children() if "worker.py" in str(child)]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("def other(*call): return 1", "it has no function score"),
        ("import nowhere", "line 1 raised ModuleNotFoundError: No module named 'nowhere'"),
        ("def score(:", "line 1 raised SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_one_line(code: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=told):
        function(tmp_path, code).scores(CALLS)


def test_what_it_prints_goes_to_a_file(tmp_path: Path) -> None:
    code = "def score(*call):\n    print('x' * 10**6)\n    return 1.0"
    assert function(tmp_path, code).scores(CALLS) == [1.0, 1.0]
    assert (tmp_path / LOG).stat().st_size == 2 * 10**6 + 2


def test_the_limit_holds_for_one_response_and_not_for_the_batch(tmp_path: Path) -> None:
    code = "import time\ndef score(*call):\n    time.sleep(0.4)\n    return 1.0"
    began = time.monotonic()
    assert function(tmp_path, code, timeout_seconds=2.0).scores(CALLS * 3) == [1.0] * 6
    assert time.monotonic() - began > 2.0


def test_what_it_started_ends_with_it(tmp_path: Path) -> None:
    code = """
import subprocess
def score(*call):
    return subprocess.Popen(["sleep", "600"]).pid
"""
    pids = function(tmp_path, code).scores(CALLS)
    deadline = time.monotonic() + 10
    while any(alive(int(pid)) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_damaged_folder_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "models/reward"
    folder.mkdir(parents=True)
    (folder / CARD).write_text("{")
    with pytest.raises(ModelError, match=r"function.json is damaged .* Run the reward stage"):
        RewardFunction(folder, tmp_path)


def test_a_whole_number_and_a_truth_value_are_numbers(tmp_path: Path) -> None:
    scores = function(tmp_path, "def score(p, response, r): return 'know' in response").scores(CALLS)
    assert scores == [0.0, 1.0]
    assert all(isinstance(score, float) and math.isfinite(score) for score in scores)


def test_a_pool_of_processes_in_it_works(tmp_path: Path) -> None:
    code = """
from multiprocessing import get_context
def length(text):
    return len(text)
def score(prompt, response, row):
    scores = []
    for method in ("fork", "spawn"):
        with get_context(method).Pool(2) as pool:
            scores += pool.map(length, [response, response])
    assert len(set(scores)) == 1
    return scores[0]
"""
    assert function(tmp_path, code, 60).scores(CALLS[:1]) == [8.0]
    assert {path.name for path in (tmp_path / "models/reward").iterdir()} == {CARD, CODE}


def test_equal_prompts_have_their_own_rows(tmp_path: Path) -> None:
    prompts = tmp_path / "data/prepared/prompts"
    prompts.mkdir(parents=True)
    rows = [{"prompt": "p", "row": {"is": i}} for i in (1, 2)] + [{"prompt": "q", "row": {"is": 3}}]
    (prompts / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    function(tmp_path, "def score(prompt, response, row): return row.get('is', 0)")
    assert function_scores(tmp_path, ["p", "q", "p", "q", "new"], ["a"] * 5) == [1.0, 3.0, 2.0, 3.0, 0.0]
