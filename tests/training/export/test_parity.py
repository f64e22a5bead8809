"""What llama.cpp reads otherwise than training did is found before it serves."""

from copy import deepcopy
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase

from tests.training.support.tiny import CONTEXT, policy, tokenizer
from training.export.aligned import with_prompts_of_training
from training.export.gguf_file import write_gguf
from training.export.llama_cpp import serving
from training.export.parity import differences
from training.modeling.tokenizer import Prompt, end_of_turn, trained_tokenizer

pytestmark = pytest.mark.integration
PLAIN: list[Prompt] = [f"my lamp {n} is broken ." for n in range(6)]
CHATS: list[Prompt] = [[{"role": "user", "content": str(text)}] for text in PLAIN]
TURNS = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<spare>"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"


def found(folder: Path, made: PreTrainedTokenizerBase, prompts: list[Prompt], trained: str | None = None) -> list[str]:
    """Of a GGUF file with `made`; training had the chat template `trained`."""
    write_gguf(policy(), made, "f32", folder / "model.gguf")
    made.chat_template = trained or made.chat_template
    with serving(folder / "model.gguf", CONTEXT) as server:
        return differences(server, made, prompts)


def with_template(template: str) -> PreTrainedTokenizerBase:
    result = deepcopy(tokenizer())
    result.chat_template = template
    return result


def test_single_prompts_are_read_as_in_training(tmp_path: Path) -> None:
    result = with_prompts_of_training(deepcopy(tokenizer()), is_plain=True)
    assert found(tmp_path, result, PLAIN) == []


@pytest.mark.parametrize("template", [TURNS, NO_SYSTEM + TURNS])
def test_chats_are_read_as_in_training(tmp_path: Path, template: str) -> None:
    assert found(tmp_path, with_template(template), CHATS) == []
    assert end_of_turn(with_template(TURNS)) == "<spare>"


def test_a_tokenizer_that_llama_cpp_reads_otherwise_is_named(tmp_path: Path) -> None:
    result = trained_tokenizer([str(item) for item in PLAIN] * 2, 320)
    result.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    lines = found(tmp_path, with_prompts_of_training(result, is_plain=True), PLAIN)
    assert len(lines) > len(PLAIN)
    assert "gives" in lines[0]
    assert "tokens in training" in lines[0]


def test_a_template_that_drops_a_turn_is_named(tmp_path: Path) -> None:
    last = "{{ messages[-1]['content'] }}<spare>"
    lines = found(tmp_path, with_template(last), CHATS, TURNS)
    assert any("system: e f; user: a b" in line for line in lines)
