import time
import urllib.request
from pathlib import Path

import pytest
import yaml
from dvc.utils.serialize import load_yaml
from hypothesis import example, given
from hypothesis import strategies as st

from config.compose import compose, flat, parse_yaml
from config.errors import ParamsError
from config.load import dump, load, read, to_yaml, validate, write
from config.ports import spare_proxy_for_local_servers
from config.schema import Params
from config.yaml_text import yaml_content
from tests.conftest import ROOT

DEMO = ROOT / "recipes" / "demo.yaml"


def demo() -> dict:
    return read(DEMO)


def test_the_nearest_valid_name_is_offered_for_a_misspelt_key() -> None:
    content = demo()
    content["ppo"]["learning_rte"] = content["ppo"].pop("learning_rate")
    with pytest.raises(ParamsError, match=r"ppo\.learning_rte.*did you mean learning_rate\?"):
        validate(content, "params.yaml")


@pytest.mark.parametrize(
    ("assignment", "told"),
    [
        ("evaluate.prompts=0", "evaluate.prompts=0 from --set: input should be"),
        ("evaluate.promts=9", "evaluate.promts is not a parameter from --set; did you mean"),
        ("data.source={kind: file, path: a}", "data.source.format is missing from --set;"),
        ("seed=1", "sft.epochs='x' in "),
        ("sft.epoch=1", "sft.epoch is not a parameter from --set;"),
    ],
)
def test_a_value_from_the_command_line_is_named_as_such(tmp_path: Path, assignment: str, told: str) -> None:
    content = demo()
    if assignment == "seed=1":
        content["sft"]["epochs"] = "x"
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ParamsError) as raised:
        load(tmp_path / "mine.yaml", [assignment])
    assert str(raised.value).startswith(told)


def test_a_missing_parameter_is_named() -> None:
    content = demo()
    del content["sft"]["epochs"]
    with pytest.raises(ParamsError, match=r"sft\.epochs is missing in params\.yaml"):
        validate(content, "params.yaml")


@pytest.mark.parametrize(("word", "meant"), [("no", "false"), ("Off", "false"), ("YES", "true")])
def test_a_boolean_of_yaml_1_1_is_refused_with_the_word_to_write(tmp_path: Path, word: str, meant: str) -> None:
    """DVC reads `no` as text: a run would start over where the plan saw no change."""
    path = tmp_path / "params.yaml"
    text = dump(load(DEMO))
    assert "activation_checkpointing: false" in text
    path.write_text(text.replace("activation_checkpointing: false", f"activation_checkpointing: {word}"))
    with pytest.raises(ParamsError, match=f"activation_checkpointing='{word}' .* write {meant}"):
        load(path)
    with pytest.raises(ParamsError, match=f"from --set.* write {meant}"):
        load(DEMO, [f"sft.activation_checkpointing={word}"])


