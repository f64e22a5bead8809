"""Every figure of `rlhf report` against an auditor's own sums over the files of the run."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cli.commands.report import report
from config.workspace.kept import kept_params
from reporting.build import build_report
from reporting.inputs import read_findings
from reporting.summary import summary
from tests.audit.accounts import Accounts, rows_of
from tests.audit.checks import agrees, check_ledger, check_summary
from tests.audit.expected import PANELS, comparisons, curve, key_figure, report_figures, sequences, total_comparison
from tests.audit.ledgers import FIRST, ON_GPUS, SECOND, THIRD, write_ledgers
from tests.audit.page import Page, numbers, read, says

RUNS = (FIRST, SECOND)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ledgers")
    write_ledgers(folder)
    return folder


@pytest.fixture(scope="module", params=RUNS)
def accounts(root: Path, request: pytest.FixtureRequest) -> Accounts:
    return Accounts(root, request.param)


@pytest.fixture(scope="module")
def page(root: Path, accounts: Accounts) -> Page:
    return read(build_report(root, kept_params(root, accounts.run_id), accounts.run_id))


def printed(root: Path, *arguments: str, columns: int = 200) -> str:
    app = typer.Typer()
    app.command()(report)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)})
    assert done.exit_code == 0, done.exception
    return done.stdout


def test_the_books_show_what_could_be_confused(accounts: Accounts) -> None:
    """The fixture is worth auditing: no two sums are alike."""
    if accounts.run_id == SECOND:
        assert {name: account.price for name, account in accounts.stages.items()} == {
            "data": pytest.approx(1.3527), "sft": pytest.approx(1.3527), "reward": 4.7,
            "ppo": pytest.approx(1.3527), "evaluate": pytest.approx(1.3527),
        }  # fmt: skip
        assert [account.rented for account in accounts.stages.values()] == [2, 2, 4, 2, 2]
        assert [account.cached for account in accounts.stages.values()][:2] == [True, True]
        assert accounts.stages["ppo"].failed == accounts.stages["reward"].failed == 1
        assert accounts.stages["ppo"].retries == 1
    values = [
        value
        for stage in accounts.stages
        for value in accounts.metrics(stage).values()
        if isinstance(value, float) and value != 0.95
    ]
    shared = 2 * 3  # the baselines and the limit, which data and reward both write, with bounds
    assert len(set(values)) >= len(values) - shared


def test_every_named_figure_of_the_page_is_right(page: Page, accounts: Accounts) -> None:
    expected = report_figures(accounts)
    assert set(page.figures) == set(expected)
    wrong = {}
    for name, figure in expected.items():
        shown = page.figures[name]
        words = shown.words
        is_right = says(words, figure.numbers) and all(word in words for word in figure.words)
        if figure.places is not None:
            is_right &= shown.places() == pytest.approx(figure.places, abs=1e-4)
        if not is_right:
            wrong[name] = (words, shown.places(), figure)
    assert not wrong


def test_badges_and_sentences_are_right(page: Page, accounts: Accounts) -> None:
    tones = {"done": "good", "cached": "quiet", "failed": "bad"}
    states = [(f"badge {tones[account.state]}", account.state) for account in accounts.stages.values()]
    assert [(badge.classes[0], badge.words) for badge in page.badges] == [
        ("badge good", "Alignment worked"), ("badge good", "no reward hacking"), *states,
    ]  # fmt: skip
    judged = accounts.metrics("evaluate")
    verdict = next(text for text in page.texts if text.startswith("The aligned model wins"))
    expected: list[float | None] = [
        *(judged[f"win_rate_gold{end}"] for end in ("", "_low", "_high")),
        judged["ties_gold"], judged["prompts"], accounts.seconds, accounts.usd,
    ]  # fmt: skip
    expected += [accounts.wasted_usd] if accounts.wasted_usd else []
    expected += [accounts.saved_usd] if accounts.saved_usd else []
    assert says(verdict, expected), verdict
    point = next(text for text in page.texts if text.startswith("A point of win rate"))
    assert says(point, [0.5, accounts.usd_per_point]), point
    off = next(text for text in page.texts if text.startswith("Planned for the planned machine"))
    assert says(off, [total_comparison(accounts)["error"]]), off
    whiskers = next(text for text in page.texts if text.startswith("Whiskers"))
    assert says(
        whiskers,
        [
            judged["confidence"],
            *(judged[f"win_rate_gold{end}"] for end in ("", "_low", "_high")),
            *(judged[f"win_rate_reward{end}"] for end in ("", "_low", "_high")),
            judged["ties_gold"], judged["ties_reward"],
        ],
    ), whiskers  # fmt: skip
    data = accounts.metrics("data")
    refused = next(text for text in page.texts if "were refused" in text)
    share = data["rows_quarantined"] / data["rows_read"]
    assert says(refused, [data["rows_quarantined"], data["rows_read"], share]), refused


def test_facts_of_the_labels_are_right(page: Page, accounts: Accounts) -> None:
    data = accounts.metrics("data")
    shown = {
        "chosen_longer": "of the preferred replies are the longer one",
        "chosen_first": "of them were shown first",
        "gold_sft_mean": "mean gold score of the demonstrations",
        "baseline_longer_wins": "right by taking the longer reply",
        "baseline_bow": "right by a bag of words",
        "ties_dropped": "ties among annotators, dropped",
        "sft_duplicates": "duplicate demonstrations, dropped",
        "preference_duplicates": "duplicate pairs, dropped",
        "prompts_duplicates": "duplicate prompts, dropped",
        "contradictory_pairs": "pairs that contradict another, kept",
        "replies_unranked": "replies without a rank, not paired",
    }
    for name, words in shown.items():
        at = next(i for i, text in enumerate(page.texts) if text.strip() == words)
        assert says(page.texts[at - 1], [data[name]]), (name, page.texts[at - 1])


def test_every_curve_is_of_its_metric_and_every_sample_has_its_scores(page: Page, accounts: Accounts) -> None:
    labels = [svg["aria-label"] or "" for svg in page.all("svg")]
    for stage, panels in PANELS.items():
        for title, curves in panels.items():
            label = next(label for label in labels if label.startswith(f"{stage} {title} by"))
            parts = label.partition(": ")[2].split(", ")
            assert len(parts) == len(curves)
            for part, (words, metric) in zip(parts, curves.items(), strict=True):
                points = curve(accounts, stage, metric)
                assert part.startswith(f"{words} from ")
                assert says(part, [points[0][1], points[-1][1]]), (label, points)
    probes = [text for text in page.texts if re.match(r"(step|update) \d+: ", text)]
    sampled = [(stage, title, curves) for stage, panels in PANELS.items() for title, curves in panels.items()]
    expected = [
        [step, *(dict(curve(accounts, stage, metric))[step] for metric in curves.values())]
        for stage, _, curves in sampled
        for step, _ in curve(accounts, stage, next(iter(curves.values())))
    ]
    probes = [text for text in probes if "reward-model score" not in text]
    assert len(probes) == len(expected)
    for text, values in zip(probes, expected, strict=True):
        assert says(text, list(values)), (text, values)
    references = [text for text in page.texts if text in ("target", "best possible")]
    adaptive = accounts.params["ppo"]["kl"]["controller"] == "adaptive"
    assert references == ["best possible", *(["target"] if adaptive else [])]
    histogram = next(label for label in labels if label.startswith("Length of the compared"))
    assert says(histogram, [sequences(accounts)])
    samples = rows_of(accounts.file("evaluation/samples.jsonl"))
    scores = [text for text in page.texts if text.startswith("gold ") and " · reward " in text]
    replies = [
        (row[model], row[f"gold_{model}"], row[f"reward_{model}"])
        for row in samples
        for model in ("base", "sft", "aligned")
    ]
    assert [text for text in page.texts if re.match(r"the \w+ reply", text)] == [reply for reply, _, _ in replies]
    for text, (_, gold, reward) in zip(scores, replies, strict=True):
        assert says(text, [gold, reward]), text


def test_json_is_the_ledger_of_the_files(root: Path, accounts: Accounts) -> None:
    content = json.loads(printed(root, accounts.run_id, "--json"))
    check_ledger(content, accounts)
    devices = {stage["stage"]: stage["device"] for stage in content["stages"]}
    assert devices == {name: "cuda" if name in ON_GPUS else "cpu" for name in accounts.stages}


def lines(text: str, *start: str) -> Iterator[str]:
    """What follows the first words of the lines that begin with them."""
    for line in text.splitlines():
        if line.split()[: len(start)] == list(start):
            yield line.split(None, len(start))[-1] if line.split()[len(start) :] else ""


def plan_row(side: dict[str, float | None]) -> list[float | None]:
    """A comparison in the order of the terminal's table; memory is in MiB."""
    planned, measured = (side[f"{of}_peak_bytes"] for of in ("planned", "measured"))
    return [
        *(side[key] for key in ("planned_seconds", "measured_seconds", "error")),
        *(side[key] for key in ("planned_usd", "measured_usd")),
        *(None if value is None else value / 2**20 for value in (planned, measured)),
        side["error_peak_bytes"],
    ]


