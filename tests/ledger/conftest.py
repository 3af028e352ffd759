"""Every ledger, for the suites that all of them have to pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill.ledger import Ledger, MemoryLedger, SqliteLedger


@pytest.fixture(params=("memory", "sqlite"))
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ledger]:
    if request.param == "memory":
        yield MemoryLedger()
        return
    with SqliteLedger(tmp_path / "run.ledger") as made:
        yield made
