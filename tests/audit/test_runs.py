"""Every figure of `rlhf compare`, `rlhf runs` and `report --all` against an auditor's own sums."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app
from config.records import kept_folder
from tests.audit.accounts import Accounts
from tests.audit.ledgers import FIRST, SECOND, THIRD, write_ledgers
from tests.audit.page import Page, numbers, read, says

METRICS = {
    ("sft", "eval_loss"): "SFT held-out loss",
    ("reward", "accuracy"): "Reward accuracy",
    ("reward", "bayes_accuracy"): "Possible accuracy",
    ("reward", "ece"): "Calibration error",
    ("evaluate", "gold_sft"): "Gold, SFT",
    ("evaluate", "gold_aligned"): "Gold, aligned",
    ("evaluate", "right_item_rate"): "Right item",
    ("evaluate", "win_rate_gold"): "Wins, by gold",
    ("evaluate", "win_rate_reward"): "Wins, by reward",
    ("evaluate", "reward_gain"): "Reward gain",
    ("evaluate", "kl"): "KL, nats per reply",
    ("evaluate", "length_aligned"): "Reply tokens",
    ("evaluate", "eos_rate_aligned"): "Replies that end",
}
IN_POINTS = ("accuracy", "bayes_accuracy", "right_item_rate", "win_rate_gold", "win_rate_reward", "eos_rate_aligned")
"""Shares, whose difference is in percentage points."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ledgers")
    write_ledgers(folder)
    return folder


@pytest.fixture(scope="module")
def sides(root: Path) -> tuple[Accounts, Accounts]:
    return Accounts(root, FIRST), Accounts(root, SECOND)


def printed(root: Path, *arguments: str, columns: int = 240) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)}, catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def bounded(accounts: Accounts, stage: str, name: str) -> list[float | None]:
    """A metric with its bounds, None where it has none."""
    metrics = accounts.metrics(stage)
    return [metrics.get(f"{name}{end}") for end in ("", "_low", "_high")]


def difference(before: list[float | None], after: list[float | None]) -> list[float | None]:
    """after - before with the interval of two independent estimates: the distances to the bounds add up in squares
    (Newcombe 1998, method 10).
    """
    (a, a_low, a_high), (b, b_low, b_high) = before, after
    assert a is not None
    assert b is not None
    if a_low is None or a_high is None or b_low is None or b_high is None:
        return [b - a, None, None]
    below = math.sqrt((b - b_low) ** 2 + (a_high - a) ** 2)
    above = math.sqrt((b_high - b) ** 2 + (a - a_low) ** 2)
    return [b - a, b - a - below, b - a + above]


def test_compared_runs_have_the_figures_of_their_files(root: Path, sides: tuple[Accounts, Accounts]) -> None:
    content = json.loads(printed(root, "compare", FIRST, SECOND, "--json"))
    first, second = content["variants"]
    for run, accounts in zip((first, second), sides, strict=True):
        assert run["name"] == accounts.run_id
        result = {stage: account.made_usd for stage, account in accounts.stages.items()}
        assert run["stages"] == pytest.approx(result)
        rest = [usd for stage, usd in result.items() if stage not in (*content["shared"], "evaluate")]
        assert run["measured_usd"] == pytest.approx(sum(rest))
        assert set(run["metrics"]) == {name for _, name in METRICS}
    for stage, name in METRICS:
        before, after = (bounded(accounts, stage, name) for accounts in sides)
        for run, values in ((first, before), (second, after)):
            assert list(run["metrics"][name].values()) == values
        expected = difference(before, after) if before != after else [0.0, 0.0, 0.0]
        assert list(second["differences"][name].values()) == pytest.approx(expected), name
    outs = [{stage: row["detail"]["outs"] for stage, row in accounts.noted.items()} for accounts in sides]
    assert content["shared"] == [
        stage for stage in outs[0] if stage != "evaluate" and outs[0][stage] == outs[1].get(stage)
    ]
    assert content["params"]["prices.usd_per_device_hour"] == [0.9, 1.3]
    assert content["params"]["ppo.kl.coef"] == [0.07, 0.05]
    assert any("different reward models" in note for note in content["notes"])


@pytest.fixture(scope="module")
def page(root: Path) -> Page:
    path = printed(root, "compare", FIRST, SECOND, "--html", "compare.html")
    return read(Path(path.strip()))


