import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.sections.data import HelpdeskSource
from training.preparation.helpdesk import (
    FILLERS,
    REMEDIES,
    WEIGHTS,
    Case,
    bayes_accuracy,
    criteria,
    generate,
    gold_score,
    mean_gold,
    preference_probability,
    read_case,
    reply,
)

UPSET = "hello , my kettle is cracked . i am really angry ."
CALM = "hello , my phone is very late . no hurry . order number 4 1 7 ."
BEST_UPSET = (
    "about your kettle : we are sorry . we will replace it . what is your order number ? kind "
    "regards ."
)
BEST_CALM = "about your phone : we will trace the parcel . kind regards ."


def source(rows: int = 200, **changes: float) -> HelpdeskSource:
    settings = {
        "sft_rows": rows,
        "preference_rows": rows,
        "prompt_rows": rows,
        "temperature": 0.12,
        "quality": 0.6,
    }
    return HelpdeskSource.model_validate({"kind": "helpdesk", **settings, **changes})


# ---------------------------------------------------------------- the gold score by hand


def test_the_weights_sum_to_one_and_the_best_replies_reach_it() -> None:
    assert sum(WEIGHTS.values()) == pytest.approx(1)
    assert gold_score(UPSET, BEST_UPSET) == pytest.approx(1)
    assert gold_score(CALM, BEST_CALM) == pytest.approx(1)


def test_prompts_are_read_as_they_are_meant() -> None:
    assert read_case(UPSET) == Case("kettle", "replace", upset=True, order_number_missing=True)
    assert read_case(CALM) == Case("phone", "trace", upset=False, order_number_missing=False)
    with pytest.raises(ValueError, match="not a prompt of the helpdesk world"):
        read_case("what is the capital of france ?")


@pytest.mark.parametrize(
    ("prompt", "response", "lost"),
    [
        # item: named in the opening, and no other
        (UPSET, BEST_UPSET.replace("about your kettle : ", ""), {"item"}),
        (UPSET, BEST_UPSET.replace("kettle", "phone"), {"item"}),
        (UPSET, "about your phone : " + BEST_UPSET, {"item"}),
        (
            UPSET,
            BEST_UPSET.replace(
                "about your kettle : we are sorry .", "we are sorry . about your kettle :"
            ),
            {"item"},
        ),
        # apology: if and only if upset
        (UPSET, BEST_UPSET.replace("we are sorry . ", ""), {"apology"}),
        (CALM, BEST_CALM.replace("we will", "we are sorry . we will"), {"apology"}),
        # remedy: the right one and no other
        (UPSET, BEST_UPSET.replace("we will replace it . ", ""), {"remedy"}),
        (UPSET, BEST_UPSET.replace("replace", "exchange"), {"remedy"}),
        (
            UPSET,
            BEST_UPSET.replace("replace it .", "replace it . we will exchange it ."),
            {"remedy"},
        ),
        # order number: asked for if and only if missing
        (UPSET, BEST_UPSET.replace("what is your order number ? ", ""), {"order_number"}),
        (CALM, BEST_CALM.replace("kind", "what is your order number ? kind"), {"order_number"}),
        # brevity: nothing else, nothing twice
        (CALM, BEST_CALM.replace("kind", f"{FILLERS[0]} kind"), {"brevity"}),
        (
            CALM,
            BEST_CALM.replace(
                "we will trace the parcel .",
                "we will trace the parcel . we will trace the parcel .",
            ),
            {"brevity"},
        ),
        (CALM, BEST_CALM.replace("phone :", "phone : parcel the"), {"remedy", "brevity"}),
        # close: last
        (CALM, BEST_CALM.replace(" kind regards .", ""), {"close"}),
        (CALM, "kind regards . " + BEST_CALM, {"item", "brevity"}),
        (CALM, BEST_CALM.replace("kind regards .", "kind regards . we will"), {"brevity", "close"}),
        (
            CALM,
            BEST_CALM.replace(
                "we will trace the parcel . kind regards .",
                "kind regards . we will trace the parcel .",
            ),
            {"close"},
        ),
        # nothing at all is no reply: silence meets not even what asks for it
        (UPSET, "", {"item", "apology", "remedy", "order_number", "brevity", "close"}),
        (CALM, "", {"item", "apology", "remedy", "order_number", "brevity", "close"}),
        (UPSET, "kettle", {"item", "apology", "remedy", "order_number", "brevity", "close"}),
    ],
)
def test_each_fault_costs_its_criterion(prompt: str, response: str, lost: set[str]) -> None:
    assert {name for name, met in criteria(prompt, response).items() if not met} == lost
    assert gold_score(prompt, response) == pytest.approx(1 - sum(WEIGHTS[name] for name in lost))


