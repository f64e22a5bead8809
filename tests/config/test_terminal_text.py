from config.terminal_text import shown


def test_a_value_of_any_size_is_short_in_a_message() -> None:
    assert shown("two") == "'two'"
    assert len(shown("x" * 10**6)) <= 80
    assert len(shown([["x" * 10**6] * 1000] * 1000)) < 10_000
    assert shown("\x1b[2J\u202e") == r"'\x1b[2J\u202e'"
