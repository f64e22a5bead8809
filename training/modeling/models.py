"""Building and loading models: the base from a shape or a folder, a policy, a reward model; weights from safetensors
only.
"""

import copy
import importlib.util
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.pytorch_utils import Conv1D

from config.errors import EnvironmentFault, ModelError
from config.sections.model import Model, Shape
from training.modeling.adapter_base import CONFIG, base_of, is_adapter
from training.modeling.adapters import merge, read_adapter
from training.modeling.low_bit import check_storage, quantisation, unmap_weight_files
from training.modeling.score_head import head_of, new_head

SCORE = "score.weight"
LOADED = "loaded"
"""Name of a folder's adapter in a model loaded from there."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def base_model(
    settings: Model,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    trainable: bool = False,
    adapter: str | None = LOADED,
) -> PreTrainedModel:
    """The base model: `model.path`, or `model.random` with weights drawn from `seed`.

    A `trainable` model has fp32 weights, a frozen one those of the compute type. `adapter` as in `load_policy`.

    Raises ModelError if the folder has no weights or its vocabulary is smaller than the tokenizer's.
    """
    if settings.path is not None:
        return load_policy(settings.path, settings, tokenizer, trainable, settings.revision, adapter)
    assert settings.random is not None
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        random_config(settings.random, settings.context_length, tokenizer),
        attn_implementation=settings.attention,
        dtype=weight_dtype(settings, trainable),
    )
    initialise(model, settings.random.layers)
    return without_dropout(model)


INTO_RESIDUAL = ("o_proj", "down_proj", "c_proj")
"""Name endings of matrices that write to the residual stream."""
EMBEDDING_STD = 0.3
"""Standard deviation of an untied input embedding. With Transformers' 0.02 tokens are negligible beside what the
layers add, with 1 they dominate: docs/decisions.md.
"""


@torch.no_grad()
def initialise(model: PreTrainedModel, layers: int) -> None:
    """Draw the layers' matrices, and an untied output embedding, with standard deviation 1/sqrt(inputs); those that
    write to the residual stream with 1/sqrt(inputs 2 layers).

    Transformers' 0.02 for every width leaves a narrow model with attention that hardly tells tokens apart, and so
    without the gradient from which it would learn to copy: docs/decisions.md. An embedding that is input and output,
    positions, and all that is not a matrix stay as they are. Source: LeCun et al. 1998, Efficient BackProp, 4.6;
    Radford et al. 2019 (GPT-2), 2.3.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            inputs = module.nx if isinstance(module, Conv1D) else module.in_features
            writes = name.rsplit(".", 1)[-1] in INTO_RESIDUAL
            tied = module is model.get_output_embeddings() and model.config.tie_word_embeddings
            if not tied:
                nn.init.normal_(module.weight, std=(inputs * (2 * layers if writes else 1)) ** -0.5)
    if not model.config.tie_word_embeddings:
        nn.init.normal_(model.get_input_embeddings().weight, std=EMBEDDING_STD)


