import pytest

from config.errors import DataError
from tests.training.support.tiny import tokenizer
from training.modeling.tokenizer import encode_prompts
from training.preparation.prompts import fitting_prompts, require_prompts


def test_a_prompt_fits_up_to_the_room_and_not_beyond() -> None:
    prompts = ["my lamp", "my lamp does not work , order 4", "my"]
    lengths = [len(tokens) for tokens in encode_prompts(tokenizer(), prompts)]
    assert lengths[2] < lengths[0] < lengths[1]
    fitting = fitting_prompts(prompts, tokenizer(), lengths[0])
    assert [item.prompt for item in fitting] == ["my lamp", "my"]
    assert [len(item.tokens) for item in fitting] == [lengths[0], lengths[2]]
    assert fitting_prompts(prompts, tokenizer(), lengths[0] - 1)[0].prompt == "my"


def test_prompts_of_which_none_fits_are_one_line() -> None:
    require_prompts(fitting_prompts(["my lamp"], tokenizer(), 50), "a.jsonl", 50, "ppo")
    with pytest.raises(DataError, match=r"a\.jsonl has no prompt of at most 0 tokens .*ppo\.max"):
        require_prompts(fitting_prompts(["my lamp"], tokenizer(), 0), "a.jsonl", 0, "ppo")
