import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from config.errors import ModelError
from config.sections.model import Model
from tests.training.support.tiny import FAMILIES, policy, reward_model, settings, tokenizer
from training.modeling.models import (
    base_model,
    check_folder,
    load_policy,
    load_reward_model,
    new_reward_model,
    without_dropout,
)
from training.modeling.score_head import init_head
from training.modeling.tokenizer import trained_tokenizer
from training.worlds.world import BY_HAND

IDS = torch.tensor([[5, 9, 14, 200]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    policy().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def one_line(error: pytest.ExceptionInfo[ModelError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


# ---------------------------------------------------------------- building


@pytest.mark.parametrize("family", FAMILIES)
def test_the_base_model_has_the_shape_asked_for_and_the_weights_of_its_seed(family: str) -> None:
    first, same, other = (base_model(settings(family), tokenizer(), seed) for seed in (1, 1, 2))
    assert (first.config.num_hidden_layers, first.config.hidden_size, first.config.vocab_size) == (
        2,
        32,
        len(tokenizer()),
    )
    assert first.config.tie_word_embeddings is (family != "qwen2")
    weights = [next(model.parameters()) for model in (first, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("family", FAMILIES)
def test_random_matrices_are_drawn_by_the_inputs_they_have(family: str) -> None:
    sizes = {"width": 128, "layers": 8, "mlp_width": 512, "heads": 4, "kv_heads": 4}
    given = settings(family)
    assert given.random is not None
    model = base_model(given.model_copy(update={"random": given.random.model_copy(update=sizes)}), tokenizer(), 1)
    stds = {name: weights.std().item() for name, weights in model.named_parameters()}
    layer = "transformer.h.3" if family == "gpt2" else "model.layers.3"
    names = {"gpt2": ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}.get(
        family, ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    )
    result = [stds[f"{layer}.{name}.weight"] for name in names]
    expected = [128**-0.5, (128 * 16) ** -0.5, 128**-0.5, (512 * 16) ** -0.5]
    assert result == pytest.approx(expected, rel=0.03)
    embedding = model.get_input_embeddings().weight
    tied = given.random.tie_embeddings
    assert embedding.std().item() == pytest.approx(0.02 if tied else 0.3, rel=0.05)
    if not tied:
        head = model.get_output_embeddings().weight
        assert head.std().item() == pytest.approx(128**-0.5, rel=0.05)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_knows_the_special_tokens(family: str) -> None:
    config = base_model(settings(family), tokenizer(), 1).config
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_says_the_same(family: str, tmp_path: Path) -> None:
    saved = policy(family=family)
    saved.save_pretrained(tmp_path / "model")
    loaded = load_policy(tmp_path / "model", settings(family), tokenizer()).eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS).logits, saved(input_ids=IDS).logits)


def test_a_base_model_is_loaded_from_its_path(folder: Path) -> None:
    named = Model(
        path=str(folder),
        revision=None,
        random=None,
        pad_token=None,
        context_length=96,
        dtype="fp32",
        quantisation=None,
        attention="sdpa",
    )
    loaded = base_model(named, tokenizer(), seed=99)
    assert torch.equal(next(loaded.parameters()), next(policy().parameters()))


def test_no_role_drops_out() -> None:
    layer = nn.Sequential(nn.Dropout(0.5), nn.MultiheadAttention(4, 2))
    layer[1].attention_dropout = 0.3
    without_dropout(layer)
    assert layer[0].p == 0.0
    assert layer[1].attention_dropout == 0.0


@pytest.mark.parametrize("family", FAMILIES)
def test_models_trained_with_dropout_are_loaded_without(family: str, tmp_path: Path) -> None:
    model = policy(family=family)
    for name in ("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if hasattr(model.config, name):
            setattr(model.config, name, 0.5)
    model.save_pretrained(tmp_path / "model")
    loaded = load_policy(tmp_path / "model", settings(family), tokenizer()).train()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS).logits, policy(family=family)(input_ids=IDS).logits)


# ---------------------------------------------------------------- reward models


def test_a_heads_weights_have_standard_deviation_one_over_root_of_width_plus_one_and_no_bias() -> None:
    head = nn.Linear(9999, 1)
    init_head(head, seed=3)
    weights = head.weight.detach()
    assert float(weights.std()) == pytest.approx(1 / math.sqrt(10_000), rel=0.03)
    assert float(weights.mean()) == pytest.approx(0, abs=5e-4)
    assert head.bias.item() == 0.0
    again, other = nn.Linear(9999, 1), nn.Linear(9999, 1)
    init_head(again, seed=3)
    init_head(other, seed=4)
    assert torch.equal(head.weight, again.weight)
    assert not torch.equal(head.weight, other.weight)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("saved", [True, False], ids=["from its folder", "from memory"])
def test_a_reward_model_stands_on_the_trunk_of_the_language_model(family: str, saved: bool, tmp_path: Path) -> None:
    trunk = policy(family=family)
    trunk.save_pretrained(tmp_path / "trunk")
    model = new_reward_model(tmp_path / "trunk" if saved else trunk, settings(family), tokenizer(), seed=7).eval()
    with torch.no_grad():
        assert torch.equal(
            model.base_model(input_ids=IDS).last_hidden_state, trunk.base_model(input_ids=IDS).last_hidden_state
        )
    head = nn.Linear(32, 1, bias=False)
    init_head(head, seed=7)
    assert torch.equal(model.score.weight, head.weight)
    assert model.score.bias is None
    assert (model.config.num_labels, model.config.score_mean, model.config.score_std) == (1, 0.0, 1.0)


def test_a_reward_model_keeps_its_normalisation_in_its_artifact(tmp_path: Path) -> None:
    model = reward_model()
    model.config.score_mean, model.config.score_std = 1.25, 3.5
    model.save_pretrained(tmp_path / "reward")
    loaded = load_reward_model(tmp_path / "reward", settings(), tokenizer())
    assert (loaded.config.score_mean, loaded.config.score_std) == (1.25, 3.5)
    assert torch.equal(loaded.score.weight, model.score.weight)


def test_a_language_model_is_no_reward_model(folder: Path) -> None:
    with pytest.raises(ModelError, match="not a reward model") as error:
        load_reward_model(folder, settings(), tokenizer())
    assert str(folder) in one_line(error)


# ---------------------------------------------------------------- bad folders


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


def garble(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 4096)


def rename_to_bin(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def drop_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def drop_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def cut_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "lla')


def foreign_architecture(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "unheard-of"}')


def other_width(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))


def lose_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, "damaged weights"),
        (garble, "damaged weights"),
        (rename_to_bin, "pytorch_model.bin: convert it to safetensors"),
        (drop_weights, "has no weights"),
        (drop_config, "no config.json"),
        (cut_config, "cannot be loaded"),
        (foreign_architecture, "cannot be loaded"),
        (other_width, "does not fit its config.json"),
        (lose_a_tensor, "model.layers.1.mlp.up_proj.weight"),
    ],
)
@pytest.mark.parametrize(
    "load", [load_policy, lambda *given: new_reward_model(*given, seed=1)], ids=["policy", "reward trunk"]
)
def test_a_damaged_folder_is_refused_in_one_line_that_names_it(
    folder: Path, damage: Callable[[Path], None], said: str, load: Callable
) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=said) as error:
        load(folder, settings(), tokenizer())
    assert str(folder) in one_line(error)


