"""The difference between two plans."""

from pathlib import Path

import pytest

from config.load import load
from costs.planning.compare import change, compare, markdown
from costs.planning.planner import plan
from costs.planning.plans import Plan
from costs.planning.target import find_target


def planned(*assignments: str, stages: tuple[str, ...] = ("sft", "ppo")) -> Plan:
    params = load(Path("recipes/demo.yaml"), list(assignments))
    return plan(params, find_target(params, None, 1, None, Path("nowhere")), stages)


def test_what_did_not_change_is_equal_and_what_did_is_reported() -> None:
    rows = {row.stage: row for row in compare(planned(), planned("ppo.updates=80"))}
    assert not rows["sft"].changed
    assert rows["ppo"].seconds[1] > 1.8 * rows["ppo"].seconds[0]
    assert rows["total"].usd[1] - rows["total"].usd[0] == pytest.approx(rows["ppo"].usd[1] - rows["ppo"].usd[0])


def test_a_stage_that_only_one_plan_has_is_new_or_gone() -> None:
    rows = {row.stage: row for row in compare(planned(stages=("sft",)), planned(stages=("ppo",)))}
    assert change(rows["sft"].usd) == "gone"
    assert change(rows["ppo"].usd) == "new"


def test_markdown_is_a_table_with_one_line_a_stage() -> None:
    text = markdown(compare(planned(), planned("ppo.updates=80")), "a.yaml", "b.yaml")
    # header, two stages, total
    assert sum(line.startswith("| ") for line in text.splitlines()) == 4
    assert "`a.yaml`" in text
