"""The shapes of a run's models, from params and config.json."""

import json
from dataclasses import replace
from pathlib import Path

from config.errors import CostError
from config.schema import Params
from config.sections.model import Shape
from costs.tables.catalogue import shape
from costs.tables.shapes import ModelShape, from_config


def base_shape(params: Params, root: Path) -> ModelShape:
    """The shape of the base model: model.random's, a local folder's config.json, or a named one."""
    if params.model.random is not None:
        return random_shape(params, params.model.random)
    return named_shape(str(params.model.path), root)


def reward_shape(params: Params, model: ModelShape) -> ModelShape | None:
    """The shape of the reward model; None for a reward function.

    Raises CostError for more layers than there are.
    """
    if params.trained_reward is None:
        return None
    kept = params.trained_reward.layers
    if kept is None:
        return model.scored
    if kept > model.layers:
        raise CostError(
            f"reward.layers={kept}, and the model that it starts from has {model.layers}. Lower it in params.yaml."
        )
    return replace(model.scored, layers=int(kept))


def student_shape(params: Params, root: Path, teacher: ModelShape) -> ModelShape:
    """The shape of distill's student. Raises CostError for more layers than the teacher has."""
    student = params.section("distill").student
    if student.random is not None:
        # rows as the teacher has them: the tokenizer's
        return replace(random_shape(params, student.random), vocab=teacher.vocab)
    if student.path is not None:
        return named_shape(student.path, root)
    if student.layers > teacher.layers:
        raise CostError(
            f"distill.student.layers={student.layers}, and the teacher has {teacher.layers}. Lower it in params.yaml."
        )
    return replace(teacher, layers=int(student.layers))


def named_shape(path: str, root: Path) -> ModelShape:
    """The shape of a local folder's config.json, or of a model by its name on the hub."""
    file = root / path / "config.json"
    if file.is_file():
        try:
            return from_config(json.loads(file.read_text(encoding="utf-8")), path)
        except ValueError as error:
            raise CostError(f"{file} is not valid JSON: {error}. Fix it, or name another model.path.") from None
    return shape(path)


def random_shape(params: Params, shape: Shape) -> ModelShape:
    """A model built from its shape; its vocabulary is that of model.random if set."""
    vocabulary = params.model.random.vocab_size if params.model.random is not None else 0
    config = {
        "model_type": shape.family,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.mlp_width,
        "vocab_size": vocabulary,
        "tie_word_embeddings": shape.tie_embeddings,
        "max_position_embeddings": params.model.context_length,
    }
    return from_config(config, shape.place)