@given(st.floats(0, 1), st.integers(0, 10_000))
def test_gold_scores_are_in_the_unit_interval(quality: float, seed: int) -> None:
    assert 0 <= gold_score(UPSET, reply(read_case(UPSET), quality, random.Random(seed))) <= 1


def test_replies_of_quality_one_are_perfect_and_those_of_quality_zero_are_not() -> None:
    for prompt in (UPSET, CALM):
        case = read_case(prompt)
        assert gold_score(prompt, reply(case, 1.0, random.Random(1))) == pytest.approx(1)
        assert {
            gold_score(prompt, reply(case, 0.0, random.Random(seed))) for seed in range(200)
        } == {0}


# ---------------------------------------------------------------- labels and the Bayes limit


def test_preference_probabilities_by_hand() -> None:
    assert preference_probability(0.5, 0.5, 0.12) == 0.5
    assert preference_probability(0.7, 0.4, 0.3) == pytest.approx(1 / (1 + math.exp(-1)))
    assert preference_probability(0.4, 0.7, 0.3) == pytest.approx(
        1 - preference_probability(0.7, 0.4, 0.3)
    )


def test_the_bayes_limit_by_hand() -> None:
    close = BEST_CALM.replace(" kind regards .", "")
    pairs = [
        {"prompt": CALM, "chosen": BEST_CALM, "rejected": close},
        {"prompt": CALM, "chosen": close, "rejected": BEST_CALM},
    ]
    assert bayes_accuracy(pairs, WEIGHTS["close"]) == pytest.approx(1 / (1 + math.exp(-1)))
    assert bayes_accuracy([{"prompt": CALM, "chosen": close, "rejected": close}], 0.1) == 0.5


@pytest.mark.parametrize("temperature", [0.05, 0.12, 0.5])
def test_the_bayes_limit_is_the_accuracy_of_the_gold_order_on_drawn_labels(
    temperature: float,
) -> None:
    pairs = generate(source(4000, temperature=temperature), seed=5).preference
    gains = [
        gold_score(pair["prompt"], pair["chosen"]) - gold_score(pair["prompt"], pair["rejected"])
        for pair in pairs
    ]
    accuracy = sum((gain > 1e-9) + 0.5 * (abs(gain) <= 1e-9) for gain in gains) / len(gains)
    limit = bayes_accuracy(pairs, temperature)
    assert accuracy == pytest.approx(limit, abs=4 * math.sqrt(limit * (1 - limit) / len(pairs)))


# ---------------------------------------------------------------- rows


def test_the_world_is_a_function_of_its_seed() -> None:
    assert generate(source(), seed=5) == generate(source(), seed=5)
    assert generate(source(), seed=5) != generate(source(), seed=6)


@pytest.mark.parametrize("kind", ["sft", "preference", "prompts"])
def test_more_rows_of_one_kind_only_append(kind: str) -> None:
    name = {"sft": "sft_rows", "preference": "preference_rows", "prompts": "prompt_rows"}[kind]
    small, large = generate(source(), seed=5), generate(source(**{name: 300}), seed=5)
    assert getattr(large, kind)[:200] == getattr(small, kind)
    assert len(getattr(large, kind)) == 300
    assert {
        other: getattr(large, other) == getattr(small, other)
        for other in ("sft", "preference", "prompts")
        if other != kind
    } == {other: True for other in ("sft", "preference", "prompts") if other != kind}


def test_better_quality_gives_better_demonstrations() -> None:
    scores = [
        mean_gold(generate(source(500, quality=quality), seed=5).sft) for quality in (0.2, 0.6, 0.9)
    ]
    assert scores == sorted(scores)
    assert scores[2] - scores[0] > 0.4


def test_a_pair_holds_two_different_replies_and_every_remedy_occurs() -> None:
    world = generate(source(500), seed=5)
    assert all(pair["chosen"] != pair["rejected"] for pair in world.preference)
    assert {read_case(row["prompt"]).remedy for row in world.prompts} == set(REMEDIES)
    assert {read_case(row["prompt"])[2:] for row in world.prompts} == {
        (a, b) for a in (True, False) for b in (True, False)
    }
