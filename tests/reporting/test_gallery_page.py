import re
from pathlib import Path

from reporting.gallery_page import gallery_page
from reporting.past_runs import PastRun


def test_every_run_that_was_evaluated_is_a_dot_at_its_cost_and_win_rate(tmp_path: Path) -> None:
    runs = [
        PastRun("cheap", "completed", 1.0, "ppo", 9.0, 0.1, 0.6, 0.5, 0.7, made_usd=1.0),
        PastRun("dear", "completed", 2.0, "dpo", 9.0, 0.2, 0.8, 0.7, 0.9, made_usd=4.0),
        PastRun("broken", note="its params are gone"),
    ]
    page = gallery_page(tmp_path, runs, tmp_path / "report" / "all.html")
    dots = re.findall(r'<circle class="dot (\w+)" cx="([\d.]+)" cy="([\d.]+)"', page)
    assert [tone for tone, _, _ in dots] == ["accent", "second"]
    (x_cheap, y_cheap), (x_dear, y_dear) = ((float(x), float(y)) for _, x, y in dots)
    assert x_cheap < x_dear
    assert y_cheap > y_dear  # y grows downwards
    whiskers = re.findall(r'<line class="whisker \w+"[^>]* y1="([\d.]+)"[^>]* y2="([\d.]+)"', page)
    assert [float(low) > float(high) for low, high in whiskers] == [True, True]
    assert "2 of 3 runs completed, $0.30 spent." in page
    assert "its params are gone" in page
