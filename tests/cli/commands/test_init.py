import json
import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cli.commands.init import chat_turn, fitting, overlay_of, wanted
from cli.main import app
from config.compose import compose
from config.errors import CostError, DataError, EnvironmentFault, ParamsError
from config.load import load, read
from config.workspace.study import read_study
from costs.planning.planner import plan
from costs.planning.target import find_target
from tasks.study.runs import works
from tests.conftest import ROOT

pytestmark = pytest.mark.usefixtures("quick_stages")

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
SOURCE = {"kind": "file", "path": "mine.csv", "format": "pairs", "columns": {"prompt": "question"}}
FOUND = {
    "file": "mine.csv", "format": "pairs", "pairs": 300, "good": 0, "bad": 0, "rows": 300, "source": SOURCE,
}  # fmt: skip
STAGES = ("data", "sft", "reward", "dpo", "evaluate")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_what_differs_from_the_base_is_all_that_a_recipe_has_to_say(path: Path) -> None:
    base, whole = read(ROOT / "recipes" / "base.yaml"), read(path)
    assert compose(base, overlay_of(base, whole)) == whole
    assert overlay_of(base, base) == {}


def test_a_source_of_another_kind_is_said_whole() -> None:
    base = {"source": {"kind": "file", "path": "a", "columns": {}}}
    whole = {"source": {"kind": "hub", "path": "a"}}
    assert compose(base, overlay_of(base, whole)) == whole


