"""Which variants share the folder of a stage."""

from pathlib import Path

from config.load import load
from config.schema import Params
from costs.planning.rows import count
from tasks.levers.stage_folders import lay_out, prepare, stage_folder, write_lock
from tests.conftest import ROOT

TINY = ROOT / "tests/e2e/tiny.yaml"


def params(*assignments: str) -> Params:
    return load(TINY, list(assignments))


def folder(stage: str, *assignments: str, base: tuple[str, ...] = ()) -> str:
    own = dict.fromkeys(("data", "sft", "reward"), params(*base)) | {"ppo": params(*assignments)}
    return stage_folder(Path("x"), own, stage).name


def test_a_folder_is_of_what_the_stage_reads_and_no_more() -> None:
    assert folder("ppo") == folder("ppo", "dpo.beta=0.7", "prices.usd_per_device_hour=9")
    assert folder("ppo") != folder("ppo", "ppo.lam=0.9")
    assert folder("ppo") != folder("ppo", "where.ppo.processes=2"), "the same result, another cost"
    assert folder("ppo") != folder("ppo", base=("sft.epochs=3",)), "another model to start from"
    assert folder("sft") == folder("sft", "ppo.lam=0.9")


def test_a_stage_finds_its_inputs_by_links(tmp_path: Path) -> None:
    chain = dict.fromkeys(("data", "sft", "reward", "ppo"), params())
    made = stage_folder(tmp_path, chain, "data") / "data/tokenizer"
    made.mkdir(parents=True)
    (made / "x").write_text("token")
    folder = prepare(tmp_path, chain, "sft")
    assert (folder / "data/tokenizer/x").read_text() == "token"
    assert load(folder / "params.yaml") == params()
    assert prepare(tmp_path, chain, "sft") == folder, "again"


def test_files_that_params_name_are_found_from_the_folder(tmp_path: Path) -> None:
    (tmp_path / "data/raw").mkdir(parents=True)
    (tmp_path / "data/raw/pairs.jsonl").write_text("{}\n")
    source = "{kind: file, path: data/raw/pairs.jsonl, format: pairs, columns: {}}"
    named = params(f"data.source={source}")
    lay_out(tmp_path, tmp_path / ".rlhf/levers/stages/x", named)
    assert (tmp_path / ".rlhf/levers/stages/x/data/raw/pairs.jsonl").read_text() == "{}\n"


def test_the_planner_counts_the_rows_of_prepared_data(tmp_path: Path) -> None:
    metrics = {"sft_train_rows": 77, "preference_train_rows": 5, "prompts_train_rows": 6}
    tokens = {
        f"{use}_train_tokens_{kind}": 9
        for use in ("sft", "preference", "prompts")
        for kind in ("mean", "max")
    }
    (tmp_path / "metrics").mkdir()
    import json

    (tmp_path / "metrics/data.json").write_text(json.dumps(metrics | tokens))
    write_lock(tmp_path, params())
    assert count(params(), tmp_path).sft == 77
