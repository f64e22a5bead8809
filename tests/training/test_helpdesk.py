import hashlib
import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.errors import ParamsError
from config.sections.data import HelpdeskSource
from tests.support.helpdesk_rows import generate
from training.worlds.helpdesk import (
    Case,
    bayes_accuracy,
    criteria,
    exchanges,
    gold_score,
    mean_gold,
    preference_probability,
    read_case,
    reply,
)
from training.worlds.world import BY_HAND, WEIGHTS, world_of

UPSET = "hello , my kettle is cracked . i am really angry ."
CALM = "hello , my phone is very late . no hurry . order number 4 1 7 ."
BEST_UPSET = "about your kettle : we are sorry . we will replace it . what is your order number ? kind regards ."
BEST_CALM = "about your phone : we will trace the parcel . kind regards ."


def source(rows: int = 200, **changes: float) -> HelpdeskSource:
    settings = {"sft_rows": rows, "preference_rows": rows, "prompt_rows": rows, "temperature": 0.12, "quality": 0.6}
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
            BEST_UPSET.replace("about your kettle : we are sorry .", "we are sorry . about your kettle :"),
            {"item"},
        ),
        # apology: if and only if upset
        (UPSET, BEST_UPSET.replace("we are sorry . ", ""), {"apology"}),
        (CALM, BEST_CALM.replace("we will", "we are sorry . we will"), {"apology"}),
        # remedy: the right one and no other
        (UPSET, BEST_UPSET.replace("we will replace it . ", ""), {"remedy"}),
        (UPSET, BEST_UPSET.replace("replace", "exchange"), {"remedy"}),
        (UPSET, BEST_UPSET.replace("replace it .", "replace it . we will exchange it ."), {"remedy"}),
        # order number: asked for if and only if missing
        (UPSET, BEST_UPSET.replace("what is your order number ? ", ""), {"order_number"}),
        (CALM, BEST_CALM.replace("kind", "what is your order number ? kind"), {"order_number"}),
        # brevity: nothing else, nothing twice
        (CALM, BEST_CALM.replace("kind", f"{BY_HAND.fillers[0]} kind"), {"brevity"}),
        (
            CALM,
            BEST_CALM.replace("we will trace the parcel .", "we will trace the parcel . we will trace the parcel ."),
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
                "we will trace the parcel . kind regards .", "kind regards . we will trace the parcel ."
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
        assert {gold_score(prompt, reply(case, 0.0, random.Random(seed))) for seed in range(200)} == {0}


# ---------------------------------------------------------------- labels and the Bayes limit


def test_preference_probabilities_by_hand() -> None:
    assert preference_probability(0.5, 0.5, 0.12) == 0.5
    assert preference_probability(0.7, 0.4, 0.3) == pytest.approx(1 / (1 + math.exp(-1)))
    assert preference_probability(0.4, 0.7, 0.3) == pytest.approx(1 - preference_probability(0.7, 0.4, 0.3))


def test_the_bayes_limit_by_hand() -> None:
    close = BEST_CALM.replace(" kind regards .", "")
    pairs = [
        {"prompt": CALM, "chosen": BEST_CALM, "rejected": close},
        {"prompt": CALM, "chosen": close, "rejected": BEST_CALM},
    ]
    assert bayes_accuracy(pairs, WEIGHTS["close"]) == pytest.approx(1 / (1 + math.exp(-1)))
    assert bayes_accuracy([{"prompt": CALM, "chosen": close, "rejected": close}], 0.1) == 0.5


@pytest.mark.parametrize("temperature", [0.05, 0.12, 0.5])
def test_the_bayes_limit_is_the_accuracy_of_the_gold_order_on_drawn_labels(temperature: float) -> None:
    pairs = generate(source(4000, temperature=temperature), seed=5).preference
    gains = [
        gold_score(pair["prompt"], pair["chosen"]) - gold_score(pair["prompt"], pair["rejected"]) for pair in pairs
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
    scores = [mean_gold(generate(source(500, quality=quality), seed=5).sft) for quality in (0.2, 0.6, 0.9)]
    assert scores == sorted(scores)
    assert scores[2] - scores[0] > 0.4


def test_a_pair_holds_two_different_replies_and_every_remedy_occurs() -> None:
    world = generate(source(500), seed=5)
    assert all(pair["chosen"] != pair["rejected"] for pair in world.preference)
    assert {read_case(row["prompt"]).remedy for row in world.prompts} == set(BY_HAND.remedies)
    assert {read_case(row["prompt"])[2:4] for row in world.prompts} == {
        (a, b) for a in (True, False) for b in (True, False)
    }


# ---------------------------------------------------------------- a family of worlds

SHAPE = {
    "seed": 5,
    "items": 9,
    "problems": 5,
    "wordings": 3,
    "facts": 2,
    "fact_values": 8,
    "fact_words": 2,
    "sentence_words": 5,
    "vocabulary": 120,
}


def world_source(**changes: int) -> HelpdeskSource:
    return HelpdeskSource.model_validate({**source().model_dump(), "world": {**SHAPE, **changes}})


def test_without_a_shape_the_world_is_the_one_by_hand_to_the_letter() -> None:
    rows = generate(source(2000), seed=1)
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    assert digest == "019236267b82529968c2a43ba0dff1c316ea107e4d763a8f6340a693af9f0c1f"


@given(
    items=st.integers(2, 24),
    problems=st.integers(2, 10),
    wordings=st.integers(1, 4),
    facts=st.integers(0, 3),
    fact_values=st.integers(2, 16),
    fact_words=st.integers(1, 3),
    sentence_words=st.integers(2, 8),
    spare=st.integers(0, 200),
    seed=st.integers(0, 10**6),
)
def test_in_every_world_the_best_reply_reaches_one_and_each_fault_costs_its_weight(
    spare: int, seed: int, **sizes: int
) -> None:
    named = sizes["items"] + 3
    named += (sizes["fact_values"] + 2 * sizes["facts"]) if sizes["facts"] else 0
    given = world_source(seed=seed, vocabulary=named + 24 + spare, **sizes)
    world = world_of(given)
    assert sum(world.weights.values()) == pytest.approx(1)
    assert (len(world.items), len(world.problems)) == (sizes["items"], sizes["problems"])
    marks_and_digits = 14
    assert len(world.words) <= named + 24 + spare + marks_and_digits
    for prompt, best in exchanges(world, 5):
        case = read_case(prompt, world)
        assert gold_score(prompt, best, world) == pytest.approx(1)
        other = next(item for item in world.items if item != case.item)
        wrong_item = best.replace(f"{world.about} {case.item} :", f"{world.about} {other} :")
        lost = 1 - gold_score(prompt, wrong_item, world)
        assert lost == pytest.approx(world.weights["item"])
        for i, (fact, value) in enumerate(zip(world.facts, case.facts, strict=True)):
            said = f"{fact.repeated} {value} ."
            assert said in best
            for wrong in (said.replace(value, f"{value} {value}"), ""):
                changed = " ".join(best.replace(said, wrong).split())
                met = criteria(prompt, changed, world)
                assert [name for name in met if not met[name]] == [f"fact_{i}"]


def test_a_prompt_tells_mood_number_and_facts_in_the_order_of_its_world() -> None:
    world = world_of(world_source())
    case = Case(world.items[2], "remedy 1", True, False, ("a b", "c d"))
    upset, problem = world.upset[0], world.problems["remedy 1"][1]
    stated = [upset, f"{world.order_number} 4 1 7 .", *(f"{f.stated} " for f in world.facts)]
    stated[2] += "a b ."
    stated[3] += "c d ."
    first = f"{world.greetings[0]} {world.mine} {world.items[2]} {problem} ."
    prompt = " ".join([first, *(stated[i] for i in world.stated_in)])
    assert read_case(prompt, world) == case
    with pytest.raises(ValueError, match="not a prompt"):
        read_case(prompt.replace(f"{world.facts[1].stated} c d .", ""), world)


@pytest.mark.parametrize("drawn", [False, True])
def test_an_item_pair_is_one_reply_that_names_the_customers_item_and_another(drawn: bool) -> None:
    given = (world_source() if drawn else source()).model_copy(update={"item_pairs": 1.0})
    world = world_of(given)
    for pair in generate(given, seed=5).preference:
        both = [criteria(pair["prompt"], pair[side], world) for side in ("chosen", "rejected")]
        assert {met.pop("item") for met in both} == {True, False}
        assert both[0] == both[1]
        chosen, rejected = pair["chosen"].split(), pair["rejected"].split()
        assert sum(a != b for a, b in zip(chosen, rejected, strict=True)) == 1


def test_the_share_of_item_pairs_is_the_one_given() -> None:
    def rest(pair: dict[str, str]) -> bool:
        a, b = pair["chosen"].split(), pair["rejected"].split()
        return len(a) != len(b) or sum(x != y for x, y in zip(a, b, strict=True)) != 1

    without, mixed = (generate(source(4000, item_pairs=share), seed=5).preference for share in (0.0, 0.25))
    share = 1 - sum(map(rest, mixed)) / len(mixed)
    before = 1 - sum(map(rest, without)) / len(without)
    assert share == pytest.approx(0.25 + 0.75 * before, abs=0.03)


def test_worlds_of_other_seeds_have_other_words_and_the_same_seed_the_same() -> None:
    first, same, other = (world_of(world_source(seed=seed)) for seed in (5, 5, 6))
    assert first == same
    shared = set(first.items) & set(other.items)
    assert len(shared) < 3


def test_demonstrations_of_a_world_are_as_good_as_their_quality() -> None:
    given = world_source()
    rows = generate(given.model_copy(update={"sft_rows": 3000}), seed=1)
    assert mean_gold(rows.sft, world_of(given)) == pytest.approx(0.6, abs=0.02)


def test_a_vocabulary_too_small_for_the_world_is_refused_with_one_that_would_do() -> None:
    with pytest.raises(ParamsError, match=r"vocabulary=40 is too small .*: 48 words would do"):
        world_source(vocabulary=40)
    assert world_source(vocabulary=48).world is not None
