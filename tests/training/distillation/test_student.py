"""Where a student comes from."""

import pytest

from config.errors import ModelError
from config.vocabulary import require_same_vocabulary, stored_vocabulary, vocabulary_digest
from tests.training.support.tiny import policy, tokenizer
from training.distillation.student import parameters_of
from training.modeling.layers import with_layers


def test_a_student_of_one_layer_has_fewer_weights_besides_embeddings_and_head() -> None:
    larger = policy()
    whole, result = (parameters_of(item) for item in (larger, with_layers(larger, 1, "distill.student.layers")))
    assert result["non_embedding_parameters"] < whole["non_embedding_parameters"]
    outer = [item["parameters"] - item["non_embedding_parameters"] for item in (result, whole)]
    assert outer[0] == outer[1] > 0


def test_vocabularies_are_compared_by_token_and_number(tmp_path) -> None:
    teacher_tokenizer = tokenizer()
    teacher_tokenizer.save_pretrained(tmp_path)
    stored = stored_vocabulary(tmp_path)
    assert stored is not None
    assert vocabulary_digest(stored) == vocabulary_digest(teacher_tokenizer.get_vocab())
    require_same_vocabulary(stored, teacher_tokenizer.get_vocab(), "distill.student.path=x")
    first, second = list(stored)[10:12]
    swapped = stored | {first: stored[second], second: stored[first]}
    with pytest.raises(ModelError, match=r"distill\.student\.path=x .* 2 tokens differ"):
        require_same_vocabulary(swapped, teacher_tokenizer.get_vocab(), "distill.student.path=x")
    assert stored_vocabulary(tmp_path / "nowhere") is None
