"""`dvc plots show` draws its page without asking any network."""

import csv
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import yaml
from playwright.sync_api import Page, expect

from tests.conftest import ROOT

ROWS = {
    "sft": [{"step": step, "loss": 3 / (step + 1)} for step in range(20)],
    "ppo": [{"step": step, "score": step / 10, "kl": step / 5, "length": 20} for step in range(20)],
    "data_lengths": [
        {"dataset": name, "split": split, "tokens": tokens, "sequences": tokens + 1}
        for name in ("sft", "preference")
        for split in ("train", "test")
        for tokens in (8, 16, 24)
    ],
    "data_baselines": [{"baseline": "longer wins", "accuracy": 0.6}],
    "evaluate": [
        {"metric": metric, "model": model, "value": value}
        for metric in ("gold", "kl")
        for model, value in (("base", -0.5), ("sft", 0.2), ("aligned", 0.9))
    ],
}


def plots_page(root: Path) -> Path:
    """What `dvc plots show` makes of these rows with the project's plots and page."""
    shutil.copytree(ROOT / ".dvc" / "plots", root / ".dvc" / "plots")
    shutil.copyfile(ROOT / ".dvc" / "config", root / ".dvc" / "config")
    (root / ".dvc" / "config.local").write_text("[core]\n    no_scm = true\n", "utf-8")
    pipeline = yaml.safe_load((ROOT / "dvc.yaml").read_text("utf-8"))
    (root / "dvc.yaml").write_text(yaml.safe_dump({"plots": pipeline["plots"]}), "utf-8")
    (root / "plots").mkdir()
    for name, rows in ROWS.items():
        with (root / "plots" / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    command = [sys.executable, "-m", "dvc", "plots", "show", "--quiet"]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    return root / "dvc_plots" / "index.html"


def test_dvc_plots_are_drawn_offline(tmp_path: Path, page: Page, picture: Callable[[Page, str], None]) -> None:
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    result = plots_page(tmp_path).as_uri()
    page.goto(result)
    expect(page.get_by_role("heading", name="SFT training loss")).to_be_visible()
    assert requests == [result]
    headings = page.locator("h2").all_inner_texts()
    assert len(headings) == 8, headings  # stages that have not run draw nothing
    points = page.locator("#PPO_score_against_KL circle")
    expect(points).to_have_count(20)
    kl, score = (
        [float(at or "nan") for at in points.evaluate_all(f"all => all.map(c => c.getAttribute('{side}'))")]
        for side in ("cx", "cy")
    )
    assert kl == sorted(kl)
    assert score == sorted(score, reverse=True)  # y grows downwards
    bars = page.locator("[id^=Base] rect")
    expect(bars).to_have_count(6)
    page.set_viewport_size({"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    picture(page, "dvc-plots")
