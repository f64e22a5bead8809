"""Both servers on a real PostgreSQL, where this machine has one."""

import getpass
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import LiteralString

import psycopg
import pytest
from mlflow import MlflowClient

from config.errors import EnvironmentFault
from config.ports import HOST, free_port
from config.sections.run import Tracking
from tasks.servers.databases import ensure_databases, prefect_url
from tasks.servers.plans import mlflow_plan, prefect_plan
from tasks.servers.processes import start, stop

WITH_PASSWORD = "guest"
"""A user whom the server asks for a password."""
PROGRAMS = ("initdb", "postgres", "pg_ctl")
OWNER = "postgres" if os.geteuid() == 0 else getpass.getuser()
"""PostgreSQL does not run as root."""


def has_owner() -> bool:
    try:
        return pwd.getpwnam(OWNER) is not None
    except KeyError:
        return False


def test_prefects_database_is_beside_mlflows() -> None:
    assert (
        prefect_url("postgresql://me:p%40ss@db.example:5433/mlflow")
        == "postgresql+asyncpg://me:p%40ss@db.example:5433/prefect"
    )
    assert prefect_url("postgresql://me@db.example/tracking") == "postgresql+asyncpg://me@db.example/prefect"


@pytest.mark.parametrize("uri", ["postgresql://me:secret@db.example", "postgresql:mlflow"])
def test_a_url_without_a_database_is_refused_in_one_line_without_its_password(uri: str) -> None:
    with pytest.raises(
        EnvironmentFault, match=r"not a PostgreSQL URL\. Write it like postgresql://user@host:5432/mlflow"
    ) as refused:
        prefect_url(uri)
    assert "secret" not in str(refused.value)


def test_a_server_that_does_not_answer_is_one_line_without_its_password() -> None:
    with pytest.raises(
        EnvironmentFault, match=r"me:\*\*\*@127.0.0.1.*cannot be used: .*Connection refused"
    ) as refused:
        ensure_databases(f"postgresql://me:secret@{HOST}:{free_port()}/mlflow")
    assert "secret" not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.fixture(scope="module")
def postgresql() -> Iterator[str]:
    """A new PostgreSQL, as a tracking URI."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing or not has_owner():
        pytest.skip(f"no PostgreSQL here: {', '.join(missing) or f'user {OWNER}'} is missing")
    # pytest's own are closed to other users
    folder = Path(tempfile.mkdtemp(prefix="rlhf-postgresql-"))
    port = free_port()
    try:
        shutil.chown(folder, OWNER)
        as_owner("initdb", "--auth=trust", "--username=rlhf", "--no-sync", "--pgdata", str(folder / "data"))
        access = folder / "data" / "pg_hba.conf"
        access.write_text(f"host all {WITH_PASSWORD} {HOST}/32 scram-sha-256\n{access.read_text()}")
        options = f"-p {port} -c listen_addresses={HOST} -c unix_socket_directories={folder} -c fsync=off"
        as_owner(
            "pg_ctl",
            "start",
            "--wait",
            "--pgdata",
            str(folder / "data"),
            "--log",
            str(folder / "log"),
            "--options",
            options,
        )
        try:
            yield f"postgresql://rlhf@{HOST}:{port}/mlflow"
        finally:
            as_owner("pg_ctl", "stop", "--mode=immediate", "--pgdata", str(folder / "data"))
    finally:
        shutil.rmtree(folder)


def as_owner(*command: str) -> None:
    subprocess.run(
        command, user=OWNER if os.geteuid() == 0 else None, cwd="/", check=True, timeout=120, stdout=subprocess.DEVNULL
    )


@pytest.mark.slow
@pytest.mark.integration
def test_one_setting_puts_both_servers_on_postgresql(postgresql: str, tmp_path: Path) -> None:
    assert ensure_databases(postgresql) == ["mlflow", "prefect"]
    assert ensure_databases(postgresql) == []
    tracking = Tracking(uri=postgresql, experiment="e", registered_model="m", model="aligned")
    plan = mlflow_plan(tmp_path, tracking, free_port())
    assert plan is not None
    try:
        (prefect, mlflow) = start(tmp_path, [prefect_plan(tmp_path, free_port(), tracking), plan])
        assert prefect.is_healthy()
        MlflowClient(mlflow.url).create_experiment("seen by the server")
        assert one(postgresql, "SELECT count(*) FROM experiments WHERE name = 'seen by the server'") == 1
        assert one(postgresql.replace("/mlflow", "/prefect"), "SELECT count(*) FROM flow_run") == 0
        assert not list(tmp_path.rglob("*.db")), "nothing is in SQLite"
    finally:
        stop(tmp_path)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("wrong-secret", "password authentication failed"),
        ("", "no password supplied"),
        ("right-secret", "permission denied to create database"),
    ],
)
def test_wrong_credentials_are_one_line_without_them(
    postgresql: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str, reason: str
) -> None:
    with psycopg.connect(postgresql.replace("/mlflow", "/postgres")) as connection:
        connection.execute(f"DROP ROLE IF EXISTS {WITH_PASSWORD}")
        connection.execute(f"CREATE ROLE {WITH_PASSWORD} LOGIN PASSWORD 'right-secret'")
    monkeypatch.setenv("PGPASSFILE", str(tmp_path / "none"))
    monkeypatch.setenv("PGPASSWORD", given)
    uri = postgresql.replace("rlhf@", f"{WITH_PASSWORD}@").replace("/mlflow", "/tracking")
    for named in [uri, *([uri.replace("@", f":{given}@")] if given else [])]:
        with pytest.raises(
            EnvironmentFault, match=rf"{WITH_PASSWORD}(:\*\*\*)?@127.0.0.1.*cannot be used: .*{reason}.*PGPASSWORD"
        ) as refused:
            ensure_databases(named)
        assert "secret" not in str(refused.value)
        assert "\n" not in str(refused.value)


def one(uri: str, query: LiteralString) -> int:
    with psycopg.connect(uri) as connection:
        result = connection.execute(query).fetchone()
        assert result is not None
        return int(result[0])
