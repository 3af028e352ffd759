"""Reading a ledger that lies in tables: the part of every such ledger that is the same on every database.

Invariant: each answer comes from one state of the ledger. Whoever looks at one row reads no more than that.

Not here: connections (the databases' own modules), what the rows mean (reader, summaries).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from gristmill.errors import Code, LedgerError
from gristmill.ledger.address import LedgerAddress
from gristmill.ledger.check import check_attempt
from gristmill.ledger.copying import AttemptRows, read_rows
from gristmill.ledger.protocol import AttemptKey, AttemptSetup, AttemptState, Counts, StoredCall, Summary
from gristmill.ledger.reader import find_attempt, read_capture, read_late, read_result
from gristmill.ledger.session import Session
from gristmill.ledger.setups import read_grant, read_grants, read_setup
from gristmill.ledger.summaries import counts, summary_page
from gristmill.records import Capture, Result

__all__ = ["LedgerReader"]


class LedgerReader(ABC):
    """Reads a ledger, while others write to it or after they have ended."""

    @abstractmethod
    def _reading(self) -> AbstractContextManager[Session]:
        """Lend a connection that sees one state of the ledger."""

    @property
    @abstractmethod
    def address(self) -> LedgerAddress:
        """Where the ledger is."""

    @abstractmethod
    def close(self) -> None:
        """Read no more."""

    def attempts(self) -> Iterator[AttemptKey]:
        """Yield the attempts in the order in which they began."""
        for summary in self.summaries():
            yield summary.key

    def rollout(self, rollout_id: str) -> tuple[AttemptKey, ...]:
        """Return the attempts of one rollout by number; empty where it is not known."""
        with self._reading() as connection:
            select = "SELECT rollout_id, attempt FROM attempts WHERE rollout_id = ? ORDER BY attempt"
            return tuple(map(AttemptKey._make, connection.execute(select, (rollout_id,))))

    def summaries(
        self,
        *,
        after: AttemptKey | None = None,
        state: AttemptState | None = None,
        group_id: str | None = None,
    ) -> Iterator[Summary]:
        """Yield one line for each attempt, in the order in which they began; see `Ledger.summaries`."""
        number = 0
        if after is not None:
            with self._reading() as connection:
                number = find_attempt(connection, after).attempt_no
        while True:
            with self._reading() as connection:
                page = summary_page(connection, number, state, group_id)
            if not page:
                return
            number = page[-1][0]
            for _, summary in page:
                yield summary

    def summary(self, key: AttemptKey) -> Summary:
        """Return the line of one attempt; see `Ledger.summary`."""
        with self._reading() as connection:
            number = find_attempt(connection, key).attempt_no
            [(_, summary)] = summary_page(connection, number - 1, None, None, 1)
            return summary

    def counts(self) -> Counts:
        """Add up all attempts."""
        with self._reading() as connection:
            return counts(connection)

    def read(self, key: AttemptKey, *, tokens: bool = True, exchanges: bool = False) -> tuple[Capture, Result | None]:
        """Return everything captured of an attempt, and its result; see `Ledger.read`."""
        with self._reading() as connection:
            row = find_attempt(connection, key)
            capture = read_capture(connection, row, tokens=tokens, exchanges=exchanges)
            return capture, read_result(connection, row)

    def late(self, key: AttemptKey) -> tuple[StoredCall, ...]:
        """Return the outcomes that came after the attempt had finished, in commit order."""
        with self._reading() as connection:
            return read_late(connection, find_attempt(connection, key))

    def setup(self, key: AttemptKey) -> AttemptSetup | None:
        """Return what an attempt was opened with, None where it has only calls; see `Ledger.setup`."""
        with self._reading() as connection:
            return read_setup(connection, find_attempt(connection, key))

    def grants(self) -> Iterator[tuple[str, AttemptKey]]:
        """Yield the key digests that open an attempt, with their attempts; see `Ledger.grants`."""
        with self._reading() as connection:
            found = read_grants(connection)
        yield from found

    def grant(self, key_digest: str) -> AttemptKey | None:
        """Return the attempt that a key digest opens, None where it opens none; see `Ledger.grants`."""
        with self._reading() as connection:
            return read_grant(connection, key_digest)

    def check(self, key: AttemptKey) -> tuple[str, ...]:
        """Say where what is stored of an attempt contradicts itself; see `Ledger.check`."""
        found: list[str] = []
        try:
            with self._reading() as connection:
                row = find_attempt(connection, key)
                # One at a time: what was found before the rows cannot be read any more stays.
                for sentence in check_attempt(connection, row):
                    found.append(sentence)
        except LedgerError as error:
            if error.code != Code.LEDGER_DAMAGED:
                raise
            found.append(error.message)
        return tuple(found)

    def rows_of(self, key: AttemptKey) -> AttemptRows:
        """Return everything that is stored of an attempt as it is stored, to be copied.

        Raises:
            LedgerError: `rollout_unknown`.
        """
        with self._reading() as connection:
            return read_rows(connection, find_attempt(connection, key))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
