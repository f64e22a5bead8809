"""The files of a finished model are those of `save_pretrained` and `save_file`, byte for byte, however the model is
divided, and no process ever holds more than a tensor of it.
"""

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests.training.distributed.test_shards import together
from tests.training.modeling.test_adapters import lora, policy, stir
from tests.training.support.divided import SHAPES, SHARD_BYTES, built, divided, model_bytes
from training.distributed import model_files
from training.distributed.model_files import save_adapter, save_model
from training.modeling.adapters import WEIGHTS, adapter_tensors, add_adapter


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone, in which tensors are divided, into one part."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Gathered:
    """Counts the bytes of whole tensors that are alive at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.most, self.count = 0, 0, 0
        gather = DTensor.full_tensor

        def counted(tensor: DTensor, **options: object) -> Tensor:
            whole = gather(tensor, **options).clone()  # of one part there is nothing to gather
            size = whole.nbytes
            self.now, self.count = self.now + size, self.count + 1
            self.most = max(self.most, self.now)
            # of the memory, not of the tensor: a view of it keeps it
            weakref.finalize(whole.untyped_storage(), self.free, size)
            return whole

        monkeypatch.setattr(DTensor, "full_tensor", counted)

    def free(self, size: int) -> None:
        self.now -= size


@pytest.mark.parametrize("shape", SHAPES)
def test_a_divided_model_is_saved_as_the_whole_one_with_one_tensor_gathered_at_a_time(
    shape: str, tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, model = built(shape), divided(shape)
    for bytes_of_a_file in (model_bytes(shape) // 3, 10**9):
        ours, theirs = (tmp_path / f"{bytes_of_a_file}-{name}" for name in ("ours", "theirs"))
        whole.save_pretrained(theirs, max_shard_size=bytes_of_a_file)
        with monkeypatch.context() as patch:
            gathered = Gathered(patch)
            save_model(ours, model, bytes_of_a_file)
        if shape != "experts" or bytes_of_a_file == 10**9:
            assert files(ours) == files(theirs)  # transformers keeps the experts of a layer together
        assert (len(list(ours.glob("*.safetensors"))) > 1) == (bytes_of_a_file < 10**9)
        assert gathered.count == len(list(whole.parameters()))  # tied ones once
        assert gathered.most == max(p.nbytes for p in whole.parameters())
        assert gathered.most < 0.5 * model_bytes(shape)
        loaded = AutoModelForCausalLM.from_pretrained(ours)
        for name, parameter in loaded.named_parameters():
            assert torch.equal(parameter, whole.get_parameter(name)), name


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="resets peaks as Linux does")
def test_two_processes_write_the_files_of_one_and_grow_by_little(tmp_path: Path) -> None:
    grown = together("models", tmp_path, 2)
    for shape in SHAPES:
        built(shape).save_pretrained(tmp_path / f"{shape}-alone", max_shard_size=SHARD_BYTES)
        assert files(tmp_path / shape) == files(tmp_path / f"{shape}-alone"), shape
    assert len(list((tmp_path / "wide").glob("*.safetensors"))) > 5
    assert [process["grown"] < 0.2 * model_bytes("wide") for process in grown] == [True] * 2, grown


def test_an_adapter_is_written_as_safetensors_writes_it(tmp_path: Path) -> None:
    model = policy()
    add_adapter(model, lora(), "sft", 1, "sft.lora")
    stir(model, "sft")
    score = nn.Linear(16, 1, bias=False)
    save_adapter(tmp_path / "ours", model, "sft", "../base", None, score)
    stored = {
        name: tensor.detach().contiguous() for name, tensor in adapter_tensors(model, "sft", score.weight).items()
    }
    save_file(stored, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours" / WEIGHTS).read_bytes() == (tmp_path / "theirs").read_bytes()
    assert load_file(tmp_path / "ours" / WEIGHTS).keys() == stored.keys()


def test_what_is_converted_only_together_is_gathered_together(
    tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def joined(model: object, state: dict[str, Tensor]) -> dict[str, Tensor]:
        q, k = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qk")
        others = {name: tensor for name, tensor in state.items() if name not in (q, k)}
        if q not in state and k not in state:
            return others
        return {**others, "model.layers.0.qk": torch.cat([state[q], state[k]])}

    monkeypatch.setattr(model_files, "revert_weight_conversion", joined)
    whole, model = built("experts"), divided("experts")
    save_model(tmp_path, model)
    stored, attention = load_file(tmp_path / "model.safetensors"), whole.model.layers[0].self_attn
    both = torch.cat([attention.q_proj.weight, attention.k_proj.weight])
    assert torch.equal(stored["model.layers.0.qk"], both)
    assert len(stored) == len(list(whole.parameters())) - 1


def test_types_of_any_width_and_tensors_without_elements_stand_where_the_format_wants_them(
    tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built("tied").to(torch.bfloat16)
    model.register_buffer("step", torch.tensor(7))
    model.register_buffer("none", torch.zeros(0, 3))
    model.register_buffer("flags", torch.tensor([True, False, True]))
    model.save_pretrained(tmp_path / "theirs")
    fully_shard(model)
    save_model(tmp_path / "ours", model)
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
