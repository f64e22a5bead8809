"""No option that is typed is ignored silently."""

import pytest
from typer.testing import CliRunner

from cli.main import app
from config.errors import UserError


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("up --serve-port 3", "--serve-port does nothing without --serve."),
        ("up --gpu", "--gpu does nothing without --docker."),
        ("up --docker --prefect-port 5", "--prefect-port does nothing beside --docker."),
        ("up --docker --no-auth", "--no-auth does nothing beside --docker."),
    ],
)
def test_an_option_that_nothing_reads_is_refused(typed: str, told: str) -> None:
    with pytest.raises(UserError) as raised:
        CliRunner().invoke(app, typed.split(), catch_exceptions=False)
    assert str(raised.value).startswith(told)
