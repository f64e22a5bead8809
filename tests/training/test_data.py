import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from config import jsonl
from config.errors import DataError, ParamsError
from config.load import read, validate, write
from config.records import UsageRow
from config.sections.data import HelpdeskSource
from training.data import SECTIONS, data
from training.modeling.tokenizer import (
    decode_response,
    encode_prompt,
    encode_response,
    encode_responses,
    load_tokenizer,
    prompt_text,
    render_prompt,
    rendering,
    trained_tokenizer,
)
from training.preparation.cleaning import same_prompt_key
from training.preparation.sources import local_files
from training.process.stage import Stage
from training.worlds import helpdesk
from training.worlds.world import world_of

PROJECT = Path(__file__).parents[2]
REAL = PROJECT / "tests/fixtures/real"
TREES = PROJECT / "data/samples/oasst-trees/trees.jsonl"
DATASETS = ("sft", "preference", "prompts")
HELPDESK = {
    "kind": "helpdesk",
    "sft_rows": 200,
    "preference_rows": 300,
    "prompt_rows": 100,
    "temperature": 0.12,
    "quality": 0.6,
}


def file_source(path: Path, form: str, **columns: str) -> dict[str, Any]:
    return {"kind": "file", "path": str(path), "format": form, "columns": columns}


def run(
    root: Path, source: dict[str, Any], recipe: str = "demo", model: dict[str, Any] | None = None, **settings: Any
) -> dict[str, Any]:
    """Run the stage in `root` and return its metrics. `settings` change the data section, `model` the model
    section.
    """
    content = read(PROJECT / f"recipes/{recipe}.yaml")
    content["data"] |= {"source": source, **settings}
    content["model"]["random"] |= {"vocab_size": 400}
    content["model"] |= model or {}
    write(validate(content, "test"), root / "params.yaml")
    stage = Stage("data", SECTIONS, local_files, root)
    with stage.held:  # several are opened in one process
        stage.begin()
        data(stage)
        stage.meter.close(0)
    return dict(json.loads((root / "metrics/data.json").read_text()))


def rows(root: Path, dataset: str, split: str) -> list[dict[str, Any]]:
    return list(jsonl.plain(root / f"data/prepared/{dataset}/{split}.jsonl"))


def prompts(root: Path, split: str) -> set[str]:
    return {same_prompt_key(row["prompt"]) for dataset in DATASETS for row in rows(root, dataset, split)}


def files(root: Path) -> dict[str, bytes]:
    outputs = [
        path for folder in ("data", "metrics", "plots") for path in (root / folder).rglob("*") if path.is_file()
    ]
    return {str(path.relative_to(root)): path.read_bytes() for path in outputs}


def pair_rows(count: int = 60) -> list[dict[str, Any]]:
    return [
        {"prompt": f"question {i}", "chosen": f"a good answer {i}", "rejected": f"a bad one {i}"} for i in range(count)
    ]


