"""`rlhf plan` from outside: JSON, files it writes, one line for a mistake, and what it does not import."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cli.commands.plan import app
from config import jsonl
from config.errors import CostError, UserError
from config.load import dump, load
from config.workspace.timed import TIMED_FILE
from tests.costs.machines import timed

DEMO = ["--params", "recipes/demo.yaml"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, *DEMO])


def test_a_stage_can_be_planned_alone() -> None:
    assert [stage["stage"] for stage in json.loads(run("--stage", "sft", "--json").stdout)["stages"]] == ["sft"]


def test_the_contest_of_a_retrain_cycle_is_planned_where_it_is_asked_for(tmp_path: Path) -> None:
    run_alone = json.loads(run("--json").stdout)
    cycle = json.loads(run("--retrain", "--json", "--html", str(tmp_path / "plan.html")).stdout)
    examine, *stages, contest = cycle["stages"]
    assert stages == run_alone["stages"]
    assert (examine["stage"], contest["stage"]) == ("examine", "contest")
    assert cycle["total"]["seconds"] == pytest.approx(
        run_alone["total"]["seconds"] + contest["seconds"] + examine["seconds"]
    )
    assert "contest" in (tmp_path / "plan.html").read_text()


def test_an_option_before_a_question_is_refused() -> None:
    result = run("--retrain", "optimise", "usd")
    assert str(result.exception).startswith("--retrain stands before optimise")


def test_a_page_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    result = run("--html", str(tmp_path / "missing" / "plan.html"))
    assert isinstance(result.exception, UserError)


def test_the_winning_params_are_complete_and_plan_cheaper(tmp_path: Path) -> None:
    out = tmp_path / "best.yaml"
    result = run("optimise", "memory", "--out", str(out), "--json")
    assert result.exit_code == 0, result.exception
    before, after = (
        json.loads(CliRunner().invoke(app, ["--params", str(f), "--json"]).stdout) for f in ("recipes/demo.yaml", out)
    )
    assert after["total"]["peak_bytes_per_gpu"] < before["total"]["peak_bytes_per_gpu"]
    assert load(out).sft.batch_size == load(Path("recipes/demo.yaml")).sft.batch_size


def test_a_comparison_is_markdown_for_a_pull_request(tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(dump(load(Path("recipes/demo.yaml"), ["ppo.updates=80"])))
    assert "| ppo |" in run("compare", str(other), "--markdown").stdout


def test_a_mistake_is_one_line() -> None:
    result = run("--hardware", "a200")
    assert isinstance(result.exception, CostError)
    assert "\n" not in str(result.exception)


def test_planning_imports_neither_torch_nor_the_orchestrator(tmp_path: Path) -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from cli.commands.plan import app\n"
        "assert CliRunner().invoke(app, ['optimise', 'usd', '--params', 'recipes/demo.yaml', "
        "'--out', sys.argv[1]]).exit_code == 0\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'transformers', "
        "'prefect', 'mlflow', 'dvc', 'numpy'}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "best.yaml")],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path.cwd(),
    )
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.parametrize(("limit", "words"), [("--max-usd=1e-9", "USD"), ("--max-hours=1e-9", "hours")])
def test_a_search_above_its_limit_is_refused_in_the_limits_unit(tmp_path: Path, limit: str, words: str) -> None:
    out = tmp_path / "best.yaml"
    generous = "--max-hours=1e9" if limit.startswith("--max-usd") else "--max-usd=1e9"
    result = run("optimise", "usd", "--stage", "sft", limit, generous, "--out", str(out))
    assert isinstance(result.exception, CostError)
    assert "1e-09" in str(result.exception)
    assert words in str(result.exception)
    assert not out.exists()


def test_the_next_plan_takes_what_a_run_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = str(Path("recipes/demo.yaml").resolve())
    monkeypatch.chdir(tmp_path)

    def planned() -> dict[str, Any]:
        done = CliRunner().invoke(app, ["--params", recipe, "--json", "--stage", "sft"])
        (stage,) = json.loads(done.stdout)["stages"]
        return dict(stage)

    before = planned()
    row = timed("sft", "train", run_id="r", hardware="cpu", units=1e6, seconds=90.0)
    jsonl.append(tmp_path / TIMED_FILE, row)
    after = planned()
    (train,) = (phase["seconds"] for phase in after["phases"] if phase["phase"] == "train")
    assert train == pytest.approx(90.0 * before["units"]["train"] / 1e6)
    assert after["time_interval"]["basis"] == "measured here"


def test_adapters_are_tried_where_they_are_allowed(tmp_path: Path) -> None:
    search = ("optimise", "memory", "--stage", "ppo", "--json", "--out", str(tmp_path / "best"))
    alone, with_adapters = (json.loads(run(*search, *more).stdout)["ppo"]["tried"] for more in ((), ("--adapters",)))
    assert with_adapters > alone