def test_a_reward_model_that_lost_its_head_is_refused(tmp_path: Path) -> None:
    reward_model().save_pretrained(tmp_path / "reward")
    weights = load_file(tmp_path / "reward" / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, tmp_path / "reward" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"score\.weight"):
        load_reward_model(tmp_path / "reward", settings(), tokenizer())


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the checkout may have a models/sft
    with pytest.raises(ModelError, match="/nowhere does not exist"):
        check_folder("/nowhere")
    with pytest.raises(ModelError, match="models/sft does not exist"):
        check_folder(Path("models/sft"))
    check_folder("organisation/hub-model")


@pytest.mark.parametrize(
    "load", [load_policy, lambda *given: new_reward_model(*given, seed=1)], ids=["policy", "reward trunk"]
)
def test_a_model_with_a_smaller_vocabulary_than_the_tokenizer_is_refused(folder: Path, load: Callable) -> None:
    larger = trained_tokenizer(
        [*BY_HAND.remedies.values(), *BY_HAND.items, *BY_HAND.upset, *BY_HAND.calm, *BY_HAND.greetings], 380
    )
    assert len(larger) > len(tokenizer())
    with pytest.raises(ModelError, match=f"vocabulary of {len(tokenizer())}, .* has {len(larger)}") as error:
        load(folder, settings(), larger)
    assert str(folder) in one_line(error)


def test_a_reward_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    model = reward_model()
    model.resize_token_embeddings(len(tokenizer()) - 10)
    model.save_pretrained(tmp_path / "reward")
    with pytest.raises(ModelError, match="policy and reward model must share one tokenizer"):
        load_reward_model(tmp_path / "reward", settings(), tokenizer())


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_that_the_tokenizer_does_not_have_are_neither_sampled_nor_probable(family: str, tmp_path: Path) -> None:
    """Real models pad their embeddings to a round number."""
    model = policy(family=family)
    model.resize_token_embeddings(len(tokenizer()) + 64, mean_resizing=False)
    with torch.no_grad():
        model.get_output_embeddings().weight[len(tokenizer()) :] += 3.0
    model.save_pretrained(tmp_path / "padded")
    loaded = load_policy(tmp_path / "padded", settings(family), tokenizer())
    with torch.no_grad():
        logits, before = loaded(IDS).logits, model(IDS).logits
    assert logits.shape[-1] == len(tokenizer()) == loaded.config.vocab_size
    assert torch.equal(logits, before[..., : len(tokenizer())])
    assert load_policy(tmp_path / "padded", settings(family), tokenizer(), trainable=True).config.vocab_size == len(
        tokenizer()
    )
