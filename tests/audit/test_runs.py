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
from tests.audit.accounts import Accounts, Sum
from tests.audit.books import FIRST, SECOND, THIRD, write_books
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
IN_POINTS = (
    "accuracy", "bayes_accuracy", "right_item_rate", "win_rate_gold", "win_rate_reward",
    "eos_rate_aligned",
)  # fmt: skip
"""Shares, whose difference is in percentage points."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("books")
    write_books(folder)
    return folder


@pytest.fixture(scope="module")
def sides(root: Path) -> tuple[Accounts, Accounts]:
    return Accounts(root, FIRST), Accounts(root, SECOND)


def printed(root: Path, *arguments: str, columns: int = 240) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        done = CliRunner().invoke(
            app, list(arguments), env={"COLUMNS": str(columns)}, catch_exceptions=False
        )
    assert done.exit_code == 0
    return done.stdout


def bounded(accounts: Accounts, stage: str, name: str) -> list[float | None]:
    """A metric with its bounds, None where it has none."""
    metrics = accounts.metrics(stage)
    return [metrics.get(f"{name}{end}") for end in ("", "_low", "_high")]


def difference(before: list[float | None], after: list[float | None]) -> list[float | None]:
    """after - before with the interval of two independent estimates: the distances to the bounds
    add up in squares (Newcombe 1998, method 10).
    """
    (a, a_low, a_high), (b, b_low, b_high) = before, after
    assert a is not None
    assert b is not None
    if a_low is None or a_high is None or b_low is None or b_high is None:
        return [b - a, None, None]
    below = math.sqrt((b - b_low) ** 2 + (a_high - a) ** 2)
    above = math.sqrt((b_high - b) ** 2 + (a - a_low) ** 2)
    return [b - a, b - a - below, b - a + above]


def paid_seconds(phase: Sum, price: float) -> float:
    return phase.usd * 3600 / price


def why(before: Sum, after: Sum, prices: tuple[float, float]) -> dict[str, float]:
    """What a difference in cost is owed to, by the logarithmic mean (Ang 2005)."""
    a, b = before.usd, after.usd
    mean = a if math.isclose(a, b) else (b - a) / math.log(b / a)
    seconds = [
        paid_seconds(side, price) for side, price in zip((before, after), prices, strict=True)
    ]
    shares = {"price": mean * math.log(prices[1] / prices[0])}
    if before.tokens and after.tokens:
        rates = [each / side.tokens for each, side in zip(seconds, (before, after), strict=True)]
        shares["tokens"] = mean * math.log(after.tokens / before.tokens)
        return shares | {"rate": mean * math.log(rates[1] / rates[0])}
    return shares | {"seconds": mean * math.log(seconds[1] / seconds[0])}


def test_compared_runs_have_the_figures_of_their_files(
    root: Path, sides: tuple[Accounts, Accounts]
) -> None:
    content = json.loads(printed(root, "compare", FIRST, SECOND, "--json"))
    for run, accounts in zip(content["runs"], sides, strict=True):
        expected = {
            "total_seconds": accounts.seconds, "total_usd": accounts.usd,
            "waste_usd": accounts.wasted_usd, "saved_usd": accounts.saved_usd,
            "usd_per_win_rate_point": accounts.usd_per_point,
            "started": accounts.events[0]["time"],
        }  # fmt: skip
        assert {key: run[key] for key in expected} == pytest.approx(expected)
        assert (run["run_id"], run["verdict"]) == (accounts.run_id, "Alignment worked")
        outs = {stage: row["detail"]["outs"] for stage, row in accounts.noted.items()}
        assert run["data_version"] == outs["data"]["data/prepared"]
        assert run["reward_version"] == outs["reward"]["models/reward"]
        assert run["reward_hacking"] is False
    rows = {(row["stage"], row["metric"]): row for row in content["metrics"]}
    assert set(rows) == set(METRICS)
    for key, row in rows.items():
        estimates = [bounded(accounts, *key) for accounts in sides]
        assert [list(value.values()) for value in row["values"]] == estimates
        (shown,) = row["differences"]
        expected_difference = difference(*estimates)
        if estimates[0] == estimates[1]:
            expected_difference = [0.0, 0.0, 0.0]
        assert [shown[name] for name in ("value", "low", "high")] == pytest.approx(
            expected_difference
        ), key
        _, low, high = expected_difference
        clear = None if low is None or high is None else not low <= 0 <= high
        assert shown["clear"] is clear
    data = sides[0].metrics("data")
    for split in content["data"]:
        count = data[f"{split['dataset']}_{split['split']}_rows"]
        assert (split["rows"], split["added"], split["removed"]) == ([count, count], [0], [0])
    params = {row["key"]: row["values"] for row in content["params"]}
    assert params["prices.usd_per_device_hour"] == [0.9, 1.3]
    assert params["ppo.kl.coef"] == [0.07, 0.05]
    judges = [note for note in content["notes"] if "different reward models" in note]
    assert content["notes"] == judges
    assert len(judges) == 1


def test_costs_of_compared_runs_are_owed_to_what_changed(
    root: Path, sides: tuple[Accounts, Accounts]
) -> None:
    (changes,) = json.loads(printed(root, "compare", FIRST, SECOND, "--json"))["costs"]
    stages = {change["stage"]: change for change in changes}
    total = stages.pop("total")
    assert list(stages) == list(sides[0].stages)
    for stage, change in stages.items():
        before, after = (accounts.stages[stage] for accounts in sides)
        for phase in change["phases"]:
            a, b = before.made[phase["phase"]], after.made[phase["phase"]]
            assert phase["change_usd"] == pytest.approx(b.usd - a.usd)
            assert phase["reasons"] == pytest.approx(why(a, b, (before.price, after.price)))
            for side, work, price in (("before", a, before.price), ("after", b, after.price)):
                seconds = paid_seconds(work, price)
                rate = work.tokens / seconds if work.tokens else None
                assert phase[side] == pytest.approx(
                    {
                        "device_seconds": seconds, "tokens": work.tokens, "usd": work.usd,
                        "usd_per_device_hour": price, "tokens_per_second": rate,
                    }
                )  # fmt: skip
        assert change["change_usd"] == pytest.approx(after.made_usd - before.made_usd)
    made = [sum(account.made_usd for account in accounts.stages.values()) for accounts in sides]
    assert [total[side]["usd"] for side in ("before", "after")] == pytest.approx(made)
    assert sum(total["reasons"].values()) == pytest.approx(made[1] - made[0])


@pytest.fixture(scope="module")
def page(root: Path) -> Page:
    path = printed(root, "compare", FIRST, SECOND, "--html", "compare.html")
    return read(Path(path.strip()))


def test_the_page_and_the_tables_of_compared_runs_show_them(
    root: Path, sides: tuple[Accounts, Accounts], page: Page
) -> None:
    shown = {name: figure.words for (_, _, name), figure in page.figures.items()}
    table = printed(root, "compare", FIRST, SECOND)
    for letter, accounts in zip("ab", sides, strict=True):
        name = f"{letter}_{accounts.run_id.replace('-', '_')}"
        name = next(key for key in shown if key.startswith(f"{letter}_20")).split(".")[0]
        assert accounts.run_id.replace("-", "_") in name
        cells = {
            "time": accounts.seconds, "cost": accounts.usd,
            "wasted": accounts.wasted_usd, "saved": accounts.saved_usd,
            "per_win_point": accounts.usd_per_point,
        }  # fmt: skip
        for column, value in cells.items():
            assert says(shown[f"{name}.alignment_worked.{column}"], [value]), column
        row = next(line for line in table.splitlines() if accounts.run_id in line)
        expected: list[float | None] = [accounts.seconds, accounts.usd, accounts.saved_usd]
        assert says(row.partition("worked")[2], expected), row
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
        line = next(line for line in table.splitlines() if line.startswith(f"{title}  "))
        for cell in (shown[f"{name}.{column}"] for column in ("a", "b")):
            assert cell in line
        assert shown[f"{name}.b_a"].split(" clear")[0].split(" may")[0] in line
    for stage in sides[0].stages:
        before, after = (accounts.stages[stage] for accounts in sides)
        spent: list[float | None] = [before.made_usd, after.made_usd]
        assert says(shown[f"{stage}.cost_a_b"], spent), stage
        assert says(shown[f"{stage}.change"].replace("≈", ""), [after.made_usd - before.made_usd])
        seconds = [
            sum(paid_seconds(phase, account.price) for phase in account.made.values())
            for account in (before, after)
        ]
        assert says(shown[f"{stage}.time_a_b"], list(seconds)), stage
        for name, phase in before.made.items():
            works = [(phase, before.price), (after.made[name], after.price)]
            rates = [work.tokens / paid_seconds(work, price) or None for work, price in works]
            for column, both in {
                "time_a_b": [paid_seconds(work, price) for work, price in works],
                "cost_a_b": [work.usd for work, _ in works],
                "tokens_s_a_b": rates if any(rates) else [],
                "change": [works[1][0].usd - phase.usd],
            }.items():
                words = shown[f"{stage}.{name}.{column}"]
                assert says(words, list(both)), (stage, name, column, words)
        line = next(line for line in table.splitlines() if re.match(rf"{stage} +\$", line))
        money = [value for value, _ in numbers(line)[:3]]
        expected = [before.made_usd, after.made_usd, after.made_usd - before.made_usd]
        assert money == pytest.approx(expected, rel=0.06)
    pictures = {
        "wins_by_gold": "win_rate_gold", "wins_by_reward": "win_rate_reward",
    }  # fmt: skip
    for title, metric in pictures.items():
        for letter, accounts in zip("ab", sides, strict=True):
            value, low, high = bounded(accounts, "evaluate", metric)
            heading = next(h for _, h, _ in page.figures if re.sub(r"\W+", "_", h.lower()) == title)
            drawn = page.figures["metrics", heading, letter]
            assert value is not None
            assert low is not None
            assert high is not None
            assert drawn.places() == pytest.approx([0.5, low, high - low, value], abs=1e-4)


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
        made = accounts.usd + accounts.saved_usd
        expected = {
            "usd": accounts.usd, "seconds": accounts.seconds, "made_usd": made,
            "started": accounts.events[0]["time"], "win_rate": rates[0],
            "win_rate_low": rates[1], "win_rate_high": rates[2],
            "gold_aligned": judged.get("gold_aligned"), "kl": judged.get("kl"),
        }  # fmt: skip
        assert {key: run[key] for key in expected} == pytest.approx(expected)
        assert (run["state"], run["method"]) == (accounts.state, "ppo")
        line = next(line for line in table.splitlines() if accounts.run_id in line)
        line = (
            line.partition(accounts.state)[2].replace("[", " ").replace("]", " ").replace(",", " ")
        )
        whole = [rates[0], *(100 * rate for rate in rates[1:] if rate is not None)]
        figures = [accounts.seconds, accounts.usd, *whole, expected["gold_aligned"], expected["kl"]]
        cells = line.partition("ppo")
        assert says(cells[0], list(figures[:-2])), line
        assert says("  ".join(cells[2].split()[:2]), list(figures[-2:])), line
        row = next(name for name in shown if accounts.run_id.replace("-", "_") in name)
        row = row.rpartition(".")[0]
        for column, values in {
            "cost": [made], "time": [accounts.seconds],
            "wins_over_sft": rates if rates[0] else [None],
            "gold": [judged.get("gold_aligned")], "kl": [judged.get("kl")],
        }.items():  # fmt: skip
            assert says(shown[f"{row}.{column}"], list(values)), (row, column)
    assert "the loss is nan at step 2." in content[0]["note"]
    assert "seed 1 -> 5" in content[0]["changed"]
    titles = [text for text in page.texts if re.match(r"2026\d+-\d+-\S+ \(ppo\), \$", text)]
    for text, accounts in zip(titles, runs[1:], strict=True):
        assert text.startswith(accounts.run_id)
        rates = [
            accounts.metrics("evaluate")[f"win_rate_gold{end}"] for end in ("", "_low", "_high")
        ]
        assert says(text.partition("(ppo)")[2], [accounts.usd + accounts.saved_usd, *rates])
    spent = sum(accounts.usd for accounts in runs)
    sentence = next(text for text in page.texts if "runs completed" in text)
    assert says(sentence, [2, 3, spent]), sentence
    links = [element["href"] for element in page.all("a")]
    assert set(links) == {f"../runs/pipeline/{SECOND}/report/report.html"}
