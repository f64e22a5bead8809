import contextlib
import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from config.errors import ModelError
from config.sections.model import Model
from training.modeling import tokenizer as tokenizer_module
from training.modeling.tokenizer import (
    SPECIAL_TOKENS,
    decode_response,
    encode_prompt,
    encode_prompts,
    encode_response,
    encode_responses,
    load_tokenizer,
    portable,
    pretrained_tokenizer,
    render_prompt,
    rendering,
    response_text,
    special_tokens,
    trained_tokenizer,
)

TEXTS = [
    "my kettle is cracked .",
    "we will replace it .",
    "my phone is cracked .",
    "we will refund you .",
    "hello , my phone is very late .",
    "we will refund the cracked kettle .",
    "hello , we will replace the cracked phone",
    "my order is very late , my phone is cracked",
]
PAD, BOS, EOS = 0, 1, 2
TOKENIZER = trained_tokenizer(TEXTS, 300)


def settings(path: Path, pad_token: str | None = None) -> Model:
    return Model(
        path=str(path),
        revision=None,
        random=None,
        pad_token=pad_token,
        context_length=64,
        dtype="fp32",
        quantisation=None,
        attention="sdpa",
    )


def foreign(folder: Path, **special: str) -> Path:
    """A word-level tokenizer as somebody else might have saved it."""
    words = {word: i for i, word in enumerate(["<unk>", "<end>", "<padding>", "my", "kettle"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special).save_pretrained(folder)
    return folder


def test_special_tokens_have_the_first_ids_and_the_vocabulary_has_the_size_asked_for() -> None:
    assert TOKENIZER.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3]
    assert (TOKENIZER.pad_token_id, TOKENIZER.bos_token_id, TOKENIZER.eos_token_id) == (PAD, BOS, EOS)
    assert len(TOKENIZER) == 300


@given(st.text().filter(lambda text: text == text.strip()))
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    assert decode_response(TOKENIZER, encode_response(TOKENIZER, text)) == text


def test_training_twice_gives_the_same_tokenizer() -> None:
    assert trained_tokenizer(TEXTS, 300).backend_tokenizer.to_str() == TOKENIZER.backend_tokenizer.to_str()


def test_a_response_ends_with_eos_and_has_no_bos() -> None:
    ids = encode_response(TOKENIZER, "we will replace it .")
    assert ids[-1] == EOS
    assert BOS not in ids
    assert EOS not in ids[:-1]


def test_a_plain_prompt_begins_with_bos_once_and_has_no_eos() -> None:
    ids = encode_prompt(TOKENIZER, "my kettle is cracked .")
    assert ids[0] == BOS
    assert BOS not in ids[1:]
    assert EOS not in ids


def test_a_conversation_begins_with_bos_once_and_ends_where_the_assistant_speaks() -> None:
    prompt = [
        {"role": "user", "content": "my kettle"},
        {"role": "assistant", "content": "we will"},
        {"role": "user", "content": "replace it"},
    ]
    assert render_prompt(TOKENIZER, prompt) == "<bos>user: my kettle\nassistant: we will\nuser: replace it\nassistant:"
    assert encode_prompt(TOKENIZER, prompt).count(BOS) == 1


def test_a_special_token_spelt_out_in_a_response_stays_text() -> None:
    ids = encode_response(TOKENIZER, "we <eos> will <bos> refund")
    assert ids.count(EOS) == 1
    assert BOS not in ids
    assert decode_response(TOKENIZER, ids) == "we <eos> will <bos> refund"


def test_a_chat_template_says_by_itself_whether_a_conversation_has_a_bos(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    assert BOS not in encode_prompt(tokenizer, [{"role": "user", "content": "my kettle"}])
    assert encode_prompt(tokenizer, "my kettle")[0] == BOS


def test_conversations_to_learn_from_teach_no_part_of_a_special_token() -> None:
    prompts = [rendering()([{"role": "user", "content": text}]) for text in TEXTS]
    learnt = set(trained_tokenizer(prompts, 400).get_vocab()) - set(SPECIAL_TOKENS)
    assert "assistant" in learnt
    assert not [token for token in learnt if "<" in token and len(token) > 1]
    assert "bos" not in learnt


def test_encoding_side_by_side_equals_encoding_one_by_one() -> None:
    assert encode_prompts(TOKENIZER, TEXTS[:4]) == [encode_prompt(TOKENIZER, text) for text in TEXTS[:4]]
    assert encode_responses(TOKENIZER, TEXTS[:4]) == [encode_response(TOKENIZER, text) for text in TEXTS[:4]]
    assert encode_prompts(TOKENIZER, []) == []


def test_many_texts_are_encoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = encode_prompts(TOKENIZER, TEXTS)
    monkeypatch.setattr(tokenizer_module, "ENCODED_AT_ONCE", 3)
    assert encode_prompts(TOKENIZER, TEXTS) == whole


def test_a_conversational_response_is_encoded_as_its_text() -> None:
    message = [{"role": "assistant", "content": "we will refund you ."}]
    assert encode_response(TOKENIZER, message) == encode_response(TOKENIZER, response_text(message))


def test_decoding_stops_at_the_first_eos() -> None:
    ids = encode_response(TOKENIZER, "we will")
    assert decode_response(TOKENIZER, [*ids, PAD, PAD, *encode_response(TOKENIZER, "refund")]) == "we will"


def test_the_prompt_template_travels_with_the_saved_tokenizer(tmp_path: Path) -> None:
    trained_tokenizer(TEXTS, 300, "Customer: {prompt}\nAgent:").save_pretrained(tmp_path / "first")
    load_tokenizer(tmp_path / "first").save_pretrained(tmp_path / "second")
    loaded = load_tokenizer(tmp_path / "second")
    assert render_prompt(loaded, "my {prompt} is {x}") == "Customer: my {prompt} is {x}\nAgent:"
    assert encode_response(loaded, "my kettle") == encode_response(trained_tokenizer(TEXTS, 300), "my kettle")


def test_too_little_text_gives_a_smaller_vocabulary_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        small = trained_tokenizer(["a b"], 5000)
    assert 260 <= len(small) < 300
    assert len(caplog.records) == 1


def test_a_pretrained_tokenizer_gets_the_pad_token_of_params_and_a_chat_template(tmp_path: Path) -> None:
    tokenizer = pretrained_tokenizer(settings(foreign(tmp_path, eos_token="<end>"), "<padding>"), "{prompt} my")
    assert tokenizer.pad_token_id == 2
    assert tokenizer.eos_token_id == 1
    assert encode_prompt(tokenizer, "kettle") == [4, 3]
    assert render_prompt(tokenizer, [{"role": "user", "content": "my"}]) == "user: my\nassistant:"


@pytest.mark.parametrize(
    ("special", "pad_token", "named"),
    [
        ({"pad_token": "<padding>"}, None, "eos_token"),
        ({"eos_token": "<end>"}, None, "model.pad_token"),
        ({"eos_token": "<end>", "pad_token": "<end>"}, None, "model.pad_token"),
        ({"eos_token": "<end>"}, "<end>", "model.pad_token"),
        ({"eos_token": "<end>"}, "<nothing>", "'<nothing>'"),
    ],
)
def test_a_tokenizer_without_end_or_padding_is_refused_in_one_line(
    tmp_path: Path, special: dict[str, str], pad_token: str | None, named: str
) -> None:
    with pytest.raises(ModelError) as refusal:
        pretrained_tokenizer(settings(foreign(tmp_path, **special), pad_token))
    assert named in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="is not a folder"):
        pretrained_tokenizer(settings(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match="gives no tokenizer"):
        pretrained_tokenizer(settings(tmp_path))


def test_a_damaged_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text((tmp_path / "tokenizer.json").read_text()[:500])
    with pytest.raises(ModelError) as refusal:
        load_tokenizer(tmp_path)
    assert "\n" not in str(refusal.value)


def test_code_that_comes_with_a_tokenizer_is_not_run(tmp_path: Path) -> None:
    foreign(tmp_path, eos_token="<end>", pad_token="<padding>")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": [None, "theirs.Theirs"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Theirs: pass\n")
    with contextlib.suppress(ModelError):
        pretrained_tokenizer(settings(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_an_end_of_turn_that_is_not_the_end_of_a_reply_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    special = {"eos_token": "<end>", "pad_token": "<padding>"}
    template = "{% for message in messages %}{{ message['content'] }} "
    for end, warnings in (("<end>", 0), ("<padding>", 1)):
        caplog.clear()
        foreign(tmp_path, **special, chat_template=template + end + "{% endfor %}")
        pretrained_tokenizer(settings(tmp_path))
        assert len(caplog.records) == warnings
    assert "ends a turn with <padding>, replies are trained to end with <end>" in caplog.text


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("{{ strftime_now('%d %b %Y') }}", "31 Jan 2026"),
        ('{%- if strftime_now is defined %}{{ strftime_now( "%Y" ) }}{% endif %}', "2026"),
        ("{% for m in messages %}{% generation -%} {{ m.content }}{%- endgeneration %}{% endfor %}", "Hello?"),
        ("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", "Hello?"),
    ],
)
def test_a_chat_template_is_rendered_alike_everywhere_and_every_day(template: str, rendered: str) -> None:
    tokenizer = trained_tokenizer(["hello"], 300)
    tokenizer.chat_template = portable(template, "2026-01-31")
    assert render_prompt(tokenizer, [{"role": "user", "content": "Hello?"}]) == rendered


def test_a_template_that_asks_for_todays_date_is_refused() -> None:
    tokenizer = trained_tokenizer(["hello"], 300)
    tokenizer.chat_template = portable("{{ strftime_now('%d') }}", None)
    with pytest.raises(ModelError, match=r"model\.template_date"):
        render_prompt(tokenizer, [{"role": "user", "content": "Hello?"}])
    assert render_prompt(tokenizer, "Hello?") == "Hello?", "a plain prompt meets no chat template"


def test_every_special_token_is_known() -> None:
    tokenizer = trained_tokenizer(["hello"], 300)
    tokenizer.add_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<plain>")])
    assert set(special_tokens(tokenizer)) == {*SPECIAL_TOKENS, "<|im_start|>"}


def test_a_decoded_reply_keeps_its_indentation() -> None:
    tokenizer = trained_tokenizer(["    return n", "hello"], 300)
    for text in ("    return n", "\treturn n", "hello", "if x:\n    y"):
        assert decode_response(tokenizer, encode_response(tokenizer, text)) == text
