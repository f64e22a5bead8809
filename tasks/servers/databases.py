"""Databases of the two servers: SQLite files of the project, or databases of the PostgreSQL that `tracking.uri` names.

postgresql://user@host:5432/mlflow    MLflow's; Prefect's is the database `prefect` beside it, on
                                      the same server as the same user
"""

import psycopg
from psycopg import sql
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from config.errors import EnvironmentFault

PREFECT_DATABASE = "prefect"
CONNECT_SECONDS = 10


def prefect_url(uri: str) -> str:
    """The URL of Prefect's database beside MLflow's. Raises EnvironmentFault if `uri` is none."""
    return (
        _parsed(uri)
        .set(drivername="postgresql+asyncpg", database=PREFECT_DATABASE)
        .render_as_string(hide_password=False)
    )


def ensure_databases(uri: str) -> list[str]:
    """Create MLflow's and Prefect's database if they are not there; returns those that were created.

    Raises EnvironmentFault if the server does not answer or does not let this user.
    """
    url = _parsed(uri)
    wanted = [str(url.database), PREFECT_DATABASE]
    try:
        # a database is not created within a transaction
        with psycopg.connect(
            host=url.host,
            port=url.port,
            user=url.username,
            password=url.password,
            dbname="postgres",
            connect_timeout=CONNECT_SECONDS,
            autocommit=True,
        ) as connection:
            names = {name for (name,) in connection.execute("SELECT datname FROM pg_database")}
            missing = [name for name in wanted if name not in names]
            for name in missing:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
            return missing
    except psycopg.Error as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise EnvironmentFault(
            f"PostgreSQL at tracking.uri={url.render_as_string(hide_password=True)} cannot be used: {reason}. "
            f"Start it, make the databases {' and '.join(wanted)} for that user, or change the URI in params.yaml; "
            "the password may come from PGPASSWORD or ~/.pgpass."
        ) from None


def _parsed(uri: str) -> URL:
    try:
        url = make_url(uri)
    except ArgumentError:
        url = None
    if url is None or not url.database:
        raise EnvironmentFault(
            f"tracking.uri={uri.split('@')[-1]} is not a PostgreSQL URL. Write it like "
            "postgresql://user@host:5432/mlflow in params.yaml."
        )
    return url
