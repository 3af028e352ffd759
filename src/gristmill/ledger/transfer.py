"""All attempts of one ledger into another, whatever kind each is.

Invariant: attempts are copied whole and one by one, in the order in which they began; what was copied when it breaks
off stays, and copying again goes on behind it. Memory holds a few attempts at a time.

Not here: what a copy is (copying).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, NamedTuple

from gristmill.errors import Code, LedgerError
from gristmill.ledger.copying import AttemptRows, CopyAttempt
from gristmill.ledger.read_side import LedgerReader
from gristmill.ledger.write_side import LedgerWriter

__all__ = ["Copied", "copy_ledger"]

_AHEAD: Final = 4


class Copied(NamedTuple):
    """One attempt that is in both ledgers now; `added`: it was not before."""

    rows: AttemptRows
    added: bool


def copy_ledger(source: LedgerReader, target: LedgerWriter, told: Callable[[Copied], None]) -> None:
    """Copy every attempt.

    Args:
        source: others may write to it meanwhile; each attempt is copied as it is when its turn comes.
        target: opened with `keep_open`, so that what an earlier copy had in flight is not lost.
        told: called with each attempt when it is durable in the target.

    Raises:
        LedgerError: `attempt_differs`, the target holds an attempt with other content; `key_exists`, another attempt of
            the target has its key; `ledger_damaged`; or a ledger cannot be read or written. What came before is copied.
    """
    waiting: deque[tuple[AttemptRows, Future[bool]]] = deque()

    def settle() -> None:
        rows, added = waiting.popleft()
        told(Copied(rows, added.result()))

    for key in source.attempts():
        try:
            rows = source.rows_of(key)
        except LedgerError as error:
            if error.code != Code.ROLLOUT_UNKNOWN:
                raise
            # It was retired since it was listed.
            continue
        waiting.append((rows, target.submit(CopyAttempt(rows))))
        if len(waiting) >= _AHEAD:
            settle()
    while waiting:
        settle()
