"""Attempts with everything that a ledger can hold, and archives of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

import msgspec

from gristmill.archive import ArchivedAttempt, PartitionWriter, place_of
from gristmill.archive.manifest import ArchiveManifest, sealed
from gristmill.captures import read_lines
from gristmill.ledger import AttemptKey, AttemptSetup, Ledger, MemoryLedger
from gristmill.records import (
    Attribution,
    CallCredit,
    Capture,
    Delivery,
    Failure,
    Purpose,
    PurposeLabel,
    Result,
)
from tests.cli.stories import TWO_TURNS, returned, story
from tests.ledger.attempts import ODD_JSON, chain, fill

__all__ = ["archived", "everything", "flip", "memory_ledger", "reseal", "rollouts", "write_archive"]


def everything(ledger: Ledger, rollout_id: str = "all", seed: int = 0) -> AttemptKey:
    """Put an attempt into a ledger that has everything an attempt can have."""
    key = AttemptKey(rollout_id, 1)
    setup = AttemptSetup(group_id="before", metadata={"tags": ["a", 1.5]}, overrides={"temperature": 0.5})
    ledger.begin(key, setup)
    fill(ledger, key, 6, seed)
    ledger.deliver(key, "c2", Delivery.PARTIAL)
    ledger.label(key, {"c3": Purpose(PurposeLabel.AUXILIARY, "a title")})
    for call_id in ("late", "gone", "flight"):
        ledger.admit(key, call_id, "c1")
    ledger.lose(key, "gone", "the engine was silent")
    result = Result(
        value={"response": ODD_JSON},
        reward=-0.25,
        group_id="g",
        metadata={"seed": 7, "nested": {"a": [None, True]}},
        advantage=1.5,
        credits=(
            CallCredit(model_call_id="c1", reward=0.5),
            CallCredit(model_call_id="c2", start=1, end=3, reward=2.0),
        ),
        failure=Failure("out of time", Attribution.SCORE),
    )
    ledger.finish(key, result)
    late = next(chain(1, seed + 1))
    record = msgspec.structs.replace(late.record, model_call_id="late", response_id="late")
    exchange = None if late.exchange is None else msgspec.structs.replace(late.exchange, model_call_id="late")
    ledger.commit(key, msgspec.structs.replace(late, record=record, exchange=exchange))
    ledger.freeze(key)
    return key


def archived(ledger: Ledger, key: AttemptKey) -> ArchivedAttempt:
    """Read an attempt out of a ledger as the archive takes it."""
    capture, result = ledger.read(key, exchanges=True)
    summary = ledger.summary(key)
    return ArchivedAttempt(
        capture=capture,
        result=result,
        late=ledger.late(key),
        setup=ledger.setup(key),
        state=summary.state,
        touched_at=summary.touched_at,
    )


def rollouts(count: int, first: int = 0) -> Iterator[tuple[Capture, Result]]:
    """Make rollouts that are selected whole but for their retry; every fifth one is refused."""
    lines = [json.dumps({**line, "rollout_id": "r"}).encode() for line in story()]
    [read] = read_lines(lines).rollouts.values()
    for number in range(first, first + count):
        name = f"rollout-{number:05}"
        records = tuple(msgspec.structs.replace(record, rollout_id=name) for record in read.capture.records)
        texts = ("something else",) if number % 5 == 4 else TWO_TURNS
        result = Result(value=returned(*texts), reward=float(number % 2), group_id=f"group-{number // 4}")
        yield msgspec.structs.replace(read.capture, rollout_id=name, records=records), result


def write_archive(
    path: Path | str, attempts: Sequence[tuple[Capture, Result | None]], name: str = "a", *, part_bytes: int = 2**28
) -> None:
    """Write attempts as a partition."""
    with PartitionWriter(place_of(path), name, part_bytes=part_bytes) as writer:
        for capture, result in attempts:
            writer.add(ArchivedAttempt(capture=capture, result=result))
        writer.finish()


def reseal(partition: Path) -> None:
    """Make a manifest agree with the files, as a careful forger would."""
    path = partition / "manifest.json"
    manifest = msgspec.json.decode(path.read_bytes(), type=ArchiveManifest)
    entries = [
        msgspec.structs.replace(entry, bytes=len(data), sha256=sha256(data).hexdigest())
        for entry in manifest.files
        for data in [(partition / entry.name).read_bytes()]
    ]
    path.write_bytes(sealed(msgspec.structs.replace(manifest, files=tuple(entries))).encode())


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def memory_ledger(count: int = 1) -> MemoryLedger:
    """Make a ledger with attempts that have everything."""
    ledger = MemoryLedger()
    for number in range(count):
        everything(ledger, f"all-{number}", number)
    return ledger
