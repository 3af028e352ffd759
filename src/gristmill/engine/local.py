"""Partitions in processes of this machine.

Invariant: a process that dies ends the build with an error that says so, and one that outlives the build ends by
itself; no partition is ever half there.

Not here: the work itself (partition), and many machines (ray_data).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait

from gristmill.engine.job import BuildJob, PartTask
from gristmill.engine.partition import PartReport, build_part, report_of
from gristmill.errors import Code, ExportError

__all__ = ["run_local", "worker_lost"]


def run_local(job: BuildJob, tasks: Sequence[PartTask], jobs: int, *, apart: bool = False) -> Generator[PartReport]:
    """Make partitions, and report each when it is there.

    Args:
        job: of the build.
        tasks: the partitions.
        jobs: how many processes; 1 is this one, where nothing is made apart.
        apart: make every partition in another process, so that whatever ends that one does not end this one.

    Raises:
        ExportError: `worker_lost`.
        GristmillError: as `build_part`, where this process does it.
    """
    if not tasks:
        return
    # One partition of two processes is made apart, too: the caller of a build wants to outlive it.
    if jobs == 1 and not apart:
        job.prepare()
        for task in tasks:
            yield build_part(job, task)
        return
    # Not forked: what this process has open stays its own.
    executor = ProcessPoolExecutor(min(jobs, len(tasks)), get_context("spawn"), _begin)
    try:
        waiting: list[Future[PartReport]] = [executor.submit(report_of, job, task) for task in tasks]
        for done in as_completed(waiting):
            yield done.result()
    except BrokenProcessPool as error:
        raise worker_lost(str(error)) from error
    finally:
        executor.shutdown(cancel_futures=True)


def worker_lost(reason: str) -> ExportError:
    """Make the error for a process that ended before its partition was there."""
    return ExportError(
        f"expected every process to finish its partition, one ended before: {reason}",
        code=Code.WORKER_LOST,
        hint="it was killed, for want of memory for example, or a policy or a library ended it; finished partitions "
        "stay, the same command goes on",
    )


def _begin() -> None:
    """Leave an interrupt to the process that was interrupted, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