def test_the_page_and_the_tables_of_compared_runs_show_them(
    root: Path, sides: tuple[Accounts, Accounts], page: Page
) -> None:
    shown = {name: figure.words for (_, _, name), figure in page.figures.items()}
    table = printed(root, "compare", FIRST, SECOND)
    for (stage, metric), title in METRICS.items():
        estimates = [bounded(accounts, stage, metric) for accounts in sides]
        name = re.sub(r"\W+", "_", title.lower())
        unit = 100 if metric in IN_POINTS else 1
        for letter, values in zip("ab", estimates, strict=True):
            in_brackets = [None if end is None else end * unit for end in values[1:]]
            first = [v for v in [values[0], *in_brackets] if v is not None]
            assert says(shown[f"{name}.{letter}"], list(first)), shown[f"{name}.{letter}"]
        delta = [end * unit for end in difference(*estimates) if end is not None]
        words = shown[f"{name}.b_a"]
        assert words == "same" if estimates[0] == estimates[1] else says(words, list(delta)), words
        line = next(line for line in table.splitlines() if line.startswith(f"{title} "))
        for column in ("a", "b", "b_a"):
            assert shown[f"{name}.{column}"] in line
    for stage in sides[0].stages:
        spent = [accounts.stages[stage].made_usd for accounts in sides]
        for letter, usd in zip("ab", spent, strict=True):
            assert says(shown[f"{stage}.{letter}"], [usd]), stage
        line = next(line for line in table.splitlines() if re.match(rf"{stage} +\$", line))
        assert [value for value, _ in numbers(line)] == pytest.approx(spent, rel=0.06)


def test_replies_of_compared_runs_have_their_scores(root: Path, page: Page) -> None:
    samples = json.loads(printed(root, "compare", FIRST, SECOND, "--json"))["samples"]
    replies = [text for text in page.texts if text.startswith("the aligned reply")]
    scores = [text for text in page.texts if text.startswith("gold ")]
    assert replies == [f"the aligned reply {i} of {run}" for i in (0, 1) for run in (FIRST, SECOND)]
    rows = [row for sample in samples for row in sample["replies"]]
    for text, row in zip(scores, rows, strict=True):
        assert says(text, [row["gold_aligned"], row["reward_aligned"]]), text


def test_the_list_of_runs_and_the_page_of_all_of_them(root: Path) -> None:
    content = json.loads(printed(root, "runs", "--json"))
    assert [run["run_id"] for run in content] == [THIRD, SECOND, FIRST]
    table = printed(root, "runs")
    (kept_folder(root, SECOND) / "report").mkdir()
    (kept_folder(root, SECOND) / "report" / "report.html").write_text("its page")
    page = read(Path(printed(root, "report", "--all").strip()))
    shown = {name: figure.words for (_, _, name), figure in page.figures.items()}
    runs = [Accounts(root, run["run_id"]) for run in content]
    dots: list[dict[str, Any]] = [dict(attrs) for tag, attrs in page.elements
                                  if tag == "circle" and attrs["class"].startswith("dot")]  # type: ignore[union-attr]  # fmt: skip
    assert len(dots) == 2
    for run, accounts in zip(content, runs, strict=True):
        judged = accounts.metrics("evaluate")
        rates = [judged.get(f"win_rate_gold{end}") for end in ("", "_low", "_high")]
        result = accounts.usd + accounts.saved_usd
        expected = {
            "usd": accounts.usd, "seconds": accounts.seconds, "made_usd": result,
            "started": accounts.events[0]["time"], "win_rate": rates[0],
            "win_rate_low": rates[1], "win_rate_high": rates[2],
            "gold_aligned": judged.get("gold_aligned"), "kl": judged.get("kl"),
        }  # fmt: skip
        assert {key: run[key] for key in expected} == pytest.approx(expected)
        assert (run["state"], run["method"]) == (accounts.state, "ppo")
        line = next(line for line in table.splitlines() if accounts.run_id in line)
        line = line.partition(accounts.state)[2].replace("[", " ").replace("]", " ").replace(",", " ")
        whole = [rates[0], *(100 * rate for rate in rates[1:] if rate is not None)]
        figures = [accounts.seconds, accounts.usd, *whole, expected["gold_aligned"], expected["kl"]]
        cells = line.partition("ppo")
        assert says(cells[0], list(figures[:-2])), line
        assert says("  ".join(cells[2].split()[:2]), list(figures[-2:])), line
        row = next(name for name in shown if accounts.run_id.replace("-", "_") in name)
        row = row.rpartition(".")[0]
        for column, values in {
            "cost": [result], "time": [accounts.seconds],
            "wins_over_sft": rates if rates[0] else [None],
            "gold": [judged.get("gold_aligned")], "kl": [judged.get("kl")],
        }.items():  # fmt: skip
            assert says(shown[f"{row}.{column}"], list(values)), (row, column)
    assert "the loss is nan at step 2." in content[0]["note"]
    assert "seed 1 -> 5" in content[0]["changed"]
    titles = [text for text in page.texts if re.match(r"2026\d+-\d+-\S+ \(ppo\), \$", text)]
    for text, accounts in zip(titles, runs[1:], strict=True):
        assert text.startswith(accounts.run_id)
        rates = [accounts.metrics("evaluate")[f"win_rate_gold{end}"] for end in ("", "_low", "_high")]
        assert says(text.partition("(ppo)")[2], [accounts.usd + accounts.saved_usd, *rates])
    spent = sum(accounts.usd for accounts in runs)
    sentence = next(text for text in page.texts if "runs completed" in text)
    assert says(sentence, [2, 3, spent]), sentence
    links = [element["href"] for element in page.all("a")]
    assert set(links) == {f"../runs/pipeline/{SECOND}/report/report.html"}