def jsonl_file(path: Path, content: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


# ---------------------------------------------------------------- the helpdesk world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("helpdesk")
    return root, run(root, HELPDESK)


def test_the_files_hold_what_the_metrics_say(world: tuple[Path, dict[str, Any]]) -> None:
    root, metrics = world
    assert metrics["rows_read"] == metrics["rows_kept"] == 600
    for dataset in DATASETS:
        for split in ("train", "test"):
            assert metrics[f"{dataset}_{split}_rows"] == len(rows(root, dataset, split)) > 0
    assert set(rows(root, "sft", "train")[0]) == {"prompt", "completion"}
    assert set(rows(root, "preference", "train")[0]) == {"prompt", "chosen", "rejected"}
    assert set(rows(root, "prompts", "train")[0]) == {"prompt"}


def test_no_prompt_is_in_two_splits_of_any_dataset(world: tuple[Path, dict[str, Any]]) -> None:
    root, _ = world
    assert not prompts(root, "train") & prompts(root, "test")


LARGE_WORLD = {
    "seed": 3, "items": 20, "problems": 8, "wordings": 3, "facts": 2, "fact_values": 12,
    "fact_words": 2, "sentence_words": 6, "vocabulary": 280,
}  # fmt: skip


def test_a_drawn_world_is_prepared_and_its_own_truth_reported(tmp_path: Path) -> None:
    source = {**HELPDESK, "world": LARGE_WORLD}
    metrics = run(tmp_path, source, model={"random": random_shape(1100)})
    sampled = world_of(HelpdeskSource.model_validate(source))
    assert metrics["gold_sft_mean"] == pytest.approx(0.6, abs=0.05)
    assert metrics["gold_sft_mean"] == helpdesk.mean_gold(rows(tmp_path, "sft", "train"), sampled)
    pairs = rows(tmp_path, "preference", "test")
    assert metrics["bayes_accuracy"] == helpdesk.bayes_accuracy(pairs, 0.12, sampled)


def test_a_world_with_more_words_than_the_vocabulary_has_entries_is_refused(tmp_path: Path) -> None:
    source = {**HELPDESK, "world": LARGE_WORLD}
    with pytest.raises(ParamsError, match="vocab_size=460 leaves 200 entries") as refusal:
        run(tmp_path, source, model={"random": random_shape(460)})
    enough = int(str(refusal.value).split(" would hold")[0].split()[-1])
    metrics = run(tmp_path, source, model={"random": random_shape(enough)})
    assert metrics["vocab_size"] == enough
    words = {word for row in rows(tmp_path, "sft", "train") for word in row["prompt"].split()}
    tokenizer = load_tokenizer(tmp_path / "data/tokenizer")
    split = [ids for ids in encode_responses(tokenizer, [f" {word}" for word in sorted(words)]) if len(ids) > 2]
    assert len(split) < 0.1 * len(words), "all but words that stand in one text alone"


def test_a_world_whose_exchanges_do_not_fit_in_the_context_is_refused_with_what_would_do(tmp_path: Path) -> None:
    source = {**HELPDESK, "world": {**LARGE_WORLD, "sentence_words": 20}}
    model = {"random": random_shape(1100)}
    with pytest.raises(ParamsError, match=r"context_length=96 is too short") as refusal:
        run(tmp_path, source, model=model)
    enough = int(str(refusal.value).split(" would do")[0].split()[-1])
    assert enough > 96
    run(tmp_path, source, model={**model, "context_length": enough})
    with pytest.raises(ParamsError, match="is too short"):
        run(tmp_path, source, model={**model, "context_length": enough - 1})


def test_where_words_in_pieces_fill_the_context_a_vocabulary_that_would_do_is_named(tmp_path: Path) -> None:
    source = {**HELPDESK, "world": LARGE_WORLD}
    with pytest.raises(ParamsError, match=r"and so would model.random.vocab_size=\d+") as refusal:
        run(tmp_path, source, model={"random": random_shape(512)})
    enough = int(str(refusal.value).split("vocab_size=")[1].split(".")[0])
    run(tmp_path, source, model={"random": random_shape(enough)})


def random_shape(vocab_size: int) -> dict[str, Any]:
    shape = read(PROJECT / "recipes/demo.yaml")["model"]["random"]
    return {**shape, "vocab_size": vocab_size}


def test_the_truth_of_the_world_is_reported_for_the_rows_that_were_kept(world: tuple[Path, dict[str, Any]]) -> None:
    root, metrics = world
    assert metrics["bayes_accuracy"] == helpdesk.bayes_accuracy(rows(root, "preference", "test"), 0.12)
    assert metrics["gold_sft_mean"] == helpdesk.mean_gold(rows(root, "sft", "train"))
    assert metrics["baseline_bow_low"] < metrics["baseline_bow"] < metrics["baseline_bow_high"]
    assert metrics["baseline_bow"] < metrics["bayes_accuracy"] + 0.1


def test_the_tokenizer_reads_every_row_back(world: tuple[Path, dict[str, Any]]) -> None:
    root, metrics = world
    tokenizer = load_tokenizer(root / "data/tokenizer")
    assert len(tokenizer) == metrics["vocab_size"] <= 400
    for row in rows(root, "sft", "test"):
        assert decode_response(tokenizer, encode_response(tokenizer, row["completion"])) == row["completion"]
    longest = max(
        len(encode_prompt(tokenizer, row["prompt"])) + len(encode_response(tokenizer, row[side]))
        for row in rows(root, "preference", "test")
        for side in ("chosen", "rejected")
    )
    assert metrics["preference_test_tokens_max"] == longest


def test_the_tokenizer_has_learnt_from_the_train_split_alone(world: tuple[Path, dict[str, Any]]) -> None:
    root, _ = world
    train = [row for dataset in DATASETS for row in rows(root, dataset, "train")]
    replies = [row[column] for row in train for column in ("completion", "chosen", "rejected") if column in row]
    prompts = [rendering()(row["prompt"]) for row in train]
    expected = trained_tokenizer(replies + prompts, 400)
    assert load_tokenizer(root / "data/tokenizer").get_vocab() == expected.get_vocab()


def test_the_plots_hold_the_baselines_and_every_sequence(world: tuple[Path, dict[str, Any]]) -> None:
    root, metrics = world
    with (root / "plots/data_baselines.csv").open() as file:
        assert {row["baseline"]: float(row["accuracy"]) for row in csv.DictReader(file)} == {
            "longer_wins": metrics["baseline_longer_wins"], "bow": metrics["baseline_bow"],
        }  # fmt: skip
    with (root / "plots/data_lengths.csv").open() as file:
        histogram = list(csv.DictReader(file))
    sequences = sum(
        int(row["sequences"]) for row in histogram if (row["dataset"], row["split"]) == ("preference", "train")
    )
    assert sequences == 2 * metrics["preference_train_rows"]


def test_usage_is_recorded_per_phase(world: tuple[Path, dict[str, Any]]) -> None:
    root, _ = world
    usage = jsonl.read(root / "runs/data/usage.jsonl", UsageRow).rows
    assert [row.phase for row in usage] == ["start", "read", "tokenise", "summarise", "other"]
    assert usage[1].sequences == 600
    assert usage[2].tokens > 10_000


def test_the_same_seed_gives_the_same_bytes(world: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run(tmp_path, HELPDESK)
    assert files(tmp_path) == files(world[0])


def test_a_stop_in_either_pass_keeps_the_previous_data_and_leaves_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, HELPDESK)
    before = files(tmp_path)
    for last in (1, 5):  # the third part of the first pass, and one of the second
        calls = iter(range(100))

        def stop(stage: Stage, last: int = last, calls: Iterator[int] = calls) -> None:
            if next(calls) == last:
                raise InterruptedError

        monkeypatch.setattr(Stage, "stop_if_requested", stop)
        with pytest.raises(InterruptedError):
            run(tmp_path, {**HELPDESK, "sft_rows": 300})
        assert files(tmp_path) == before


def test_more_rows_move_no_prompt_to_another_split(world: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run(tmp_path, {**HELPDESK, "preference_rows": 350, "sft_rows": 250})
    for split in ("train", "test"):
        assert prompts(world[0], split) <= prompts(tmp_path, split)


# ---------------------------------------------------------------- votes


def vote_lines(pairs: list[dict[str, str]], annotator: str = "ada") -> list[dict[str, Any]]:
    """One vote a line for the preferred reply, as rlhf label writes them; it is shown second in every other pair."""
    return [
        {
            "prompt": pair["prompt"],
            "response1": replies[0],
            "response2": replies[1],
            "annotator": annotator,
            "vote": 1 + i % 2,
            "left": 1,
        }
        for i, pair in enumerate(pairs)
        for replies in [(pair["chosen"], pair["rejected"])[:: 1 if i % 2 == 0 else -1]]
    ]


def test_votes_are_added_to_the_preferences_and_change_nothing_else(
    world: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    source = HelpdeskSource.model_validate({**HELPDESK, "preference_rows": 40})
    pairs = list(helpdesk.preferences(source, seed=99))
    jsonl_file(tmp_path / "votes.jsonl", vote_lines(pairs))
    with (tmp_path / "votes.jsonl").open("a") as file:
        file.write('{"prompt": "cut in the mid')
    metrics = run(tmp_path, HELPDESK, vote_source=file_source(Path("votes.jsonl"), "votes"))
    assert (metrics["vote_pairs"], metrics["quarantined_not_json"]) == (40, 1)
    for split in ("train", "test"):
        before, after = rows(world[0], "preference", split), rows(tmp_path, "preference", split)
        assert after[: len(before)] == before
        assert all(row in pairs for row in after[len(before) :])
    before, after = files(world[0]), files(tmp_path)
    same = [
        name for name in before if name.startswith(("data/tokenizer", "data/prepared/sft", "data/prepared/prompts"))
    ]
    assert len(same) >= 6
    assert [name for name in same if before[name] != after[name]] == []
    assert world[1]["bayes_accuracy"] is not None
    assert metrics["bayes_accuracy"] is None, "nobody knows how certain the votes of people are"


def test_what_users_said_is_added_as_ratings_and_pairs_and_changes_nothing_else(
    world: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"},
             {"role": "user", "content": "and now"}]  # fmt: skip
    said: list[dict[str, Any]] = [
        *({"prompt": f"where is my {i}", "completion": f"it is here {i}", "label": i % 3 == 0} for i in range(30)),
        {"prompt": "where is my lamp", "chosen": "we will trace it", "rejected": "no idea"},
        {"prompt": turns, "completion": "fine", "label": True},
    ]
    (tmp_path / "feedback.jsonl").write_text("\n".join(map(json.dumps, said)) + '\n{"prompt": "cut')
    metrics = run(tmp_path, HELPDESK, feedback_source="feedback.jsonl", max_quarantine_fraction=0.1)
    root, before = world
    assert metrics["ratings_train_rows"] + metrics["ratings_test_rows"] == 30
    assert metrics["ratings_test_rows"] > 0
    assert (metrics["quarantined_conversation"], metrics["quarantined_not_json"]) == (1, 1)
    preferences = ("preference_train_rows", "preference_test_rows")
    assert sum(metrics[name] for name in preferences) == sum(before[name] for name in preferences) + 1
    for name in ("sft/train.arrow", "prompts/train.arrow"):
        assert (tmp_path / "data/prepared" / name).read_bytes() == (root / "data/prepared" / name).read_bytes()
    rows = list(jsonl.plain(tmp_path / "data/prepared/ratings/train.jsonl"))
    assert all(row["label"] is (int(row["prompt"].split()[-1]) % 3 == 0) for row in rows)


def test_nobody_has_said_anything_yet(world: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    metrics = run(tmp_path, HELPDESK, feedback_source="feedback.jsonl")
    assert metrics == world[1]


def test_nobody_has_voted_yet(world: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    metrics = run(tmp_path, HELPDESK, vote_source=file_source(Path("votes.jsonl"), "votes"))
    assert metrics == world[1]


# ---------------------------------------------------------------- files


def test_demonstrations_and_prompts_come_from_the_pairs_unless_they_have_a_source(tmp_path: Path) -> None:
    pairs = file_source(jsonl_file(tmp_path / "pairs.jsonl", pair_rows()), "pairs")
    metrics = run(tmp_path, pairs)
    assert metrics["rows_read"] == 60
    assert metrics["sft_train_rows"] == metrics["preference_train_rows"] == metrics["prompts_train_rows"]
    assert all(row["completion"].startswith("a good answer") for row in rows(tmp_path, "sft", "train"))
    assert metrics["bayes_accuracy"] is None

    demonstrations = jsonl_file(
        tmp_path / "demonstrations.jsonl", [{"q": f"task {i}", "a": f"done {i}"} for i in range(40)]
    )
    prompt_file = jsonl_file(tmp_path / "asked.jsonl", [f"what is {i} ?" for i in range(30)])
    metrics = run(
        tmp_path,
        pairs,
        sft_source=file_source(demonstrations, "instructions", prompt="q", completion="a"),
        prompt_source=file_source(prompt_file, "prompts"),
    )
    assert metrics["rows_read"] == 130
    assert metrics["sft_train_rows"] + metrics["sft_test_rows"] == 40
    assert metrics["prompts_train_rows"] + metrics["prompts_test_rows"] == 30


def talk(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_prompt_is_rendered_in_one_way_whatever_source_it_came_from(tmp_path: Path) -> None:
    """Plain pairs beside demonstrations that are conversations: all prompts are conversations then."""
    pairs = pair_rows()
    demonstrations = jsonl_file(
        tmp_path / "demonstrations.jsonl", [{"prompt": talk(row["prompt"]), "completion": "done"} for row in pairs]
    )
    votes = jsonl_file(tmp_path / "votes.jsonl", vote_lines(pairs))
    run(
        tmp_path, file_source(jsonl_file(tmp_path / "pairs.jsonl", pairs), "pairs"),
        sft_source=file_source(demonstrations, "instructions"),
        vote_source=file_source(votes, "votes"),
    )  # fmt: skip
    tokenizer = load_tokenizer(tmp_path / "data/tokenizer")
    rendered: dict[str, set[str]] = {}
    for dataset in ("sft", "preference", "prompts"):
        for row in rows(tmp_path, dataset, "train"):
            assert isinstance(row["prompt"], list)
            rendered.setdefault(prompt_text(row["prompt"]), set()).add(render_prompt(tokenizer, row["prompt"]))
    assert len(rendered) > 20
    assert {len(ways) for ways in rendered.values()} == {1}


def test_votes_on_conversations_do_not_change_how_plain_prompts_are_rendered(tmp_path: Path) -> None:
    pairs = pair_rows()
    spoken = [{**row, "prompt": talk(row["prompt"])} for row in pairs]
    votes = jsonl_file(tmp_path / "votes.jsonl", vote_lines(spoken))
    with pytest.raises(DataError, match="rendered in two ways") as error:
        run(
            tmp_path,
            file_source(jsonl_file(tmp_path / "pairs.jsonl", pairs), "pairs"),
            vote_source=file_source(votes, "votes"),
        )
    assert "\n" not in str(error.value)


def test_refused_rows_are_in_the_quarantine_file_and_counted_by_reason(tmp_path: Path) -> None:
    bad = [{"prompt": "p", "chosen": True, "rejected": "b"}, {"prompt": "p", "chosen": "a", "rejected": " "}]
    metrics = run(tmp_path, file_source(jsonl_file(tmp_path / "pairs.jsonl", [*pair_rows(), *bad]), "pairs"))
    quarantine = list(jsonl.plain(tmp_path / "data/prepared/quarantine.jsonl"))
    assert [(row["reason"], row["number"], row["column"], row["original"]) for row in quarantine] == [
        ("wrong_type", 61, "chosen", bad[0]),
        ("empty", 62, "rejected", bad[1]),
    ]
    assert metrics["rows_kept"] + metrics["rows_quarantined"] == metrics["rows_read"] == 62
    assert (metrics["quarantined_wrong_type"], metrics["quarantined_empty"]) == (1, 1)


def test_above_the_limit_the_prepared_data_stays_and_the_refused_rows_can_be_looked_at(tmp_path: Path) -> None:
    source = tmp_path / "pairs.jsonl"
    run(tmp_path, file_source(jsonl_file(source, pair_rows()), "pairs"))
    before = files(tmp_path)
    jsonl_file(source, [*pair_rows(), *[{"prompt": "p", "chosen": "a", "rejected": ""}] * 20])
    with pytest.raises(DataError, match="20 empty"):
        run(tmp_path, file_source(source, "pairs"))
    assert files(tmp_path) == before
    assert len(list(jsonl.plain(tmp_path / "runs/data/quarantine.jsonl"))) == 20
    run(tmp_path, file_source(source, "pairs"), max_quarantine_fraction=0.3)
    assert not (tmp_path / "runs/data/quarantine.jsonl").exists()


def test_a_prompt_that_fills_the_context_is_quarantined_with_its_tokens(tmp_path: Path) -> None:
    long = {"prompt": "x y z " * 60, "chosen": "a", "rejected": "b"}
    metrics = run(tmp_path, file_source(jsonl_file(tmp_path / "pairs.jsonl", [*pair_rows(), long]), "pairs"))
    (refused,) = jsonl.plain(tmp_path / "data/prepared/quarantine.jsonl")
    assert (refused["reason"], refused["number"], refused["original"]) == ("prompt_fills_context", 61, long)
    assert metrics["rows_kept"] == 60
    assert max(metrics[f"prompts_{split}_tokens_max"] for split in ("train", "test")) < 96


def test_a_source_that_has_nothing_for_its_dataset_is_refused(tmp_path: Path) -> None:
    demonstrations = jsonl_file(tmp_path / "demonstrations.jsonl", [{"prompt": "p", "completion": "a"}])
    with pytest.raises(ParamsError, match=r"data\.source\.format=instructions"):
        run(tmp_path, file_source(demonstrations, "instructions"))
    with pytest.raises(ParamsError, match=r"data\.sft_source\.format=prompts"):
        run(tmp_path, HELPDESK, sft_source=file_source(demonstrations, "prompts"))


def test_the_tokenizer_of_a_base_model_is_used_with_the_prompt_template(tmp_path: Path) -> None:
    base = trained_tokenizer([f"question {i} a good answer" for i in range(40)], 350)
    base.save_pretrained(tmp_path / "base")
    source = file_source(jsonl_file(tmp_path / "pairs.jsonl", pair_rows()), "pairs")
    metrics = run(
        tmp_path, source, model={"path": str(tmp_path / "base"), "random": None}, prompt_template="Q: {prompt}\nA:"
    )
    tokenizer = load_tokenizer(tmp_path / "data/tokenizer")
    assert metrics["vocab_size"] == len(base)
    assert render_prompt(tokenizer, "question 1") == "Q: question 1\nA:"
    assert tokenizer.get_vocab() == base.get_vocab()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("content", "named"), [('{"prompt": "p", "cho', "line 1"), ('{"prompt": "p", "chosen": "a"}\n', "'rejected'")]
)
def test_the_process_ends_with_2_and_one_line_on_a_bad_file_and_leaves_no_output(
    tmp_path: Path, content: str, named: str
) -> None:
    (tmp_path / "pairs.jsonl").write_text(content)
    params = read(PROJECT / "recipes/demo.yaml")
    params["data"]["source"] = {"kind": "file", "path": "pairs.jsonl", "format": "pairs", "columns": {}}
    write(validate(params, "test"), tmp_path / "params.yaml")
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(
        [sys.executable, "-m", "training.data"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    messages = [line for line in done.stderr.splitlines() if line.startswith("data: ")]
    assert (done.returncode, len(messages)) == (2, 1)
    assert "pairs.jsonl" in messages[0]
    assert named in messages[0]
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "data").rglob("*"))


# ---------------------------------------------------------------- real data


def test_real_votes_come_through_the_recipe(tmp_path: Path) -> None:
    source = {**read(PROJECT / "recipes/votes-cpu.yaml")["data"]["source"], "path": str(REAL / "pandalm_votes.json")}
    # room for every prompt, so that only dirty rows are refused
    metrics = run(tmp_path, source, "votes-cpu", model={"context_length": 1024}, max_quarantine_fraction=0.1)
    assert (metrics["rows_read"], metrics["quarantined_wrong_type"], metrics["quarantined_empty"]) == (90, 6, 3)
    kept = sum(metrics[f"preference_{split}_rows"] for split in ("train", "test")) + metrics["preference_duplicates"]
    assert metrics["ties_dropped"] == 21  # 20 even, and one vote against two ties
    assert kept + metrics["ties_dropped"] + metrics["rows_quarantined"] == 90
    assert not prompts(tmp_path, "train") & prompts(tmp_path, "test")
    assert 0.3 < metrics["chosen_first"] < 0.7


def test_real_trees_demonstrations_and_prompts_come_through(tmp_path: Path) -> None:
    metrics = run(
        tmp_path,
        file_source(TREES, "trees"),
        "trees-cpu",
        model={"context_length": 100_000},
        max_prompt_chars=100_000,
        max_response_chars=100_000,
        sft_source=file_source(REAL / "gsm8k.jsonl", "instructions", prompt="question", completion="answer"),
        prompt_source=file_source(REAL / "oasst_prompts.jsonl", "prompts"),
    )
    assert metrics["rows_read"] == 1145 + 60 + 40
    assert metrics["rows_quarantined"] == 0
    assert (
        sum(metrics[f"preference_{split}_rows"] for split in ("train", "test"))
        == 732 - metrics["preference_duplicates"]
    )
    assert metrics["sft_train_rows"] + metrics["sft_test_rows"] == 60 - metrics["sft_duplicates"]
    assert not prompts(tmp_path, "train") & prompts(tmp_path, "test")
    assert isinstance(rows(tmp_path, "preference", "train")[0]["prompt"], list)
    assert isinstance(rows(tmp_path, "sft", "train")[0]["prompt"], list)