def random_config(shape: Shape, context_length: int, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """The transformers config of a shape. Source of the rotary positions: Su et al. 2021 (arXiv:2104.09864), section
    3.2.2.
    """
    common = {
        "vocab_size": len(tokenizer),
        "tie_word_embeddings": shape.tie_embeddings,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if shape.family == "gpt2":
        return AutoConfig.for_model(
            "gpt2",
            n_embd=shape.width,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_inner=shape.mlp_width,
            n_positions=context_length,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **common,
        )
    return AutoConfig.for_model(
        shape.family,
        hidden_size=shape.width,
        head_dim=shape.width // shape.heads,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.mlp_width,
        max_position_embeddings=context_length,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        **common,
    )


def load_policy(
    place: str | Path,
    settings: Model,
    tokenizer: PreTrainedTokenizerBase,
    trainable: bool = False,
    revision: str | None = None,
    adapter: str | None = LOADED,
) -> PreTrainedModel:
    """A causal language model from a folder (a full model or an adapter) or from the hub.

    `adapter` is the name that the folder's adapter gets in the model; None leaves it out, for a stage that starts its
    own as a copy.

    Raises ModelError as `base_model` does.
    """
    model = _load_on_base(AutoModelForCausalLM, place, settings, trainable, revision, adapter)
    fit_vocabulary(model, tokenizer, place)
    return without_dropout(model)


def load_reward_model(
    place: str | Path,
    settings: Model,
    tokenizer: PreTrainedTokenizerBase,
    trainable: bool = False,
    adapter: str = LOADED,
) -> PreTrainedModel:
    """A trained reward model: one label, its head in fp32 whatever the trunk's weights are in, its score normalisation
    in the config.

    Raises ModelError as `base_model` does, and if the folder holds no reward model.
    """
    check_reward_folder(place)
    if is_adapter(place):
        model = _load_on_base(
            AutoModelForSequenceClassification,
            place,
            settings,
            trainable,
            None,
            adapter,
            frozenset({SCORE}),
            num_labels=1,
        )
        model.config = reward_config(model.config, place)
    else:
        model = _load(AutoModelForSequenceClassification, place, settings, trainable)
        model.score = head_of(_stored_head(Path(place)), model.device)
    fit_vocabulary(model, tokenizer, place)
    return without_dropout(model)


def _stored_head(folder: Path) -> Tensor:
    """The head's weights [1, D] in a reward model's folder, as saved: loading the trunk rounds them to its type."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as stored:
            if SCORE in stored.keys():  # noqa: SIM118 # no mapping
                weight: Tensor = stored.get_tensor(SCORE)
                return weight
    raise ModelError(f"{folder} has no {SCORE}. Run the reward stage.")


def reward_config(base: PreTrainedConfig, place: str | Path) -> PreTrainedConfig:
    """`base` merged with the reward model's adapter in `place`."""
    config, adapter_config = copy.deepcopy(base), AutoConfig.from_pretrained(place)
    for name in ("pad_token_id", "score_mean", "score_std"):
        setattr(config, name, getattr(adapter_config, name))
    return config


def check_reward_folder(place: str | Path) -> None:
    """Raise a one-line error for a folder that is not one of our reward models."""
    check_folder(place)
    if '"score_std"' not in (Path(place) / "config.json").read_text(encoding="utf-8"):
        raise ModelError(
            f"{place} is not a reward model of this project (one label and a stored score "
            "normalisation). Run the reward stage."
        )


def new_reward_model(
    trunk: str | Path | PreTrainedModel,
    settings: Model,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    trainable: bool = True,
    revision: str | None = None,
    adapter: str | None = LOADED,
) -> PreTrainedModel:
    """A reward model on the trunk of a language model, its head in fp32, without bias and drawn with std 1/sqrt(d +
    1).

    A `trainable` trunk has fp32 weights, a frozen one as in `base_model`. `adapter` as in `load_policy`. Source:
    Stiennon et al. 2020 (arXiv:2009.01325), appendix B; Huang et al. 2024 (arXiv:2403.17031).
    """
    if isinstance(trunk, PreTrainedModel):
        config = AutoConfig.for_model(**{**trunk.config.to_dict(), "num_labels": 1})
        model = AutoModelForSequenceClassification.from_config(
            config, attn_implementation=settings.attention, dtype=torch.float32
        )
        model.base_model.load_state_dict(trunk.base_model.state_dict())
    else:
        model = _load_on_base(
            AutoModelForSequenceClassification,
            trunk,
            settings,
            trainable,
            revision,
            adapter,
            frozenset({SCORE}),
            num_labels=1,
        )
        fit_vocabulary(model, tokenizer, trunk)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.config.score_mean, model.config.score_std = 0.0, 1.0
    model.score = new_head(model.config.hidden_size, seed, model.device)
    return without_dropout(model)


def check_folder(place: str | Path) -> None:
    """Raise a one-line error for a local folder without config or safetensors weights."""
    folder = Path(place)
    if not folder.is_dir():
        if isinstance(place, Path) or place.startswith((".", "/", "~")):
            raise ModelError(
                f"{place} does not exist; it should be a model folder. Run the stage that makes "
                "it, or fix model.path in params.yaml."
            )
        return
    if not (folder / "config.json").is_file() and not (folder / CONFIG).is_file():
        raise ModelError(f"{place} has no config.json, so it is not a model folder. Fix model.path in params.yaml.")
    if not any(folder.glob("*.safetensors")):
        others = sorted(path.name for path in folder.glob("*.bin"))
        note = f" It has {others[0]}: convert it to safetensors first." if others else ""
        raise ModelError(f"{place} has no weights: a *.safetensors file is needed.{note}")


def fit_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, place: str | Path) -> None:
    """Remove embeddings beyond the tokenizer's last id, which padding to a round number leaves: they would be sampled,
    and their share of the probability would count.

    Raises ModelError for a model without an embedding for some token of the tokenizer.
    """
    rows = model.get_input_embeddings().num_embeddings
    if rows < len(tokenizer):
        raise ModelError(
            f"{place} has a vocabulary of {rows}, the tokenizer in data/tokenizer has {len(tokenizer)}: "
            "policy and reward model must share one tokenizer. Train the model again, "
            "or fix model.path in params.yaml."
        )
    used = max(tokenizer.get_vocab().values()) + 1
    if used < rows:
        model.resize_token_embeddings(used)


def _load_on_base(
    kind: Any, place: str | Path, settings: Model, trainable: bool, revision: str | None,
    adapter: str | None, fresh: frozenset[str] = frozenset(), **config: int,
) -> PreTrainedModel:  # fmt: skip
    """The base of `place` with its adapter, if any, which is merged if all weights are trained."""
    check_folder(place)
    base = base_of(place, revision)
    check_folder(base.place)
    model = _load(kind, base.place, settings, trainable, base.revision, fresh, **config)
    if SCORE in fresh:
        model.score = head_of(model.score.weight, model.device)
    if not is_adapter(place) or adapter is None:
        return model
    read_adapter(model, Path(place), adapter)
    return merge(model) if trainable else model


def _load(
    kind: Any,
    place: str | Path,
    settings: Model,
    trainable: bool,
    revision: str | None = None,
    fresh: frozenset[str] = frozenset(),
    **config: int,
) -> PreTrainedModel:
    """`fresh` names weights that may be missing; any other missing weight would silently be random."""
    stored = None if trainable else quantisation(settings, DTYPES[settings.dtype])
    if settings.attention == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        raise EnvironmentFault(
            "model.attention=flash_attention_2 needs the package flash_attn, which is not installed. "
            "Install it on a machine with an Ampere GPU or newer, or set model.attention: sdpa in params.yaml."
        )
    logging.getLogger("transformers.modeling_utils").addFilter(_without_report)
    try:
        model, report = kind.from_pretrained(
            place,
            revision=revision or "main",
            dtype=weight_dtype(settings, trainable),
            attn_implementation=settings.attention,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **({"quantization_config": stored} if stored is not None else {}),
            **config,
        )
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(
            f"{place} cannot be loaded: {str(error).splitlines()[0]}. Fix model.path or "
            "model.attention in params.yaml."
        ) from error
    except Exception as error:
        if type(error).__name__ == "SafetensorError":
            raise ModelError(
                f"{place} has damaged weights: {error}. Copy the folder again, or run the stage that made it."
            ) from error
        raise
    if report["mismatched_keys"]:
        name, stored, built = min(report["mismatched_keys"])
        raise ModelError(
            f"{place} does not fit its config.json: {name} is {list(stored)} in the weights, "
            f"{list(built)} by the config. Copy the folder again, or run the stage that made it."
        )
    lost = sorted(set(report["missing_keys"]) - fresh)
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise ModelError(
            f"{place} has no weights for {lost[0]}{more}: they would be random. Copy the folder "
            "again, or run the stage that made it."
        )
    check_storage(model, place)
    if stored is not None:
        unmap_weight_files(model)
    return model


def _without_report(record: logging.LogRecord) -> bool:
    """Suppress Transformers' table of missing weights: `_load` reports them in one line, or expects them."""
    return "LOAD REPORT" not in record.getMessage()


def weight_dtype(settings: Model, trainable: bool) -> torch.dtype:
    """Trained weights are kept in fp32, where small steps do not vanish; others in the compute type."""
    return torch.float32 if trainable else DTYPES[settings.dtype]


def autocast(settings: Model, device: torch.device) -> torch.autocast:
    """Compute in the compute type, whatever the type of the weights."""
    return torch.autocast(device.type, DTYPES[settings.dtype], enabled=settings.dtype != "fp32")


def without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    """Turn dropout off everywhere: with it the ratio of the first PPO mini-batch is not 1."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    return model
