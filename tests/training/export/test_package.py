"""An export of a run: what others load from it replies as the run's own model does."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from jinja2 import TemplateError
from transformers import AutoModelForCausalLM, AutoTokenizer

from config.errors import ModelError
from tests.training.support.tiny import tokenizer
from training.export import gguf_file
from training.export.aligned import with_prompts_of_training
from training.export.package import export
from training.modeling.tokenizer import encode_prompt, encode_prompts, trained_tokenizer

pytestmark = pytest.mark.integration
FACTS = {
    "name": "helpdesk-assistant",
    "summary": "Alignment worked.",
    "run_id": "20261124-120000-a-run",
    "method": "ppo",
    "base": "weights drawn at random",
    "card": [("data", "helpdesk"), ("cost", "$0.0123")],
    "metrics": {"gold_aligned": "0.974"},
}


@pytest.fixture(scope="module")
def exported(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("export") / "out"
    export(finished, target, FACTS)
    return target


def test_the_weights_are_those_of_the_run(finished: Path, exported: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(exported)
    ours = AutoModelForCausalLM.from_pretrained(finished / "models/ppo")
    for name, weight in ours.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], weight), name


def test_the_chat_template_alone_gives_the_prompts_of_training(finished: Path, exported: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(exported)
    ours = AutoTokenizer.from_pretrained(finished / "data/tokenizer")
    lines = (finished / "data/prepared/prompts/test.jsonl").read_text().split("\n")[:-1]
    assert lines
    for prompt in (json.loads(line)["prompt"] for line in lines):
        ids = theirs.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        assert ids == encode_prompt(ours, prompt)


@pytest.mark.parametrize("template", ["{prompt}", 'Q: "{prompt}"\nA:\t', "\\{prompt} é"])
def test_any_prompt_template_becomes_a_chat_template(template: str) -> None:
    result = trained_tokenizer(["hello there"] * 2, 300, template)
    expected = encode_prompts(result, ["a 'b' {{c}}"])[0]
    result = with_prompts_of_training(result, is_plain=True)
    messages = [{"role": "user", "content": "a 'b' {{c}}"}]
    assert result.apply_chat_template(messages, return_dict=False) == expected
    for other in ([*messages, *messages], [{"role": "system", "content": "x"}]):
        with pytest.raises(TemplateError, match="trained on single prompts"):
            result.apply_chat_template(other)


def test_a_tokenizer_of_conversations_keeps_its_chat_template() -> None:
    before = tokenizer().chat_template
    assert with_prompts_of_training(tokenizer(), is_plain=False).chat_template == before


def test_quantising_is_compared_with_the_trained_model_and_in_the_card(exported: Path) -> None:
    content = json.loads((exported / "export.json").read_text())
    assert (content["differs"], content["context_length"]) == ([], 96)
    assert content["control_tokens"] == ["<bos>", "<eos>", "<pad>", "<spare>"]
    f32, q8, q4 = content["quantised"]
    assert [item["kind"] for item in (f32, q8, q4)] == ["f32", "q8_0", "q4_0"]
    assert (f32["flips"], f32["difference"]["mean"]) == (0, 0.0)
    assert q4["bytes"] < q8["bytes"] < f32["bytes"]
    assert 0 <= q8["flips"] <= q4["flips"] <= q4["prompts"]
    assert q4["difference"]["low"] <= q4["difference"]["mean"] <= q4["difference"]["high"]
    card = ModelCard.load(exported / "README.md")
    assert card.data.tags == ["rlhf", "ppo"]
    for words in ("20261124-120000-a-run", "| cost | $0.0123 |", "gguf/model-q4_0.gguf", "gold score"):
        assert words in card.text, words


def test_a_model_that_gguf_does_not_know_is_exported_without(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gguf_file, "ARCHITECTURES", ("gpt2",))
    export(finished, tmp_path / "out", FACTS)
    assert "cannot be written as GGUF" in caplog.text
    assert "--engine vllm" in caplog.text
    assert json.loads((tmp_path / "out/export.json").read_text())["quantised"] == []
    assert not (tmp_path / "out/gguf").exists()
    assert "GGUF" not in ModelCard.load(tmp_path / "out/README.md").text
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").num_parameters() > 0


def test_what_cannot_be_exported_leaves_the_export_before_it(finished: Path, exported: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(finished, broken)
    (broken / "models/ppo/model.safetensors").write_bytes(b"half")
    target = tmp_path / "out"
    shutil.copytree(exported, target)
    with pytest.raises(ModelError, match="models/ppo"):
        export(broken, target, FACTS)
    assert json.loads((target / "export.json").read_text())["run_id"] == FACTS["run_id"]
