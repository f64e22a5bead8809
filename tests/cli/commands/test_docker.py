"""What `rlhf up --docker` refuses before anything starts: each mistake in one line, no value of a secret in it."""

from pathlib import Path

import pytest

from cli.docker import EXAMPLE, SECRETS, read_settings, require_engine
from config.errors import EnvironmentFault
from tests.conftest import ROOT

GOOD = dict.fromkeys(SECRETS, "abcdef123456")


def settings(folder: Path, **changes: str) -> Path:
    path = folder / ".env"
    path.write_text("".join(f"{name}={value}\n" for name, value in {**GOOD, **changes}.items()))
    return path


def test_settings_are_read_as_compose_reads_them(tmp_path: Path) -> None:
    path = settings(tmp_path, PREFECT_PORT="4300")
    path.write_text("# a comment\n" + path.read_text())
    assert read_settings(path) == {**GOOD, "PREFECT_PORT": "4300"}


def test_the_example_names_every_setting_and_holds_no_secret(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"POSTGRES_PASSWORD in docker/\.env is empty"):
        read_settings(ROOT / EXAMPLE)
    text = (ROOT / EXAMPLE).read_text()
    assert all(f"\n{name}=\n" in f"\n{text}" for name in GOOD)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"S3_SECRET_KEY": "short7c"},
            r"S3_SECRET_KEY in docker/\.env is 7 characters long: at least 8 letters and digits",
        ),
        (
            {"POSTGRES_PASSWORD": "with/slash@sign"},
            r"POSTGRES_PASSWORD in docker/\.env is not of letters and digits alone",
        ),
    ],
)
def test_a_setting_that_cannot_work_is_named_without_its_value(
    tmp_path: Path, changes: dict[str, str], words: str
) -> None:
    with pytest.raises(EnvironmentFault, match=words) as fault:
        read_settings(settings(tmp_path, **changes))
    assert not any(value and value in str(fault.value) for value in changes.values())


def test_without_settings_the_line_says_how_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"docker/\.env does not exist.*cp docker/\.env\.example docker/\.env"):
        read_settings(tmp_path / ".env")


def test_an_absent_engine_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    with pytest.raises(
        EnvironmentFault, match=r"no Docker engine answers at unix://.*no\.sock|docker is not on PATH"
    ) as fault:
        require_engine()
    assert "\n" not in str(fault.value)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentFault, match="docker is not on PATH"):
        require_engine()
