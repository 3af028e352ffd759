"""`gristmill archive`: captures as a partition of a Parquet data set.

JSON: `{"dataset", "partition", "parts", "bytes", "counts": {attempts, calls, lost, late, usable_calls, sampled_tokens,
prompt_tokens}, "passed_over", "already", "retired", "bad_lines": [{where, message}]}`; `passed_over` counts open
attempts, `already` those that another partition holds, `retired` those that were deleted from their ledger.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from gristmill.cli.attempts import Attempt, Captures, takes_captures
from gristmill.cli.place import place_of as named_place
from gristmill.errors import Code, ConfigError

if TYPE_CHECKING:
    from gristmill.archive import ArchivedAttempt, ArchiveManifest, PartitionWriter
    from gristmill.cli.store import Stored
    from gristmill.ledger import LedgerAddress

__all__ = ["command"]


@click.command("archive")
@click.argument("arguments", nargs=-1, required=True, metavar="PATHS... DATASET")
@takes_captures(argument=False)
@click.option("--partition", metavar="NAME", help="Name of the partition; by default that of the one path.")
@click.option("--no-exchanges", is_flag=True, help="Leave out requests and replies; messages cannot be exported then.")
@click.option(
    "--part-size",
    type=click.IntRange(1, 4096),
    default=256,
    show_default=True,
    metavar="MIB",
    help="Memory after which a part is finished; one part is one unit of work of `build`.",
)
@click.option("--retire", is_flag=True, help="Delete from their ledgers the frozen attempts that the archive proves.")
@click.option("--overwrite", is_flag=True, help="Replace a partition of this name, if the new one holds all of it.")
@click.option("--drop", is_flag=True, help="With --overwrite: drop what only the partition that is there holds.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def command(
    *,
    arguments: tuple[str, ...],
    captures: Captures,
    partition: str | None,
    no_exchanges: bool,
    part_size: int,
    retire: bool,
    overwrite: bool,
    drop: bool,
    as_json: bool,
) -> int:
    """Write captures as a partition of a Parquet data set, here or in an object store.

    DATASET is a folder or a URL (s3://bucket/runs). The partition is there whole or not at all, and every command takes
    the data set as captures. Open attempts are passed over: they may still change. What another partition of the data
    set holds as it is is not written again.
    """
    from gristmill.archive import PartitionWriter, place_of
    from gristmill.cli.progress import progress

    if len(arguments) < 2:
        raise ConfigError("expected captures and a data set, got one path", code=Code.USAGE, where="DATASET")
    if drop and not overwrite:
        raise ConfigError("expected --overwrite with --drop, got --drop alone", code=Code.USAGE, where="--drop")
    *paths, dataset = arguments
    captures.paths = tuple(map(named_place, paths))
    name = _name_of(captures) if partition is None else partition
    passed_over = 0
    with (
        PartitionWriter(
            place_of(dataset),
            name,
            exchanges=not no_exchanges,
            part_bytes=part_size * 2**20,
            overwrite=overwrite,
            drop=drop,
        ) as writer,
        contextlib.ExitStack() as stack,
        progress("rollouts") as step,
    ):
        for attempt in _attempts(captures, stack, not no_exchanges):
            if attempt is None:
                passed_over += 1
            else:
                writer.add(attempt)
            step(1)
        manifest = writer.finish()
    retired = _retire(captures, dataset, writer) if retire else 0
    told = {"passed_over": passed_over, "already": writer.already, "retired": retired}
    return _tell(captures, dataset, manifest, told, as_json=as_json)


def _name_of(captures: Captures) -> str:
    """Name a partition after the one path that is archived."""
    first, *more = captures.paths
    if more:
        raise ConfigError(
            f"expected --partition with {len(more) + 1} paths, got none",
            code=Code.USAGE,
            where="--partition",
            hint="give the partition a name of its own",
        )
    stem = (first.absolute().stem if isinstance(first, Path) else first.name).removeprefix("run=")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip(".-")[:128] or "captures"


def _attempts(captures: Captures, stack: contextlib.ExitStack, exchanges: bool) -> Iterator[ArchivedAttempt | None]:
    """Read attempt by attempt with everything that a ledger knows of it; None stands for an open one."""
    from gristmill.archive import ArchivedAttempt
    from gristmill.ledger import AttemptKey, AttemptState

    captures.summaries, captures.exchanges = True, exchanges
    stores: dict[LedgerAddress, Stored] = {}
    for attempt in captures:
        result = attempt.result if attempt.has_result else None
        if attempt.summary is None:
            yield ArchivedAttempt(capture=attempt.capture, result=result)
            continue
        if attempt.summary.state is AttemptState.OPEN:
            yield None
            continue
        store = _store(stores, attempt, stack)
        key = AttemptKey(attempt.capture.rollout_id, attempt.capture.attempt)
        yield ArchivedAttempt(
            capture=attempt.capture,
            result=result,
            late=store.late(key),
            setup=store.setup(key),
            state=attempt.summary.state,
            touched_at=attempt.summary.touched_at,
        )


def _store(stores: dict[LedgerAddress, Stored], attempt: Attempt, stack: contextlib.ExitStack) -> Stored:
    from gristmill.cli.store import reading

    store = stores.get(attempt.source)
    if store is None:
        store = stores[attempt.source] = stack.enter_context(reading(attempt.source))
    return store


def _retire(captures: Captures, dataset: str, writer: PartitionWriter) -> int:
    """Delete what the archive proves that it holds from the ledgers that it came from."""
    from gristmill.archive import ArchiveReader
    from gristmill.cli.sources import Kind
    from gristmill.cli.store import is_archive, reading, writing
    from gristmill.ledger import AttemptState

    frozen = {AttemptState.FROZEN, AttemptState.ABANDONED}
    retired = 0
    with ArchiveReader(dataset) as archive:
        for source in captures.places():
            if source.kind is not Kind.LEDGER or is_archive(source.path):
                continue
            with reading(source.path) as store:
                keys = [summary.key for summary in store.summaries() if summary.state in frozen]
            with writing(source.path) as ledger:
                for key in keys:
                    if writer.added(key):
                        ledger.retire(key, archive.prove(key))
                        retired += 1
    return retired


def _tell(
    captures: Captures, dataset: str, manifest: ArchiveManifest, told: Mapping[str, int], *, as_json: bool
) -> int:
    import shlex

    from gristmill.ledger.address import without_passwords

    dataset = without_passwords(dataset)
    size = sum(entry.bytes for entry in manifest.files)
    if as_json:
        from gristmill.cli.document import json_text

        document = {
            "dataset": dataset,
            "partition": manifest.partition,
            "parts": manifest.parts,
            "bytes": size,
            "counts": msgspec.to_builtins(manifest.counts),
            **told,
            "bad_lines": captures.bad_lines,
        }
        sys.stdout.write(json_text(document) + "\n")
        return 0
    from gristmill.cli.plural import counted
    from gristmill.cli.progress import bytes_text
    from gristmill.cli.screen import remark, show, show_whole, words

    counts = manifest.counts
    show_whole(words(f"{dataset} partition {manifest.partition}: {counted(manifest.parts, 'part')}", "bold"))
    lost = f" (and {counts.lost:,} lost)" if counts.lost else ""
    calls, tokens = counted(counts.calls, "call"), counted(counts.sampled_tokens, "sampled token")
    show(words(f"{counted(counts.attempts, 'rollout')}, {calls}{lost}, {tokens}, {bytes_text(size)}"))
    if told["already"]:
        remark("note", f"{counted(told['already'], 'rollout')} in another partition as they are: not written again")
    if told["passed_over"]:
        remark("note", f"{counted(told['passed_over'], 'open attempt')} passed over: what is open may still change")
    if told["retired"]:
        show(words(f"{counted(told['retired'], 'attempt')} deleted from the ledger"))
    remark("next", shlex.join(["gristmill", "build", dataset, "ROWS"]))
    return 0