def test_numbers_are_what_dvc_reads(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    text = dump(load(DEMO, ["seed=7", "sft.learning_rate=2.0e-5"]))
    path.write_text(text.replace("seed: 7", "seed: 010").replace("2.0e-05", "1e-5"))
    params = load(path)
    assert (params.seed, params.sft.learning_rate) == (10, 1e-5)
    assert load_yaml(path)["seed"] == 10


@given(st.text(alphabet="0123456789eExob_.:+-nyfalsot ~'#\n\t", max_size=9))
@example("1234e56")  # the beginning of a revision
@example("0o17")
@example("089")
@example("no")
def test_every_tool_reads_the_text_that_was_written(text: str) -> None:
    written = to_yaml({"revision": text})
    assert parse_yaml(written) == yaml.safe_load(written) == {"revision": text}


def test_overrides_reach_any_depth_and_keep_their_types() -> None:
    content = compose(
        demo(), {}, ["ppo.kl.coef=1e-3", "sft.max_steps=7", "model.random.tie_embeddings=false", "sft.max_steps=8"]
    )
    params = validate(content, "here")
    assert (params.ppo.kl.coef, params.sft.max_steps, params.model.random and params.model.random.tie_embeddings) == (
        0.001,
        8,
        False,
    )


@pytest.mark.parametrize("assignment", ["sft.epochs", "=3", "seed.deeper=1"])
def test_an_assignment_that_names_no_parameter_is_refused(assignment: str) -> None:
    with pytest.raises(ParamsError):
        compose(demo(), {}, [assignment])


@pytest.mark.parametrize(
    "assignment",
    [
        "ppo.num_mini_batches=3",
        "sft.micro_batch_size=5",
        "ppo.responses_per_prompt=7",
        "sft.max_length=97",
        "model.path=there",
    ],
)
def test_impossible_combinations_name_both_values_and_the_file(assignment: str) -> None:
    with pytest.raises(ParamsError, match=r"params\.yaml") as caught:
        validate(compose(demo(), {}, [assignment]), "params.yaml")
    assert "\n" not in str(caught.value)
    assert assignment.split("=")[1] in str(caught.value)


def test_what_is_dumped_loads_as_the_same_params(tmp_path: Path) -> None:
    params = load(DEMO, ["sft.learning_rate=1e-5", "data.prompt_template='a {prompt}: ü'"])
    assert "learning_rate: 1.0e-05" in dump(params)
    (tmp_path / "params.yaml").write_text(dump(params), encoding="utf-8")
    assert load(tmp_path / "params.yaml") == params


def test_an_unchanged_params_file_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    write(load(DEMO), path)
    before = path.stat().st_mtime_ns
    write(load(DEMO), path)
    assert path.stat().st_mtime_ns == before
    write(load(DEMO, ["seed=9"]), path)
    assert load(path).seed == 9
    assert list(tmp_path.iterdir()) == [path]


def test_comments_stay_in_a_params_file_that_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    text = f"# my own\n{dump(load(DEMO))}"
    path.write_text(text, encoding="utf-8")
    write(load(DEMO), path)
    assert path.read_text(encoding="utf-8") == text


def test_a_params_file_that_extends_another_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(f"extends: {DEMO}\n", encoding="utf-8")
    write(load(path), path)
    assert yaml.safe_load(path.read_text(encoding="utf-8")) == yaml.safe_load(dump(load(DEMO)))


@pytest.mark.parametrize(
    ("content", "words"), [(b"\xff\xfe\x00", "UTF-8"), (b"a: [", "line 1"), (b"- 1\n", "list"), (b"", "NoneType")]
)
def test_a_broken_file_is_one_line(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "p.yaml").write_bytes(content)
    with pytest.raises(ParamsError, match=words) as caught:
        load(tmp_path / "p.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_every_recipe_is_valid(recipe: Path) -> None:
    assert isinstance(load(recipe), Params)


def test_base_is_whole_and_every_other_recipe_is_laid_over_it() -> None:
    for recipe in (ROOT / "recipes").glob("*.yaml"):
        chain = [recipe.stem]
        while name := yaml.safe_load(recipe.with_stem(chain[-1]).read_text()).get("extends"):
            chain.append(name)
        assert chain[-1] == "base"


def test_a_recipe_says_only_what_differs() -> None:
    for recipe in (ROOT / "recipes").glob("*.yaml"):
        content = yaml.safe_load(recipe.read_text(encoding="utf-8"))
        if "extends" in content:
            under = dict(flat(read(recipe.with_stem(content.pop("extends")))))
            same = [key for key, value in flat(content) if under.get(key, ...) == value]
            assert [key for key in same if not key.endswith(".kind")] == [], recipe.name


def test_aliases_that_expand_without_end_are_refused_at_once(tmp_path: Path) -> None:
    levels = ["l0: &l0 [a, a, a, a, a, a, a, a, a]"]
    levels += [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 9)]
    path = tmp_path / "aliases.yaml"
    path.write_text("extends: base\nbudget:\n  max_usd:\n" + "".join(f"    {level}\n" for level in levels))
    began = time.monotonic()
    with pytest.raises(ParamsError, match=r"the aliases \(\*name\) of this YAML expand to more than 100,000 values"):
        load(path)
    with pytest.raises(ParamsError, match="expand to more"):
        yaml_content("a: &a [*a]")
    assert time.monotonic() - began < 5
    assert yaml_content("a: &a [1, 2]\nb: [*a, *a]\nc: '*'") == {"a": [1, 2], "b": [[1, 2], [1, 2]], "c": "*"}


def test_servers_of_this_machine_are_asked_directly_whatever_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.com")
    monkeypatch.setenv("no_proxy", "")
    spare_proxy_for_local_servers()
    for address in ("127.0.0.1", "localhost"):
        assert urllib.request.proxy_bypass_environment(address)
    assert urllib.request.proxy_bypass_environment("example.com")
    assert not urllib.request.proxy_bypass_environment("other.org")
