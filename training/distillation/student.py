"""The student: built from a shape, loaded from a folder, or cut from the teacher; and its files."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from config.sections.distillation import Distill
from config.vocabulary import require_same_vocabulary
from training.distributed import sharding
from training.distributed.model_files import replacing_on_rank0, save_adapter, save_model
from training.modeling.adapter_base import named_base
from training.modeling.adapters import AdapterView, begin_adapter
from training.modeling.layers import with_layers
from training.modeling.logprobs import output_weight
from training.modeling.models import autocast, initialise, load_policy, random_config, without_dropout
from training.modeling.tokenizer import tokenizer_of
from training.process.stage import Stage
from training.rl.learner import Learner, Role

STUDENT = "student"
"""Name of the student's adapter in its model."""


class Pair(Learner):
    """Teacher and student, and the optimizer of the student."""

    def __init__(self, teacher: PreTrainedModel, student: Role, stage: Stage) -> None:
        self.teacher, self.student = teacher, student
        settings: Distill = stage.params.section("distill")
        whole = student.model if isinstance(student, AdapterView) else student
        self.sizes = {"student": parameters_of(whole), "teacher": parameters_of(teacher)}
        # a copy if the teacher is sharded: the update reads it while the teacher is not gathered
        head_VE = output_weight(teacher).detach()
        self.teacher_head_VE = head_VE.clone() if sharding.shards_weights(stage) else head_VE
        for model in (teacher, whole):
            sharding.shard(model, stage, sums_gradients=True)
            model.eval()
        self.teacher_head_VE = self.teacher_head_VE.to(stage.torch_device)
        super().__init__(
            [teacher, student],
            {STUDENT: student},
            {STUDENT: settings.learning_rate},
            settings,
            stage.params.model.dtype,
            stage,
        )


def load_pair(stage: Stage, tokenizer: PreTrainedTokenizerBase) -> Pair:
    """Teacher and student of a stage.

    Raises ModelError if a folder is missing or damaged, or the tokenizers differ.
    """
    params, settings = stage.params, stage.params.section("distill")
    aligned = stage.root / "models" / params.align.method
    student = _student(stage, settings, tokenizer)
    return Pair(load_policy(aligned, params.model, tokenizer), student, stage)


def _student(stage: Stage, settings: Distill, tokenizer: PreTrainedTokenizerBase) -> Role:
    params, seed, origin = stage.params, stage.params.seed, settings.student
    if origin.random is not None:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            random_config(origin.random, params.model.context_length, tokenizer),
            attn_implementation=params.model.attention,
            dtype=torch.float32,
        )
        initialise(model, origin.random.layers)
        return without_dropout(model)
    if origin.layers is not None:
        aligned = stage.root / "models" / params.align.method
        teacher = load_policy(aligned, params.model, tokenizer, trainable=True)
        return without_dropout(with_layers(teacher, origin.layers, "distill.student.layers"))
    assert origin.path is not None
    student_tokenizer = tokenizer_of(origin.path, origin.revision, "distill.student.path")
    require_same_vocabulary(
        student_tokenizer.get_vocab(), tokenizer.get_vocab(), f"distill.student.path={origin.path}"
    )
    if settings.lora is None:
        return load_policy(origin.path, params.model, tokenizer, trainable=True, revision=origin.revision)
    model = load_policy(origin.path, params.model, tokenizer, revision=origin.revision)
    begin_adapter(model, settings.lora, STUDENT, seed, "distill.lora", origin.path)
    return AdapterView(model, STUDENT, autocast(params.model, stage.torch_device))


def save_student(stage: Stage, student: Role, tokenizer: PreTrainedTokenizerBase) -> None:
    """models/distill: the student's weights, or its adapter. Collective; rank 0 writes."""
    target, origin = stage.root / "models/distill", stage.params.section("distill").student
    with replacing_on_rank0(target) as folder:
        if isinstance(student, AdapterView):
            base = named_base(origin.path, target, origin.revision)
            save_adapter(folder, student.model, STUDENT, *base)
        else:
            save_model(folder, student)
        if stage.rank == 0:
            tokenizer.save_pretrained(folder)


def parameters_of(model: PreTrainedModel) -> dict[str, int]:
    """Parameters of a model, in all and without embeddings and head."""
    outer: dict[int, Any] = {
        id(weight): weight
        for layer in (model.get_input_embeddings(), model.get_output_embeddings())
        for weight in layer.parameters()
    }
    total = model.num_parameters()
    return {"parameters": total, "non_embedding_parameters": total - sum(weight.numel() for weight in outer.values())}
