"""Prefect's SQLite database, on which those who write wait for each other."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from prefect.server.database.configurations import AioSqliteConfiguration
from prefect.server.database.dependencies import set_database_config
from prefect.settings import get_current_settings
from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction


class WaitingWriters(AioSqliteConfiguration):
    """SQLite where a transaction that may write takes its turn as it begins.

    Prefect's own begins as a reader. When it writes after another connection has written,
    SQLite refuses at once, however long it may wait (SQLITE_BUSY_SNAPSHOT), and the server answers 503: its clients
    ask again, its pages do not, and the run that was submitted there is not there. See `BEGIN IMMEDIATE` in
    https://www.sqlite.org/lang_transaction.html.
    """

    @asynccontextmanager
    async def begin_transaction(
        self, session: AsyncSession, with_for_update: bool = False
    ) -> AsyncGenerator[AsyncSessionTransaction, None]:
        async with super().begin_transaction(session, with_for_update=True) as transaction:
            yield transaction


def writers_wait() -> None:
    """Have the server of this process use `WaitingWriters`, if its database is a SQLite."""
    connection = get_current_settings().server.database.connection_url
    url = connection.get_secret_value() if connection else ""
    if url.startswith("sqlite"):
        set_database_config(WaitingWriters(url))
