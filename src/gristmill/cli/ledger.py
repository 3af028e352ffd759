"""`gristmill ledger`: look after a ledger.

JSON: `info`: `{"ledger", "bytes", "attempts": {STATE: N}, "calls", "lost", "usable_calls", "sampled_tokens",
"prompt_tokens", "writer": {pid, host, instance, started, address}, "writers"}`, `writer` is null where no process has
it open; `writers` are all that have: of a ledger in a database there may be several, the first of which is `writer`;
`copy`: `{"from", "to", "added", "unchanged", "attempts": {STATE: N}, "calls", "lost"}`, counts of what is in both now;
`migrate`: `{"ledger", "from", "to"}`, versions of the schema; `freeze`: `{"ledger", "frozen": [{rollout_id, attempt,
snapshot_id}]}`; `retire`: `{"ledger", "retired": {rollout_id, attempt, snapshot_id}}`.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from gristmill.cli.nearest import did_you_mean
from gristmill.cli.place import PLACE
from gristmill.errors import Code, ConfigError, LedgerError

if TYPE_CHECKING:
    from gristmill.cli.store import Stored
    from gristmill.ledger import AttemptKey, LedgerAddress, LockHolder

__all__ = ["command"]

_AS_JSON: Callable[[Any], Any] = click.option(
    "--json", "as_json", is_flag=True, help="One JSON document on standard output."
)
_LEDGER: Callable[[Any], Any] = click.argument("ledger", type=PLACE)


class _Commands(click.Group):
    """A group that says what was probably meant."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands:
            raise click.UsageError(f"no command {args[0]!r}. {did_you_mean(args[0], self.commands)}", ctx)
        return super().resolve_command(ctx, args)


