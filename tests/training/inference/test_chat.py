"""A conversation with real models: streamed, repeatable, each model with its own history."""

import io
import json
import re
from pathlib import Path

import pytest

from config.errors import ModelError
from config.load import write
from tests.training.support import tiny
from training.inference.chat import Conversation, Sampling, Speaker, speakers, talk
from training.modeling.tokenizer import encode_prompt

GREEDY = Sampling(temperature=0.0, max_new_tokens=6, seed=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("chat")
    shape = tiny.settings().random
    assert shape is not None
    model = {"random": shape.model_dump(), "context_length": tiny.CONTEXT}
    write(tiny.params(model=model), root / "params.yaml")
    tiny.tokenizer().save_pretrained(root / "data/tokenizer")
    tiny.policy(seed=1).save_pretrained(root / "models/sft")
    tiny.policy(seed=2).save_pretrained(root / "models/ppo")
    return root


def said(folder: Path, names: list[str], lines: list[str], sampling: Sampling = GREEDY) -> str:
    out = io.StringIO()
    talk(speakers(folder, names), sampling, lines, out, lambda: None)
    return out.getvalue()


def test_a_reply_is_what_generation_gives_and_is_printed(folder: Path) -> None:
    (speaker,) = speakers(folder, ["aligned"])
    out = io.StringIO()
    reply = speaker.reply("my kettle is cracked", GREEDY, out)
    assert reply
    assert out.getvalue().strip() == reply
    assert said(folder, ["aligned"], ["my kettle is cracked\n"]).strip() == reply


def test_all_models_answer_under_their_names(folder: Path) -> None:
    told = said(folder, ["base", "sft", "aligned"], ["my kettle is cracked\n"])
    _, *parts = re.split(r"^ *(base|sft|aligned): ", told, flags=re.MULTILINE)
    assert parts[::2] == ["base", "sft", "aligned"]
    assert len(set(parts[1::2])) == 3


def test_sampling_repeats_with_its_seed(folder: Path) -> None:
    sampled = {seed: said(folder, ["sft"], ["hello\n"], Sampling(1.0, 12, seed)) for seed in (1, 2, 3)}
    assert said(folder, ["sft"], ["hello\n"], Sampling(1.0, 12, 1)) == sampled[1]
    assert len(set(sampled.values())) > 1


def test_a_conversation_remembers_its_turns_where_models_were_trained_on_some() -> None:
    talked, single = Conversation(True), Conversation(False)
    for conversation in (talked, single):
        conversation.add("a", "b")
    assert talked.prompt("c") == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert single.prompt("c") == "c"


def test_the_oldest_turns_are_forgotten_when_the_context_is_full(folder: Path) -> None:
    (speaker,) = speakers(folder, ["sft"])
    speaker.conversation.several_turns = True
    for turn in range(20):
        speaker.conversation.add(f"kettle {turn}", "sorry")
    messages = list(speaker.conversation.messages)
    assert len(encode_prompt(speaker.tokenizer, messages)) > tiny.CONTEXT
    ids = speaker._fitting("hello", GREEDY.max_new_tokens)
    assert len(ids) <= tiny.CONTEXT - GREEDY.max_new_tokens
    kept = speaker.conversation.messages
    assert kept == messages[-len(kept) :]
    assert 0 < len(kept) < len(messages)


def test_an_empty_line_starts_anew(folder: Path) -> None:
    those: list[Speaker] = speakers(folder, ["sft"])
    talk(those, GREEDY, ["hello\n"], io.StringIO(), lambda: None)
    assert those[0].conversation.messages
    talk(those, GREEDY, ["\n"], io.StringIO(), lambda: None)
    assert those[0].conversation.messages == []


def test_what_leaves_no_room_is_one_line_and_the_talk_goes_on(folder: Path) -> None:
    long = "my kettle is cracked " * 40
    refusal, reply, rest = said(folder, ["sft"], [long, "hello\n"]).split("\n")
    assert "model.context_length" in refusal
    assert (bool(reply), rest) == (True, "")


def test_conversational_data_makes_it_a_conversation(folder: Path) -> None:
    prepared = folder / "data/prepared/sft"
    prepared.mkdir(parents=True)
    for prompt, several in (("a", False), ([{"role": "user", "content": "a"}], True)):
        (prepared / "train.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n")
        assert speakers(folder, ["sft"])[0].conversation.several_turns is several


def test_a_missing_model_is_one_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_bytes((folder / "params.yaml").read_bytes())
    tiny.tokenizer().save_pretrained(tmp_path / "data/tokenizer")
    with pytest.raises(ModelError, match="models/sft"):
        speakers(tmp_path, ["sft"])
