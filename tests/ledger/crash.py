"""Kill a writing process at random moments, many times, and look for what it was told is stored.

    python -m tests.ledger.crash --kills 1000

Each round forks a process that opens the ledger and writes from several threads as fast as it can: admit, commit,
deliver; after each commit that returned it writes one line to an unbuffered pipe. The parent kills it with SIGKILL at a
random moment, from before it has opened the ledger on. Then the ledger must open, every call named on a whole line must
be there exactly as it was written (record, tokens, exchange), everything else that is there must be intact too, and
what was in flight must be lost with the reason that says so.

A kill alone proves little: what was written survives it without any sync. `test_sqlite_syncs.py` counts the syncs.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from time import monotonic

import msgspec

from gristmill.ledger import AttemptKey, SqliteLedger, StoredCall
from gristmill.records import Capture, Delivery
from tests.ledger.attempts import chain, same_tokens

__all__ = ["CALLS", "LOST", "Report", "check_attempt", "run", "seed_of"]

THREADS = 4
CALLS = 12
ROUNDS_A_FILE = 40
LONGEST_s = 0.25
LOST = "the process that made the call ended before its outcome"


class Report(msgspec.Struct):
    """What the kills found."""

    kills: int = 0
    before_open: int = 0
    acknowledged: int = 0
    unacknowledged: int = 0
    marked_lost: int = 0
    seconds: float = 0.0


def _write(ledger: SqliteLedger, pipe: int, round_no: int, thread: int) -> None:
    attempt = 0
    while True:
        key = AttemptKey(f"r{round_no}-{thread}", attempt)
        for call in chain(CALLS, seed_of(key), long_chars=2000):
            call_id = call.record.model_call_id
            ledger.admit(key, call_id, call.record.parent_call_id)
            ordinal = ledger.commit(key, call)
            os.write(pipe, f"{key.rollout_id} {attempt} {call_id} {ordinal}\n".encode())
            if ordinal % 3 == 0:
                ledger.deliver(key, call_id, Delivery.DELIVERED)
        attempt += 1


def seed_of(key: AttemptKey) -> int:
    return random.Random(f"{key.rollout_id}/{key.attempt}").randrange(2**32)


def _child(path: Path, pipe: int, round_no: int) -> None:
    ledger = SqliteLedger(path)
    os.write(pipe, b"open\n")
    for thread in range(THREADS):
        threading.Thread(target=_write, args=(ledger, pipe, round_no, thread), daemon=True).start()
    signal.pause()


def _kill_one(path: Path, round_no: int, delay_s: float, after_open: bool) -> list[bytes]:
    """Start a writer, kill it, and return the whole lines that it wrote."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(read)
            _child(path, write, round_no)
        finally:
            os._exit(1)
    os.close(write)
    data = b""
    if after_open:
        data = os.read(read, 65536)
    until = monotonic() + delay_s
    while (left_s := until - monotonic()) > 0:
        if select.select([read], [], [], left_s)[0]:
            more = os.read(read, 65536)
            if not more:
                raise AssertionError("the writer ended by itself")
            data += more
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while more := os.read(read, 65536):
        data += more
    os.close(read)
    return data.split(b"\n")[:-1]


def _check(path: Path, round_no: int, lines: list[bytes], report: Report) -> None:
    acknowledged: dict[AttemptKey, dict[str, int]] = {}
    for line in lines:
        if line == b"open":
            continue
        rollout_id, attempt, call_id, ordinal = line.decode().split()
        acknowledged.setdefault(AttemptKey(rollout_id, int(attempt)), {})[call_id] = int(ordinal)
    with SqliteLedger(path) as ledger:
        lost = 0
        seen = 0
        keys = [key for thread in range(THREADS) for key in ledger.rollout(f"r{round_no}-{thread}")]
        assert set(acknowledged) <= set(keys), "an acknowledged attempt is missing"
        for key in keys:
            capture, _ = ledger.read(key, exchanges=True)
            found = {record.model_call_id: record.ordinal for record in capture.records}
            missing = acknowledged.get(key, {}).items() - found.items()
            assert not missing, f"acknowledged and not there: {key} {missing}"
            check_attempt(key, capture)
            lost += len(capture.lost)
            seen += len(found)
        assert ledger.lost_on_open == lost, (ledger.lost_on_open, lost)
    report.kills += 1
    report.before_open += b"open" not in lines
    told = sum(map(len, acknowledged.values()))
    report.acknowledged += told
    report.unacknowledged += seen - told
    report.marked_lost += lost


def check_attempt(key: AttemptKey, capture: Capture, lost: str = LOST) -> None:
    """Compare everything that is stored with what was written."""
    written: list[StoredCall] = list(chain(CALLS, seed_of(key), long_chars=2000))
    for n, record in enumerate(capture.records):
        call = written[n]
        wanted = msgspec.structs.replace(
            call.record, rollout_id=key.rollout_id, attempt=key.attempt, ordinal=n, delivery=record.delivery
        )
        assert record == wanted, f"{key} {record.model_call_id}: torn record"
        assert record.delivery == Delivery.UNKNOWN or n % 3 == 0
        assert call.tokens is not None
        assert same_tokens(capture.tokens[record.model_call_id], call.tokens), f"{key} {n}: torn tokens"
        assert capture.exchanges[record.model_call_id] == call.exchange, f"{key} {n}: torn exchange"
    assert len(capture.lost) <= 1
    assert all(call.reason == lost for call in capture.lost), capture.lost
    assert Counter(call.model_call_id for call in capture.lost).keys().isdisjoint(capture.tokens)


def run(kills: int, seed: int, folder: Path) -> Report:
    """Kill `kills` writers; an AssertionError names what is missing or torn."""
    chance = random.Random(seed)
    report = Report()
    start = monotonic()
    for round_no in range(kills):
        # A new file now and then, so that kills also fall into its making.
        path = folder / f"crash-{round_no // ROUNDS_A_FILE}.ledger"
        after_open = chance.random() < 0.85
        delay_s = chance.uniform(0, LONGEST_s if after_open else 0.05)
        lines = _kill_one(path, round_no, delay_s, after_open)
        _check(path, round_no, lines, report)
        if round_no % ROUNDS_A_FILE == ROUNDS_A_FILE - 1:
            for file in folder.glob("crash-*"):
                file.unlink()
    report.seconds = monotonic() - start
    return report


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args(arguments)
    seed = random.randrange(2**32) if options.seed is None else options.seed
    sys.stdout.write(f"seed {seed}\n")
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        report = run(options.kills, seed, Path(folder))
    sys.stdout.write(
        f"{report.kills} kills in {report.seconds:.0f} s, {report.before_open} of them before the ledger was open: "
        f"{report.acknowledged} acknowledged calls, all intact; {report.unacknowledged} more intact; "
        f"{report.marked_lost} in flight, all marked lost\n"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
