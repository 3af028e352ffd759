"""Writes to a ledger and acknowledges each commit on file descriptor 9 the moment its future is done.

    python -m tests.ledger.acknowledge PATH WRITERS CALLS

The callback runs in the ledger's own thread, between one transaction and the next, so that the order of writes, syncs
and acknowledgements is the order that the ledger itself keeps. Prints the codes of the writes that failed.
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress

from gristmill.errors import LedgerError
from gristmill.ledger import AttemptKey, SqliteLedger
from gristmill.ledger.writes import Commit, prepare_call
from tests.ledger.attempts import chain

ACK_FD = 9


def main(path: str, writers: int, calls: int) -> None:
    """Write, and print `CODE COUNT` lines."""
    codes: list[str] = []
    ledger = SqliteLedger(path)

    def told(future: Future[tuple[int, ...]]) -> None:
        if future.exception() is None:
            os.write(ACK_FD, b"a")

    def work(writer: int) -> None:
        key = AttemptKey(f"r{writer}")
        for call in chain(calls, writer):
            try:
                future = ledger.submit(Commit(key, [prepare_call(key, call)]))
                future.add_done_callback(told)
                future.result()
            except LedgerError as error:
                codes.append(error.code)

    threads = [threading.Thread(target=work, args=(writer,)) for writer in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with suppress(LedgerError):
        sys.stdout.write(f"calls {ledger.counts().calls}\n")
    sys.stdout.writelines(f"{code} {codes.count(code)}\n" for code in sorted(set(codes)))
    ledger.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