def test_the_terminal_shows_the_same_figures(root: Path, accounts: Accounts) -> None:
    shown = printed(root, accounts.run_id, "--costs")
    for stage, account in accounts.stages.items():
        figure = key_figure(stage, accounts.metrics(stage))
        row = next(lines(shown, stage))
        assert row.startswith(account.state)
        assert says(row, [account.spent.seconds, account.spent.usd, *figure.numbers]), row
        sides = comparisons(accounts, stage)
        for name, phase in account.phases.items():
            spent, *compared = lines(shown, stage, name)
            assert says(spent, [phase.seconds, phase.usd, phase.tokens or None, phase.peak_bytes or None]), spent
            assert len(compared) == (name in sides)
        for name, side in sides.items():
            assert says(list(lines(shown, stage, name))[-1], plan_row(side)), (stage, name)
    assert says(next(lines(shown, "total")), [accounts.seconds, accounts.usd])
    assert says(list(lines(shown, "total"))[-1], plan_row(total_comparison(accounts)))
    assert says(next(lines(shown, "Wasted")), [accounts.wasted_usd, accounts.saved_usd])
    assert says(next(lines(shown, "A", "point")), [0.5, accounts.usd_per_point])
    retries = [numbers(line)[0][0] for line in lines(shown, "Work", "done", "again")]
    assert retries == ([1.0] if accounts.run_id == SECOND else [])


def test_the_summary_has_the_same_figures(root: Path, accounts: Accounts) -> None:
    findings = read_findings(root, kept_params(root, accounts.run_id), accounts.run_id)
    check_summary(summary(findings), accounts)


def test_a_run_that_failed_shows_what_it_cost_and_why(root: Path) -> None:
    accounts = Accounts(root, THIRD)
    content = json.loads(printed(root, THIRD, "--json"))
    sums = {"total_usd": accounts.usd, "saved_usd": accounts.saved_usd, "waste_usd": 0.0}
    sums |= {"usd_per_win_rate_point": None, "total_seconds": accounts.seconds}
    agrees(content, sums)
    assert [stage["state"] for stage in content["stages"]] == ["cached", "cached", "failed"]
    shown = printed(root, THIRD)
    assert "the loss is nan at step 2." in next(lines(shown, "reward"))
    assert says(next(lines(shown, "total")), [accounts.seconds, accounts.usd])
    assert "Not evaluated. The run ended in stage reward" in shown
