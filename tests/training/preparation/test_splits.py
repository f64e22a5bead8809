from hypothesis import given
from hypothesis import strategies as st

from training.preparation.splits import split_of


def test_the_split_of_a_prompt_never_changes() -> None:
    # worked out once: a change here silently mixes yesterday's test prompts into today's training data
    assert [i for i in range(40) if split_of(f"prompt {i}", 0.2) == "test"] == [2, 6, 7, 14, 15, 19, 25, 34, 39]


def test_the_share_of_test_prompts_is_the_fraction_asked_for() -> None:
    share = sum(split_of(f"prompt {i}", 0.2) == "test" for i in range(20_000)) / 20_000
    assert abs(share - 0.2) < 0.01  # three and a half standard deviations


@given(st.text(), st.floats(0.01, 0.5), st.floats(0.5, 0.99))
def test_a_larger_fraction_only_adds_test_prompts(prompt: str, small: float, large: float) -> None:
    assert split_of(prompt, small) != "test" or split_of(prompt, large) == "test"


def test_prompts_that_count_as_the_same_share_a_split() -> None:
    for i in range(50):
        assert split_of(f"hello  {i}\n", 0.5) == split_of(f" hello {i}", 0.5)


def test_every_turn_of_a_conversation_goes_where_its_opening_goes() -> None:
    for i in range(50):
        opening = {"role": "user", "content": f"prompt {i}"}
        later = [opening, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}]
        assert split_of(f"prompt {i}", 0.5) == split_of([opening], 0.5) == split_of(later, 0.5)
        assert split_of([{"role": "system", "content": "be brief"}, *later], 0.5) == split_of(later, 0.5)
