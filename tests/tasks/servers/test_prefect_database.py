"""Transactions that write to Prefect's SQLite at the same time: all of them do."""

import asyncio
from pathlib import Path

import pytest
import sqlalchemy as sa
from prefect.server.database.configurations import AioSqliteConfiguration
from sqlalchemy.exc import OperationalError

from tasks.servers.prefect_database import WaitingWriters

READ, WRITE = sa.text("select count(*) from runs"), sa.text("insert into runs values (1)")


async def read_then_write_beside_another(kind: type[AioSqliteConfiguration], database: Path) -> int:
    """Rows after one transaction has read and then written while another one came to write."""
    configuration = kind(f"sqlite+aiosqlite:///{database}")
    engine = await configuration.engine()
    async with engine.begin() as connection:
        await connection.execute(sa.text("create table runs (x)"))
    has_read = asyncio.Event()

    async def first() -> None:
        session = await configuration.session(engine)
        async with session, configuration.begin_transaction(session):
            await session.execute(READ)
            has_read.set()
            await asyncio.sleep(0.3)  # Prefect's own lets the second one write now
            await session.execute(WRITE)

    async def second() -> None:
        session = await configuration.session(engine)
        await has_read.wait()
        async with session, configuration.begin_transaction(session):
            await session.execute(WRITE)

    await asyncio.gather(first(), second())
    async with engine.connect() as connection:
        return int((await connection.execute(READ)).scalar_one())


def test_who_reads_and_then_writes_is_not_refused_because_another_one_wrote(tmp_path: Path) -> None:
    assert asyncio.run(read_then_write_beside_another(WaitingWriters, tmp_path / "ours.db")) == 2
    with pytest.raises(OperationalError, match="database is locked"):
        asyncio.run(read_then_write_beside_another(AioSqliteConfiguration, tmp_path / "prefects.db"))
