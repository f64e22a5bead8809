"""The page as a whole: whole, self-contained, the same twice, and written for every state a run can be in."""

import json
import re
import resource
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from config.errors import CostError, EnvironmentFault
from config.load import load
from config.schema import Params
from reporting.build import build_report
from reporting.key_figures import key_figure
from tests.reporting.plausible_run import BEGIN, write_cached_run, write_pipeline_run
from tests.support.clock import Clock

ROOT = Path(__file__).parents[2]
SECTIONS = {"evaluation", "cost", "samples", "frontier", "reward", "curves", "data", "parameters"}


@pytest.fixture
def params() -> Params:
    return load(Path(__file__).parents[2] / "recipes" / "demo.yaml")


class Page(HTMLParser):
    """Elements and text of a page; refuses one whose tags do not nest."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(content)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def all(self, tag: str) -> Iterator[dict[str, str | None]]:
        return (attributes for name, attributes in self.elements if name == tag)


def read(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def test_the_page_has_every_section_and_a_picture_of_everything(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    page = read(build_report(tmp_path, params))
    assert {section["id"] for section in page.all("section")} == SECTIONS
    assert {link["href"] for link in page.all("a")} == {f"#{name}" for name in SECTIONS}
    pictures = list(page.all("svg"))
    # sft, reward and ppo curves; frontier, calibration, lengths
    assert len(pictures) == 3 + 3 + 12 + 3
    assert all(picture["role"] == "img" and picture["aria-label"] for picture in pictures)
    frontier = [text for text in page.texts if re.match(r"update \d+: KL \(", text)]
    assert len(frontier) == 40


def test_the_page_asks_for_nothing_from_outside(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    content = build_report(tmp_path, params).read_text(encoding="utf-8")
    page = Page(content)
    policies = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.elements}
    assert not [attributes for _, attributes in page.elements if "src" in attributes]
    assert "url(" not in content
    assert "@import" not in content


def test_the_same_run_gives_the_same_bytes(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    first = build_report(tmp_path, params).read_bytes()
    assert build_report(tmp_path, params).read_bytes() == first


def test_a_reply_full_of_markup_stays_text(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    attack = '</p><script>alert(1)</script><img src=x onerror="x">\ud800\u202e\x00'
    row = {"prompt": [{"role": "user", "content": attack}], "base": attack, "sft": "", "aligned": "x" * 5000}
    (tmp_path / "evaluation/samples.jsonl").write_text(json.dumps(row) + "\n")
    page = read(build_report(tmp_path, params))
    assert not {"script", "img"} & {tag for tag, _ in page.elements}
    assert sum("<script>alert(1)</script>" in text for text in page.texts) == 2
    assert any("3,000 more characters" in text for text in page.texts)
    assert "(empty reply)" in page.texts


def test_replies_that_alignment_changed_most_come_first(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    gains = (0.1, 0.0, 0.5, -0.2, 0.3, 0.05)
    rows = [
        {"prompt": f"prompt {n}", "sft": "a", "aligned": "b", "gold_sft": 0.3, "gold_aligned": 0.3 + gain}
        for n, gain in enumerate(gains)
    ]
    (tmp_path / "evaluation/samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = read(build_report(tmp_path, params))
    shown = [text for text in page.texts if re.fullmatch(r"prompt \d", text)]
    assert shown == [f"prompt {n}" for n in (2, 4, 0, 1, 3, 5)]


def test_a_cached_run_shows_what_it_saved_and_still_shows_the_results(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    write_cached_run(tmp_path)
    page = read(build_report(tmp_path, params))
    assert page.texts.count("cached") == 5
    assert "Share of each stage" not in page.texts
    assert len(list(page.all("svg"))) == 21


@pytest.mark.parametrize("kept", [(), ("runs",), ("metrics",), ("runs", "metrics"), ("runs", "plots", "evaluation")])
def test_whatever_is_missing_the_page_is_written(tmp_path: Path, params: Params, kept: tuple[str, ...]) -> None:
    write_pipeline_run(tmp_path)
    for name in {"runs", "metrics", "plots", "evaluation"} - set(kept):
        (tmp_path / name).rename(tmp_path / f"gone-{name}")
    if not kept:
        with pytest.raises(CostError):
            build_report(tmp_path, params)
        return
    page = read(build_report(tmp_path, params))
    assert {section["id"] for section in page.all("section")} == SECTIONS


def test_every_single_metric_may_be_null(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    # metrics alone: hundreds of rows less to read each time
    (tmp_path / "runs").rename(tmp_path / "gone-runs")
    for path in (tmp_path / "metrics").glob("*.json"):
        whole = json.loads(path.read_text())
        for name in whole:
            path.write_text(json.dumps({**whole, name: None}))
            assert read(build_report(tmp_path, params)).elements
            key_figure(path.stem, {**whole, name: None})
        path.write_text(json.dumps(whole))


def test_a_run_that_was_killed_at_once_has_a_page(tmp_path: Path, params: Params) -> None:
    clock = Clock(tmp_path, "a", BEGIN)
    clock.pipeline("start")
    clock.attempt("data", 1, "start")
    page = read(build_report(tmp_path, params))
    assert "unfinished" in page.texts
    assert sum("has no results in this run" in text for text in page.texts) == 3


def test_a_curve_of_one_point_is_drawn(tmp_path: Path, params: Params) -> None:
    clock = Clock(tmp_path, "a", BEGIN)
    clock.pipeline("start")
    clock.attempt("ppo", 1, "start")
    clock.log("ppo", 1, 1, score=0.5, kl=0.0)
    page = read(build_report(tmp_path, params))
    assert len(list(page.all("svg"))) == 3  # score, KL, frontier
    assert all("nan" not in str(attributes.get("cx")) for attributes in page.all("circle"))


@pytest.mark.parametrize(
    ("method", "remedy"),
    [("ppo", "raise ppo.kl.coef"), ("rloo", "raise rloo.kl.coef"), ("grpo", "raise grpo.kl.coef")],
)
def test_score_against_kl_is_told_of_the_method_of_the_run(tmp_path: Path, method: str, remedy: str) -> None:
    write_pipeline_run(tmp_path)  # by PPO; what another method logged stands beside it
    clock = Clock(tmp_path, "later", BEGIN + 9000)
    clock.pipeline("start")
    clock.attempt(method, 7, "start")
    for update in range(1, 4):
        clock.log(method, 7, update, score=update / 7, kl=update / 3, equal_groups=0.0)
    clock.use(method, 7, "rollout", 3, 2.0, tokens=900)
    clock.done(method, 7, 3)
    page = read(build_report(tmp_path, chosen(method)))
    assert [text for text in page.texts if text.startswith("update 3: KL (")] == [
        "update 3: KL (nats per reply) 1.00, reward-model score 0.429"
    ]
    assert sum(remedy in text for text in page.texts) == 1
    assert ("Prompts without a lesson" in page.texts) is (method != "ppo")
    assert f"Phases of {method}" in page.texts


def test_dpo_has_its_margin_and_only_the_two_ends_of_its_way(tmp_path: Path) -> None:
    write_pipeline_run(tmp_path)
    clock = Clock(tmp_path, "later", BEGIN + 9000)
    clock.pipeline("start")
    clock.attempt("dpo", 1, "start")
    for step in range(20, 80, 20):
        clock.log(
            "dpo",
            1,
            step,
            loss=0.7 - step / 400,
            margin=step / 40,
            accuracy=0.5 + step / 200,
            chosen_logps=-20.0,
            rejected_logps=-25.0,
        )
    clock.use("dpo", 1, "reference", 0, 3.0, tokens=4000)
    clock.done("dpo", 1, 60)
    clock.pipeline("stage", stage="evaluate", cached=True, attempt=1)
    clock.pipeline("end", state="completed")
    page = read(build_report(tmp_path, chosen("dpo")))
    labels = [picture["aria-label"] for picture in page.all("svg")]
    assert [label for label in labels if label and label.startswith("dpo margin")] == [
        "dpo margin by step: train batch from 0.500 to 1.50"
    ]
    assert not [label for label in labels if label and label.startswith("ppo")]
    assert "KL (nats per reply)" in page.texts
    assert {section["id"] for section in page.all("section")} == SECTIONS


def chosen(method: str) -> Params:
    return load(Path(__file__).parents[2] / "recipes" / "demo.yaml", [f"align.method={method}"])


def test_steps_are_marked_with_whole_numbers(tmp_path: Path, params: Params) -> None:
    clock = Clock(tmp_path, "a", BEGIN)
    clock.pipeline("start")
    clock.attempt("ppo", 1, "start")
    for update in range(1, 5):
        clock.log("ppo", 1, update, score=update / 7, clip_fraction=0.0)
    page = read(build_report(tmp_path, params))
    assert [text for text in page.texts if text in ("1", "2", "3", "4")] == ["1", "2", "3", "4"] * 2
    assert not [text for text in page.texts if text.startswith("1.5") or text.startswith("−")]


def test_a_page_that_cannot_be_written_leaves_the_previous_one(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    path = build_report(tmp_path, params)
    before = path.read_bytes()
    write_cached_run(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # as on a disk with 50 kB left
    try:
        with pytest.raises(EnvironmentFault, match=r"report\.html"):
            build_report(tmp_path, params)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert [item.name for item in path.parent.iterdir()] == ["report.html"]


def test_a_reader_of_the_previous_page_keeps_it_whole(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    path = build_report(tmp_path, params)
    before = path.read_bytes()
    write_cached_run(tmp_path)
    with path.open("rb") as reader:
        build_report(tmp_path, params)
        assert reader.read() == before
    assert path.read_bytes() != before


def test_a_file_where_the_folder_should_be_is_a_plain_error(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    (tmp_path / "report").write_text("mine")
    with pytest.raises(EnvironmentFault, match="report"):
        build_report(tmp_path, params)
    assert (tmp_path / "report").read_text() == "mine"


def test_a_student_is_shown_with_what_it_kept_and_when_it_is_paid_back(tmp_path: Path) -> None:
    params = load(ROOT / "recipes/demo-distill.yaml")
    write_pipeline_run(tmp_path, "r1")
    clock = Clock(tmp_path, "r1", BEGIN + 9000)
    clock.attempt("distill", 1, "start")
    clock.use("distill", 1, "update", 1, 36.0, tokens=9000, sequences=400)
    clock.done("distill", 1, 1)
    clock.use("evaluate", 1, "generate", 4, 1.2, tokens=19_000, sequences=400)
    clock.pipeline("stage", stage="distill", attempt=1)
    sizes = {"parameters_student": 72_000, "parameters_teacher": 432_000, "agreement": 0.998}
    (tmp_path / "metrics/distill.json").write_text(json.dumps(sizes))
    metrics = json.loads((tmp_path / "metrics/evaluate.json").read_text())
    metrics |= {"gold_student": 0.871, "reward_student": 1.6, "length_student": 25.2}
    for name, value in (("win_rate_student", 0.48), ("quality_kept", 0.973)):
        metrics |= {name: value, f"{name}_low": value - 0.04, f"{name}_high": value + 0.04}
    (tmp_path / "metrics/evaluate.json").write_text(json.dumps(metrics))
    page = read(build_report(tmp_path, params))
    said = " | ".join(page.texts)
    assert "student" in {section["id"] for section in page.all("section")}
    assert "Quality kept | 97.3% (93.3% to 101.3%)" in said
    assert "A model with 16.7% of the weights." in said
    assert "Reply tokens per second | 8,400 | 4,200" in said
    # 36 s of the student at the saving of 1 / 4200 - 1 / 8400 seconds a token
    assert "Paid back after | 302 k reply tokens" in said
