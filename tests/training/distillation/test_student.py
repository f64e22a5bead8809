"""Where a student comes from."""

import pytest
import torch

from config.errors import ModelError
from config.vocabulary import require_same_vocabulary, stored_vocabulary, vocabulary_digest
from tests.training.tiny import policy, prompts, tokenizer
from training.distillation.student import kept_layers, parameters_of, with_layers

FAMILIES = ("llama", "qwen3", "gpt2")


@pytest.mark.parametrize(
    ("total", "kept", "chosen"),
    [(6, 6, [0, 1, 2, 3, 4, 5]), (6, 2, [0, 5]), (6, 1, [0]), (5, 3, [0, 2, 4]), (30, 2, [0, 29])],
)
def test_layers_are_evenly_spaced(total: int, kept: int, chosen: list[int]) -> None:
    assert kept_layers(total, kept) == chosen


def test_more_layers_than_the_teacher_has_are_refused() -> None:
    with pytest.raises(ModelError, match=r"distill\.student\.layers=7, and the teacher has 6"):
        kept_layers(6, 7)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_layers_are_the_teacher_itself(family: str) -> None:
    teacher = policy(family=family)
    ids = torch.tensor([max(prompts(3), key=len)])
    torch.testing.assert_close(
        with_layers(teacher, 2).eval()(input_ids=ids).logits, teacher(input_ids=ids).logits
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_student_of_one_layer_has_the_first_with_all_around_it(family: str) -> None:
    teacher = policy(family=family)
    student = with_layers(teacher, 1)
    own = student.state_dict()
    assert 0 < len(own) < len(teacher.state_dict())
    assert all(torch.equal(tensor, teacher.state_dict()[name]) for name, tensor in own.items())
    found, whole = parameters_of(student), parameters_of(teacher)
    assert found["non_embedding_parameters"] < whole["non_embedding_parameters"]
    outer = [each["parameters"] - each["non_embedding_parameters"] for each in (found, whole)]
    assert outer[0] == outer[1] > 0


def test_vocabularies_are_compared_by_token_and_number(tmp_path) -> None:
    own = tokenizer()
    own.save_pretrained(tmp_path)
    stored = stored_vocabulary(tmp_path)
    assert stored is not None
    assert vocabulary_digest(stored) == vocabulary_digest(own.get_vocab())
    require_same_vocabulary(stored, own.get_vocab(), "distill.student.path=x")
    first, second = list(stored)[10:12]
    swapped = stored | {first: stored[second], second: stored[first]}
    with pytest.raises(ModelError, match=r"distill\.student\.path=x .* 2 tokens differ"):
        require_same_vocabulary(swapped, own.get_vocab(), "distill.student.path=x")
    assert stored_vocabulary(tmp_path / "nowhere") is None