def test_a_recipe_is_written_for_data_and_a_device_and_never_replaced(project: Path) -> None:
    shutil.copytree(ROOT / "recipes", project / "recipes")
    rows = [{"question": f"where is {i}?", "chosen": f"it is {i} away.", "rejected": "no."} for i in range(60)]
    (project / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = ["init", "mine", "--data", "pairs.jsonl", "--hardware", "4090", "--usd-per-hour", "0.5"]
    with pytest.raises(EnvironmentFault, match=r"this machine has .*Add --elsewhere if the run"):
        CliRunner().invoke(app, command, catch_exceptions=False)
    command.append("--elsewhere")
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    written = project / "recipes" / "mine.yaml"
    said = yaml.safe_load(written.read_text())
    assert said["extends"] == "base"
    source = {"path": "pairs.jsonl", "columns": {"prompt": "question"}}
    assert said["data"] == {"source": source, "vote_source": None}
    params = load(written)
    assert (params.prices.device, params.prices.usd_per_device_hour) == ("rtx4090", 0.5)
    planned = plan(params, find_target(params, None, 1, None, project), ("sft", "reward", "ppo"))
    assert all(stage.fits for stage in planned.stages)
    before = written.read_bytes()
    with pytest.raises(Exception, match="already exists and is not replaced"):
        CliRunner().invoke(app, command, catch_exceptions=False)
    assert written.read_bytes() == before


def test_lengths_and_the_quarantine_limit_are_fitted_to_the_data(project: Path) -> None:
    shutil.copytree(ROOT / "recipes", project / "recipes")
    words = ["all", "the", "long", "words", "of", "a", "question", "that", "goes", "on", "and", "on"]
    rows = [
        {
            "prompt": f"{i} " + " ".join(words * (3 if i % 2 else 12)),
            "chosen": "" if i % 10 == 0 else f"it is {i} away, " + " ".join(words),
            "rejected": "no.",
        }
        for i in range(100)
    ]
    (project / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = CliRunner().invoke(app, ["init", "mine", "--data", "pairs.jsonl"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "Model: a small one with random weights, as this machine has no GPU" in said
    params = load(project / "recipes" / "mine.yaml")
    assert params.data.vote_source is None
    assert params.data.max_quarantine_fraction == pytest.approx(0.11)
    length = params.model.context_length
    assert 128 <= length < 384, "as long as the data needs, and no longer"
    assert params.reward.max_length == params.sft.max_length == length
    checked = CliRunner().invoke(
        app, ["data", "check", "pairs.jsonl", "--recipe", "recipes/mine.yaml", "--json"], catch_exceptions=False
    )
    assert checked.exit_code == 0
    assert json.loads(checked.output)["fit"]["too_long"] == 0


def test_what_does_not_fit_with_all_weights_learns_adapters_at_their_rate() -> None:
    model = "Qwen/Qwen2.5-7B"
    params = wanted(ROOT, "mine", FOUND, model, "NVIDIA H100 80GB HBM3", None, "dpo")
    result, note = fitting(params)
    assert note.startswith("Adapters learn")
    assert result.dpo is not None
    assert params.dpo is not None
    assert result.dpo.lora is not None
    assert result.dpo.learning_rate == pytest.approx(10 * params.dpo.learning_rate)
    shown = plan(result, find_target(result, None, 1, None, ROOT), STAGES)
    assert all(stage.fits for stage in shown.stages)
    with pytest.raises(CostError, match="fits t4 neither with all weights nor with adapters"):
        fitting(wanted(ROOT, "mine", FOUND, "Qwen/Qwen2.5-32B", "t4", None, "dpo"))


def test_without_a_gpu_a_small_shape_is_trained_from_nothing() -> None:
    params = wanted(ROOT, "mine", FOUND, None, None, None, "ppo")
    assert params.model.path is None
    assert params.prices.device is None
    assert params.data.source.model_dump(mode="json") == SOURCE


@pytest.mark.parametrize("name", ["max_position_embeddings", "n_positions"])
def test_a_models_folder_says_its_longest_context_and_its_pad_token(tmp_path: Path, name: str) -> None:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({name: 512}))
    tokens = {"pad_token": {"content": "<pad>"}, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    params = wanted(tmp_path, "mine", FOUND, "mine", "l4", 1.0, "ppo")
    assert (params.model.pad_token, params.model.context_length) == ("<pad>", 512)
    assert params.sft.max_length == 512


def test_data_without_preferences_make_no_recipe() -> None:
    result = {**FOUND, "pairs": 0, "format": "prompts"}
    with pytest.raises(DataError, match="has no preferences"):
        wanted(ROOT, "mine", result, None, None, None, "ppo")


def test_ratings_make_a_recipe_of_kto_with_a_function_that_judges(project: Path) -> None:
    shutil.copytree(ROOT / "recipes", project / "recipes")
    rows = [{"question": f"where is {i}?", "reply": f"it is {i} away.", "thumbs": "up" if i % 3 else "down"}
            for i in range(90)]  # fmt: skip
    (project / "thumbs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = ["init", "thumbs", "--data", "thumbs.jsonl"]
    with pytest.raises(
        DataError, match=r"thumbs\.jsonl has ratings and no preferences, .* --reward FILE\.py:FUNCTION"
    ):
        CliRunner().invoke(app, command, catch_exceptions=False)
    function = "recipes/right_reply.py:score"
    done = CliRunner().invoke(app, [*command, "--reward", function], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "kto" in done.output
    params = load(project / "recipes/thumbs.yaml")
    assert (params.align.method, params.data.source.format) == ("kto", "ratings")
    assert params.reward.path == function
    checked = CliRunner().invoke(app, ["data", "check", "thumbs.jsonl"], catch_exceptions=False)
    assert "90 rows give 60 good replies, 30 bad replies, 60 demonstrations, 90 prompts" in " ".join(
        checked.output.split()
    )


def test_for_a_file_in_no_known_layout_a_reader_is_written_to_be_filled_in(project: Path) -> None:
    shutil.copytree(ROOT / "recipes", project / "recipes")
    rows = [{"ask": f"How is {i}?", "left": f"Fine {i}.", "right": "No.", "winner": "left"} for i in range(60)]
    (project / "crowd.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = ["init", "mine", "--data", "crowd.jsonl"]
    with pytest.raises(DataError, match=r"readers/mine\.py has its first row: fill it in, then"):
        CliRunner().invoke(app, command, catch_exceptions=False)
    reader = project / "readers/mine.py"
    assert '"ask": "How is 0?"' in reader.read_text()
    with pytest.raises(DataError, match=r"readers/mine\.py exists and is not replaced"):
        CliRunner().invoke(app, command, catch_exceptions=False)
    filled = reader.read_text()
    for ours, theirs in (("prompt", "ask"), ("chosen", "left"), ("rejected", "right")):
        filled = filled.replace(f'"{ours}": row["..."]', f'"{ours}": row["{theirs}"]')
    reader.write_text(filled)
    done = CliRunner().invoke(app, [*command, "--reader", "readers/mine.py:read"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    source = load(project / "recipes/mine.yaml").data.source
    assert source.model_dump() == {"kind": "python", "path": "readers/mine.py:read", "files": ["crowd.jsonl"]}


def test_a_study_of_a_recipe_is_one_and_is_never_replaced(project: Path) -> None:
    shutil.copytree(ROOT / "recipes", project / "recipes")
    arguments = ["init", "rates", "--study", "recipes/demo.yaml"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.stdout == "studies/rates.yaml: edit its variants, then rlhf study studies/rates.yaml\n"
    content = read_study(project / "studies/rates.yaml")
    rates = [work.params.ppo.learning_rate for work in works(project, content)]
    assert rates == pytest.approx([3.0e-4, 1.5e-4, 6.0e-4])
    with pytest.raises(ParamsError, match=r"studies/rates.yaml already exists"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    with pytest.raises(ParamsError, match=r"--data FILE"):
        CliRunner().invoke(app, ["init", "other"], catch_exceptions=False)


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "bos", "expected"),
    [
        (CHATML, "<|im_start|>", "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"),
        ("{{ bos_token }}[{{ messages[0]['content'] }}]", "<s>", "[{prompt}]"),
        ("{{ raise_exception('no') }}", "<s>", None),
        ("nothing of it", None, None),
    ],
)
def test_a_plain_prompt_is_put_to_a_chat_model_as_its_template_has_a_turn(
    tmp_path: Path, source: str, bos: str | None, expected: str | None
) -> None:
    assert chat_turn(tmp_path) is None
    content = {"bos_token": {"content": bos} if bos else None, "chat_template": source}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    assert chat_turn(tmp_path) == expected
