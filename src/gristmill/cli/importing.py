"""`gristmill import`: captures into a ledger, all of them or none.

JSON: `{"ledger", "added", "unchanged", "calls", "lost", "sampled_tokens", "bad_lines": [{where, message}],
"losses": {format: {name: count}}}`; `added` and `unchanged` count attempts, the other numbers are of both together;
`losses` are what captures of other programs have and ours have no place for.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from gristmill.cli.attempts import Attempt, Captures, takes_captures
from gristmill.cli.place import PLACE
from gristmill.errors import Code, ConfigError, DecodeError

if TYPE_CHECKING:
    from gristmill.cli.progress import Step
    from gristmill.ledger import LedgerAddress
    from gristmill.records import Capture, Result

__all__ = ["Counted", "bring_in", "command"]


class Counted(msgspec.Struct):
    """What was read and what became of it."""

    added: int = 0
    unchanged: int = 0
    calls: int = 0
    lost: int = 0
    sampled_tokens: int = 0

    def add(self, attempt: Attempt) -> None:
        """Count an attempt that was read."""
        records = attempt.capture.records
        self.calls += len(records)
        self.lost += len(attempt.capture.lost)
        self.sampled_tokens += sum(record.cum_len - record.prompt_len for record in records)


@click.command("import")
@takes_captures()
@click.option(
    "--into",
    "ledger",
    type=PLACE,
    required=True,
    metavar="LEDGER",
    help="The ledger, run.gristmill or postgresql://HOST/DATABASE for example; it is made if it is not there.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def command(*, captures: Captures, ledger: LedgerAddress, as_json: bool) -> int:
    """Put captures into a ledger, all of them or none.

    Captures of other programs are read with --from, or without where they tell what they are.
    What is there already is passed over, so an import can be repeated; the same attempt with other content refuses it.
    Lines that cannot be read are all reported, and then nothing is imported unless --skip-bad is given: each leaves a
    lost call in its rollout.
    """
    counted = bring_in(captures, ledger)
    if as_json:
        from gristmill.cli.document import json_text

        told = {"ledger": str(ledger), **msgspec.to_builtins(counted), "bad_lines": captures.bad_lines}
        told["losses"] = {name: dict(sorted(losses.items())) for name, losses in sorted(captures.losses.items())}
        sys.stdout.write(json_text(told) + "\n")
    else:
        _tell(captures, ledger, counted)
    return 0


def bring_in(captures: Captures, ledger: LedgerAddress) -> Counted:
    """Import captures into a ledger.

    Raises:
        DecodeError: `file_malformed`: lines cannot be read, and are not to be skipped.
        LedgerError: `attempt_differs`, or the ledger cannot be written to.
    """
    from gristmill.cli.progress import progress
    from gristmill.cli.store import writing

    for place in captures.places():
        # A ledger is not made for a path that was mistyped.
        same = place.path == ledger
        if isinstance(place.path, Path):
            place.path.stat()
            same = isinstance(ledger, Path) and ledger.exists() and ledger.samefile(place.path)
        if same:
            raise ConfigError(
                f"expected another ledger to import into, got {ledger}, which is what is imported",
                where="--into",
                hint="name a new file, run.gristmill for example",
            )
    counted, stop = Counted(), threading.Event()
    captures.exchanges = True
    # Tables that were made in a database hold nothing and stay.
    made = isinstance(ledger, Path) and not ledger.exists()
    with _removed_if_refused(ledger) as keep:
        with writing(ledger) as store, progress("read", captures.bytes(), in_bytes=True) as step:
            keep(not made)
            try:
                done = store.import_attempts(_attempts(captures, counted, step, stop))
            except BaseException:
                # The attempts are read in the ledger's own thread, which an interrupt does not reach.
                stop.set()
                raise
        keep(True)
    counted.added, counted.unchanged = done.added, done.unchanged
    return counted


@contextlib.contextmanager
def _removed_if_refused(ledger: LedgerAddress) -> Generator[Callable[[bool], None]]:
    """Remove a ledger behind an import that failed, unless it is to be kept, as it is at first."""
    kept = [True]
    try:
        yield kept.append
    finally:
        if isinstance(ledger, Path) and not kept[-1]:
            for suffix in ("", "-wal", "-shm", "-journal", ".lock"):
                ledger.with_name(ledger.name + suffix).unlink(missing_ok=True)


def _attempts(
    captures: Captures, counted: Counted, step: Step, stop: threading.Event
) -> Iterator[tuple[Capture, Result | None]]:
    """Give the attempts; once a line cannot be read and is not to be skipped, only look for more of those."""
    skipped = captures.skip_bad
    captures.skip_bad, captures.remarks.bad_word = True, "skipped" if skipped else "cannot read"
    for attempt in captures:
        if stop.is_set():
            raise KeyboardInterrupt
        step(attempt.share_bytes)
        counted.add(attempt)
        if skipped or not captures.bad_lines:
            yield attempt.capture, attempt.result if attempt.has_result else None
    if captures.bad_lines and not skipped:
        count, first = len(captures.bad_lines), captures.bad_lines[0]
        told = "a line" if count == 1 else f"{count:,} lines"
        raise DecodeError(
            f"expected lines that can be read, got {told} that cannot; nothing was imported. {first['message']}",
            code=Code.FILE_MALFORMED,
            where=first["where"],
            hint="correct them; --skip-bad passes over bad lines",
        )


def _tell(captures: Captures, ledger: LedgerAddress, counted: Counted) -> None:
    import shlex

    from gristmill.cli.plural import counted as number_of
    from gristmill.cli.screen import remark, show, show_whole, words

    bad = f", {number_of(len(captures.bad_lines), 'bad line')} skipped" if captures.bad_lines else ""
    total = counted.added + counted.unchanged
    lost = f" (and {counted.lost:,} lost)" if counted.lost else ""
    show_whole(words(f"{ledger}: {counted.added:,} added, {counted.unchanged:,} unchanged{bad}", "bold"))
    calls, tokens = number_of(counted.calls, "call"), number_of(counted.sampled_tokens, "sampled token")
    show(words(f"{number_of(total, 'rollout')}, {calls}{lost}, {tokens}"))
    remark("next", shlex.join(["gristmill", "ls", str(ledger)]))
