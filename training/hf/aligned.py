"""The model of an offline method: loaded from the SFT model, and saved."""

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from config.sections.offline import Optimisation
from training.distributed.model_files import replacing_on_rank0, save_adapter, save_model
from training.modeling.adapter_base import named_base
from training.modeling.adapters import train_only_adapter
from training.modeling.models import load_policy
from training.process.stage import Stage


def load_from_sft(stage: Stage, settings: Optimisation, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The SFT model on the stage's device, all of it to be trained or an adapter of the stage's name."""
    start, shape = stage.root / "models/sft", stage.params.model
    if settings.lora is None:
        model = load_policy(start, shape, tokenizer, trainable=True)
    else:
        model = load_policy(start, shape, tokenizer, adapter=None)
        train_only_adapter(model, settings.lora, stage.name, stage.params.seed, start)
    moved: Any = model.to(stage.torch_device)
    return moved


def save_aligned(
    stage: Stage, settings: Optimisation, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write models/<stage>, with the tokenizer. Collective."""
    path = stage.root / "models" / stage.name
    with replacing_on_rank0(path) as folder:
        if settings.lora is None:
            save_model(folder, model)
        else:
            save_adapter(folder, model, stage.name, *named_base(stage.root / "models/sft", path))
        if stage.rank == 0:
            tokenizer.save_pretrained(folder)
