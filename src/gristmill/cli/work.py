"""A job for every attempt, in this process or in several; answers come in the order of the attempts.

Invariant: memory does not grow with the number of attempts, and what is answered does not depend on the number of
processes. Only attempts of ledgers go to other processes: those can be named by a key; files are read here.

Not here: what the job is (the commands).
"""

from __future__ import annotations

import functools
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import click

from gristmill.cli.attempts import Attempt, Captures
from gristmill.cli.sources import Kind

if TYPE_CHECKING:
    from gristmill.cli.store import Stored
    from gristmill.ledger import AttemptKey, LedgerAddress, Summary

__all__ = ["answers", "takes_jobs"]

T_co = TypeVar("T_co", covariant=True)

_BATCH: Final = 250
_AHEAD: Final = 4
"""Batches that each process is given before the first answer is waited for."""


class Job(Protocol[T_co]):
    """Something to do with an attempt; it is sent to other processes."""

    def __call__(self, attempt: Attempt, /) -> T_co: ...


def takes_jobs(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--jobs`; the command gets it as `jobs`."""
    most = min(2, os.cpu_count() or 1)
    option = click.option(
        "--jobs",
        type=click.IntRange(1),
        metavar="N",
        default=most,
        show_default="2, or 1 on one processor",
        help="Processes that read a large ledger.",
    )
    return option(command)


def answers(captures: Captures, job: Job[T_co], jobs: int) -> Iterator[T_co]:
    """Do a job for every attempt.

    Args:
        captures: the attempts.
        job: what to do; it is pickled where there are several processes.
        jobs: how many processes.

    Raises:
        GristmillError: as reading the captures, and as the job.
    """
    places = captures.places()
    if jobs > 1 and len(places) == 1 and places[0].kind is Kind.LEDGER:
        yield from _shared_out(captures, places[0].path, job, jobs)
    else:
        yield from map(job, captures)


def _shared_out(captures: Captures, path: LedgerAddress, job: Job[T_co], jobs: int) -> Iterator[T_co]:
    from gristmill.cli.store import reading

    with reading(path) as ledger:
        keys = captures.stored_keys(ledger)
        few = list(islice(keys, _BATCH * 2))
        if len(few) < _BATCH * 2:
            # Too few to be worth a process; the attempts themselves say what is not there.
            yield from map(job, captures)
            return
        work = functools.partial(_work, path, captures, job)
        # Not forked: what this process has open stays its own.
        executor = ProcessPoolExecutor(jobs, get_context("spawn"), _ignore_interrupts)
        try:
            waiting: deque[Future[list[T_co]]] = deque()
            for batch in _batches(few, keys):
                waiting.append(executor.submit(work, batch))
                if len(waiting) > jobs * _AHEAD:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            executor.shutdown(cancel_futures=True)


_Keys = Sequence["tuple[AttemptKey, Summary | None]"]


def _batches(few: _Keys, more: Iterator[tuple[AttemptKey, Summary | None]]) -> Iterator[_Keys]:
    yield few[:_BATCH]
    yield few[_BATCH:]
    while batch := list(islice(more, _BATCH)):
        yield batch


def _ignore_interrupts() -> None:
    """Leave an interrupt to the process that was interrupted."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


_open: dict[LedgerAddress, Stored] = {}
"""Ledgers that this process reads for another; they are closed by its end."""


def _work(path: LedgerAddress, captures: Captures, job: Job[T_co], keys: _Keys) -> list[T_co]:
    from gristmill.cli.store import open_stored

    ledger = _open.get(path)
    if ledger is None:
        ledger = _open[path] = open_stored(path)
    return [job(captures.stored_attempt(ledger, path, key, summary)) for key, summary in keys]
