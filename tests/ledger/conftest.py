"""Every ledger, for the suites that all of them have to pass."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill.ledger import Ledger, MemoryLedger, SqliteLedger
from tests.ledger.server import wanted_server

_schemas = itertools.count()


@pytest.fixture
def postgres_url() -> str:
    """A ledger that is not there yet, in a schema of its own."""
    return wanted_server().url(f"t{next(_schemas)}")


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
