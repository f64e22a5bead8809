import pytest

from training.preparation.baselines import ReplyPair, bag_of_words, longer_wins


def test_longer_wins_counts_longer_replies_and_half_of_the_equal_ones() -> None:
    pairs = [ReplyPair("aaa", "a"), ReplyPair("aa", "a"), ReplyPair("a", "aaa"), ReplyPair("ab", "cd")]
    assert longer_wins(pairs).value == 2.5 / 4


def test_bag_of_words_finds_a_word_that_decides() -> None:
    train = [ReplyPair(f"please wait {i}", f"go away {i}") for i in range(100)]
    assert bag_of_words(train, [ReplyPair("please wait 7", "go away 8"), ReplyPair("do wait", "do away")]).value == 1.0
    assert bag_of_words(train, [ReplyPair("go away 8", "please wait 7")]).value == 0.0


def test_bag_of_words_finds_that_length_decides_where_words_do_not() -> None:
    train = [ReplyPair("a b a b a b" + f" x{i}", f"a b y{i}") for i in range(100)]
    assert bag_of_words(train, [ReplyPair("q r s t u v", "q r")]).value == 1.0


def test_bag_of_words_scores_half_where_it_knows_nothing() -> None:
    train = [ReplyPair(f"please wait {i}", f"go away {i}") for i in range(20)]
    assert bag_of_words(train, [ReplyPair("new words", "other ones")] * 3).value == 0.5


def test_the_baseline_does_not_depend_on_which_side_comes_first_in_training() -> None:
    train = [ReplyPair(f"good {i % 7}", f"bad bad {i % 5}") for i in range(60)]
    test = [ReplyPair(f"good {i % 3}", f"bad {i % 4} 1") for i in range(30)]
    assert bag_of_words(train, test).value == pytest.approx(bag_of_words(train[1:] + train[:1], test).value)
