"""Every ledger, for the suites that all of them have to pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill.ledger import Ledger, MemoryLedger, SqliteLedger
from tests.ledger.server import fresh_url


@pytest.fixture
def postgres_url() -> str:
    """A ledger that is not there yet, in a schema of its own."""
    return fresh_url()


@pytest.fixture(params=("memory", "sqlite", "postgres"))
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ledger]:
    if request.param == "memory":
        yield MemoryLedger()
        return
    if request.param == "sqlite":
        with SqliteLedger(tmp_path / "run.ledger") as made:
            yield made
        return
    url = request.getfixturevalue("postgres_url")
    from gristmill.ledger.postgres import PostgresLedger

    with PostgresLedger(url) as made:
        yield made