@click.group("ledger", cls=_Commands, invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> int:
    """Look after a ledger: info, migrate, freeze, retire, copy."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
    return 0


@command.command("info")
@_LEDGER
@_AS_JSON
def info(*, ledger: LedgerAddress, as_json: bool) -> int:
    """Count what a ledger holds, and say who writes to it."""
    import shlex

    from gristmill.cli.progress import bytes_text
    from gristmill.cli.screen import remark, show, words
    from gristmill.cli.store import reading
    from gristmill.ledger import holders_of

    with reading(ledger) as store:
        counts = msgspec.to_builtins(store.counts())
    size = _size_bytes(ledger)
    found = holders_of(ledger)
    # A database says itself who lives.
    alive = [holder for holder in found if not isinstance(ledger, Path) or _may_live(holder)]
    writers = [msgspec.to_builtins(holder) for holder in alive]
    if as_json:
        writer = writers[0] if writers else None
        return _write({"ledger": str(ledger), "bytes": size, **counts, "writer": writer, "writers": writers})
    states = ", ".join(f"{count:,} {state}" for state, count in sorted(counts["attempts"].items())) or "none"
    lost = f" (and {counts['lost']:,} lost)" if counts["lost"] else ""
    tokens = f"{counts['sampled_tokens']:,} sampled and {counts['prompt_tokens']:,} prompt tokens"
    show(words(f"{ledger}  {bytes_text(size)}", "bold"), words(f"attempts: {states}"))
    show(words(f"calls: {counts['calls']:,}{lost}, {counts['usable_calls']:,} usable, {tokens}"))
    for writer in writers:
        address = f" at {writer['address']}" if writer["address"] else ""
        show(words(f"written to by process {writer['pid']} on {writer['host']}{address}"))
    remark("next", shlex.join(["gristmill", "ls", str(ledger)]))
    return 0


def _size_bytes(ledger: LedgerAddress) -> int:
    """Return how much room a ledger takes."""
    if isinstance(ledger, Path):
        files = (ledger, ledger.with_name(f"{ledger.name}-wal"))
        return sum(file.stat().st_size for file in files if file.exists())
    from gristmill.ledger.postgres import PostgresReader

    with PostgresReader(ledger) as reader:
        return reader.size_bytes()


def _may_live(holder: LockHolder) -> bool:
    """Say whether a writer may still be there; of one on another host nobody can tell."""
    if holder.host != socket.gethostname():
        return True
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        # It was killed, and left its name in the lock file.
        return False
    except PermissionError:
        return True
    return True


@command.command("migrate")
@_LEDGER
@_AS_JSON
def migrate(*, ledger: LedgerAddress, as_json: bool) -> int:
    """Bring an older ledger to this version's schema; nobody may write to it meanwhile."""
    from gristmill.cli.screen import show, words
    from gristmill.ledger import migrate_ledger

    found, current = migrate_ledger(ledger)
    if as_json:
        return _write({"ledger": str(ledger), "from": found, "to": current})
    done = "is current" if found == current else f"was brought up from version {found}"
    show(words(f"{ledger}: schema {current}, {done}"))
    return 0


@command.command("freeze")
@_LEDGER
@click.argument("rollouts", nargs=-1, metavar="[ROLLOUT]...")
@click.option("--attempt", type=click.IntRange(0), metavar="N", help="Only this attempt of each rollout.")
@click.option("--finished", is_flag=True, help="Every attempt that has finished, in place of names.")
@_AS_JSON
def freeze(
    *, ledger: LedgerAddress, rollouts: tuple[str, ...], attempt: int | None, finished: bool, as_json: bool
) -> int:
    """Let attempts take no more calls, and print their snapshot ids."""
    import shlex

    from gristmill.cli.screen import remark, show, words
    from gristmill.cli.store import reading, writing
    from gristmill.ledger import AttemptState

    if finished is bool(rollouts):
        raise ConfigError("expected either rollouts or --finished", code=Code.USAGE, where="--finished")
    # A reader finds out what is not there, so that a mistyped path never makes a ledger.
    with reading(ledger) as store:
        if finished:
            keys = [summary.key for summary in store.summaries(state=AttemptState.FINISHED)]
        else:
            keys = [key for rollout_id in rollouts for key in _attempts(store, rollout_id, attempt)]
    frozen: list[dict[str, Any]] = []
    with writing(ledger) as store:
        for key in keys:
            frozen.append({"rollout_id": key.rollout_id, "attempt": key.attempt, "snapshot_id": store.freeze(key)})
    if as_json:
        return _write({"ledger": str(ledger), "frozen": frozen})
    for one in frozen:
        show(words(f"{one['rollout_id']}  {one['attempt']}  {one['snapshot_id']}"))
    show(words(f"{len(frozen):,} frozen", "bold"))
    if frozen:
        which = ["--attempt", str(frozen[0]["attempt"]), "--snapshot", frozen[0]["snapshot_id"]]
        remark("next", shlex.join(["gristmill", "ledger", "retire", str(ledger), frozen[0]["rollout_id"], *which]))
    return 0


@command.command("retire")
@_LEDGER
@click.argument("rollout")
@click.option("--attempt", type=click.IntRange(0), default=0, show_default=True, metavar="N", help="Which attempt.")
@click.option("--snapshot", metavar="ID", help="What `ledger freeze` printed: deleted only if unchanged.")
@click.option("--archive", metavar="DATASET", help="Deleted only if it is read back from this archive, unchanged.")
@_AS_JSON
def retire(
    *, ledger: LedgerAddress, rollout: str, attempt: int, snapshot: str | None, archive: str | None, as_json: bool
) -> int:
    """Delete a frozen attempt that is still what it was when it was frozen, or when it was archived."""
    from gristmill.cli.screen import show, words
    from gristmill.cli.store import reading, writing

    with reading(ledger) as store:
        [key] = _attempts(store, rollout, attempt)
    snapshot = _proved(key, snapshot, archive)
    with writing(ledger) as store:
        store.retire(key, snapshot)
    retired = {"rollout_id": key.rollout_id, "attempt": key.attempt, "snapshot_id": snapshot}
    if as_json:
        return _write({"ledger": str(ledger), "retired": retired})
    show(words(f"{ledger}: attempt {key.attempt} of {key.rollout_id} is deleted"))
    return 0


def _proved(key: AttemptKey, snapshot: str | None, archive: str | None) -> str:
    """Return the snapshot id that the attempt has to have."""
    if archive is None:
        if snapshot is None:
            raise ConfigError("expected --snapshot or --archive, got neither", code=Code.USAGE, where="--snapshot")
        return snapshot
    from gristmill.archive import ArchiveReader

    with ArchiveReader(archive) as reader:
        proved = reader.prove(key)
    if snapshot not in {None, proved}:
        raise ConfigError(
            f"expected the archive to hold snapshot {snapshot}, it holds {proved}",
            code=Code.MANIFEST_DIFFERS,
            where="--archive",
        )
    return proved


@command.command("copy")
@click.argument("source", type=PLACE)
@click.argument("target", type=PLACE)
@_AS_JSON
def copy(*, source: LedgerAddress, target: LedgerAddress, as_json: bool) -> int:
    """Copy every attempt of one ledger into another, exactly: from a file, a database, to either.

    Open attempts stay open, and what was in flight stays in flight until somebody writes to the copy. What is there
    with the same content is passed over, so that a copy that broke off goes on when it is asked for again.
    """
    import shlex
    from collections import Counter

    from gristmill.cli.progress import progress
    from gristmill.cli.screen import remark, show, words
    from gristmill.ledger import open_ledger, open_reader
    from gristmill.ledger.transfer import Copied, copy_ledger

    if _same(source, target):
        raise ConfigError("expected two ledgers, got one", code=Code.USAGE, where="TARGET")
    states, calls, lost, added = Counter[str](), 0, 0, 0
    with open_reader(source) as reading, open_ledger(target, keep_open=True) as writing, progress("copied") as step:

        def tell(copied: Copied) -> None:
            nonlocal calls, lost, added
            row = copied.rows.attempt
            states[row.state] += 1
            calls, lost, added = calls + row.calls, lost + row.lost, added + copied.added
            step(1)

        try:
            copy_ledger(reading, writing, tell)
        except LedgerError as error:
            done = f"{added:,} attempts were copied before" if added else "no attempt was copied before"
            hint = f"{error.hint}; {done}" if error.hint else done
            raise LedgerError(error.message, code=error.code, where=error.where, hint=hint) from error
    unchanged = states.total() - added
    if as_json:
        told = {"from": str(source), "to": str(target), "added": added, "unchanged": unchanged}
        return _write({**told, "attempts": dict(sorted(states.items())), "calls": calls, "lost": lost})
    inside = ", ".join(f"{count:,} {state}" for state, count in sorted(states.items())) or "none"
    show(words(f"{target}: {added:,} added, {unchanged:,} unchanged", "bold"), words(f"attempts: {inside}"))
    show(words(f"calls: {calls:,}" + (f" (and {lost:,} lost)" if lost else "")))
    remark("next", shlex.join(["gristmill", "verify", str(target)]))
    return 0


def _same(source: LedgerAddress, target: LedgerAddress) -> bool:
    if isinstance(source, Path) and isinstance(target, Path):
        return source == target or (source.exists() and target.exists() and source.samefile(target))
    return source == target


def _attempts(store: Stored, rollout_id: str, attempt: int | None) -> list[AttemptKey]:
    """Find the attempts of a rollout.

    Raises:
        ConfigError: `rollout_unknown`.
    """
    keys = store.rollout(rollout_id)
    found = [key for key in keys if attempt in {None, key.attempt}]
    if found:
        return found
    if keys:
        hint = f"There is {', '.join(str(key.attempt) for key in keys[:8])}."
        message = f"no attempt {attempt} of rollout {rollout_id!r} in the ledger"
        raise ConfigError(message, code=Code.ROLLOUT_UNKNOWN, where="--attempt", hint=hint)
    hint = did_you_mean(rollout_id, (key.rollout_id for key in store.attempts()))
    raise ConfigError(f"no rollout {rollout_id!r} in the ledger", code=Code.ROLLOUT_UNKNOWN, where="ROLLOUT", hint=hint)


def _write(document: dict[str, Any]) -> int:
    from gristmill.cli.document import json_text

    sys.stdout.write(json_text(document) + "\n")
    return 0
