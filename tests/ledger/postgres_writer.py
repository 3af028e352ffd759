"""Writes to a PostgreSQL ledger from several threads until it is killed, and tells each commit that returned.

    python -m tests.ledger.postgres_writer URL NAME LEASE_S

A line for each, unbuffered: `ROLLOUT ATTEMPT CALL ORDINAL`. Each thread has one more call in flight all the time.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

from gristmill.errors import LedgerError
from gristmill.ledger import AttemptKey, Ledger
from gristmill.ledger.postgres import PostgresLedger
from gristmill.records import Delivery
from tests.ledger.attempts import chain
from tests.ledger.crash import CALLS, seed_of

__all__ = ["THREADS"]

THREADS = 3


def _write(ledger: Ledger, name: str, thread: int) -> None:
    attempt = 0
    while True:
        key = AttemptKey(f"{name}-{thread}", attempt)
        for call in chain(CALLS, seed_of(key), long_chars=2000):
            call_id = call.record.model_call_id
            ledger.admit(key, call_id, call.record.parent_call_id)
            ordinal = ledger.commit(key, call)
            os.write(1, f"{key.rollout_id} {attempt} {call_id} {ordinal}\n".encode())
            if ordinal % 3 == 0:
                ledger.deliver(key, call_id, Delivery.DELIVERED)
        attempt += 1


def main(url: str, name: str, lease_s: float) -> None:
    """Write until killed, or refused."""
    ledger = PostgresLedger(url, lease_s=lease_s)
    for thread in range(THREADS):
        # One that is never answered, in an attempt of its own.
        ledger.admit(AttemptKey(f"{name}-open", thread), "c0")

    def work(thread: int) -> None:
        with suppress(LedgerError):
            _write(ledger, name, thread)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(THREADS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
