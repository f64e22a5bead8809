"""Every option of every command reaches what does the work, and its exit code comes back."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import cli.main
from config.errors import CostError, ParamsError

COMMANDS: list[tuple[str, str, tuple[Any, ...]]] = [
    (
        "run --recipe a.yaml --set b.c=1 --set d.e=2 --yes --json --changed-code restart",
        "cli.commands.run.run_pipeline",
        (Path("a.yaml"), ["b.c=1", "d.e=2"], True, True, "restart"),
    ),
    ("run", "cli.commands.run.run_pipeline", (None, [], False, False, None)),
    ("run --yes", "cli.commands.run.run_pipeline", (None, [], True, False, None)),
    ("run --json", "cli.commands.run.run_pipeline", (None, [], False, True, None)),
    (
        "retrain --recipe a.yaml --set b.c=1 --force",
        "cli.commands.retrain.retrain_cycle",
        (Path("a.yaml"), ["b.c=1"], True, False, False),
    ),
    ("retrain --yes", "cli.commands.retrain.retrain_cycle", (None, [], False, True, False)),
    ("retrain --json", "cli.commands.retrain.retrain_cycle", (None, [], False, False, True)),
    ("doctor --json", "cli.commands.doctor.examine", (True,)),
    ("doctor", "cli.commands.doctor.examine", (False,)),
    ("up", "cli.commands.servers.up", (4200, 5000, None, None, None, False, False)),
    (
        "up --prefect-port 1 --mlflow-port 2 --open mlflow --notify http://h",
        "cli.commands.servers.up",
        (1, 2, None, "mlflow", "http://h", False, False),
    ),
    ("up --no-auth", "cli.commands.servers.up", (4200, 5000, None, None, None, True, False)),
    ("up --mlflow-auth", "cli.commands.servers.up", (4200, 5000, None, None, None, False, True)),
    ("up --serve", "cli.commands.servers.up", (4200, 5000, 8000, None, None, False, False)),
    ("up --serve --serve-port 3", "cli.commands.servers.up", (4200, 5000, 3, None, None, False, False)),
    ("up --docker", "cli.docker.up", (False, False)),
    ("up --docker --gpu", "cli.docker.up", (True, False)),
    ("up --docker --serve", "cli.docker.up", (False, True)),
    ("down", "cli.commands.servers.down", ()),
    ("down --docker", "cli.docker.down", ()),
    ("status --json", "cli.commands.servers.status", (True,)),
    ("status", "cli.commands.servers.status", (False,)),
    ("clean", "cli.commands.clean.clean", (14.0, None, False, False)),
    ("clean --older-than 2 --max-gib 3 --yes", "cli.commands.clean.clean", (2.0, 3.0, True, False)),
    ("clean --json", "cli.commands.clean.clean", (14.0, None, False, True)),
]
OWN_EXIT_CODE = {"run", "retrain", "doctor"}


@pytest.mark.parametrize(("typed", "function", "wanted"), COMMANDS, ids=[c[0] for c in COMMANDS])
def test_what_is_typed_arrives(
    typed: str, function: str, wanted: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, name = function.rpartition(".")
    calls = []

    def record(*arguments: Any) -> int:
        calls.append(arguments)
        return 75

    monkeypatch.setattr(importlib.import_module(module), name, record)
    done = CliRunner().invoke(cli.main.app, typed.split(), catch_exceptions=False)
    assert calls == [wanted]
    assert done.exit_code == (75 if typed.split()[0] in OWN_EXIT_CODE else 0)


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (ParamsError("seed=x is not a number."), 2, "rlhf: seed=x is not a number.\n"),
        (CostError("too dear."), 2, "rlhf: too dear.\n"),
        (KeyboardInterrupt(), 130, "rlhf: stopped.\n"),
    ],
)
def test_the_process_ends_with_the_errors_code(
    raised: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise raised

    monkeypatch.setattr(sys.modules["cli.main"], "app", fails)
    with pytest.raises(SystemExit) as ended:
        cli.main.main()
    assert ended.value.code == code
    assert capsys.readouterr().err == said
