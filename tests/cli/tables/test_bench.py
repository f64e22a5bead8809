"""The tables of serving fit a terminal of 80 columns, whatever was measured."""

import io

from rich.console import Console, RenderableType

from cli.tables.bench import bench_view, plan_view, usd
from config.load import load
from costs.planning.serving import plan_serving
from costs.planning.target import find_target
from tests.conftest import ROOT
from tests.support.benchmarks import benchmark


def shown(view: RenderableType) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def test_a_benchmark_has_a_row_a_load_and_the_prices_of_its_knee() -> None:
    result = shown(bench_view(benchmark("q8_0", {1: 100.0, 2: 12345.0, 1024: 900.0}), "run", None))
    assert max(map(len, result.splitlines())) <= 80
    assert [line.split()[0] for line in result.splitlines()[2:5]] == ["1", "2", "1024"]
    assert "Knee: concurrency 2; p95 TPOT has doubled at 1024." in result
    assert "At $3.6 an hour" in result


def test_a_plan_fits_too() -> None:
    params = load(ROOT / "recipes/gpu-24gb.yaml")
    target = find_target(params, "a100-80", 1, None, ROOT)
    result = shown(plan_view(plan_serving(params, target, "f32", 256, (1, 64, 256), 500.0)))
    assert max(map(len, result.splitlines())) <= 80
    assert "500 requests/s:" in result
    assert "a month" in result


def test_prices_have_no_powers_of_ten() -> None:
    assert [usd(item) for item in (None, 12.345, 0.01234)] == ["-", "$12.35", "$0.0123"]
