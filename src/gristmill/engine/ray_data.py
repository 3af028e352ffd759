"""Partitions on a Ray cluster, or on a Ray instance of this machine that ends with the build.

Invariant: Ray only says where a partition is made; it is written by the same function as anywhere else. A worker that
dies ends the build with an error that says so: nothing is tried again behind its back.

A cluster that `RAY_ADDRESS` names is used; the archive, the rows and a policy's module have to be reachable from every
node under the same names.

Not here: the work itself (partition).
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Generator, Sequence
from importlib import import_module
from typing import Any, Final

import msgspec

from gristmill.engine.job import BuildJob, PartTask
from gristmill.engine.local import worker_lost
from gristmill.engine.partition import PartReport, report_of
from gristmill.errors import ConfigError
from gristmill.extras import install_hint

__all__ = ["run_ray"]

_EXTRA: Final = "gristmill[ray]"


class _MakePart:
    """Makes the partitions of a batch; this is what Ray calls."""

    def __init__(self, job: bytes) -> None:
        self._job = job

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        job = msgspec.msgpack.decode(self._job, type=BuildJob)
        reports = [
            msgspec.json.encode(report_of(job, msgspec.json.decode(task, type=PartTask))).decode()
            for task in batch["task"]
        ]
        return {"report": reports}


def run_ray(job: BuildJob, tasks: Sequence[PartTask], jobs: int) -> Generator[PartReport]:
    """Make partitions, and report each when it is there.

    Args:
        job: of the build.
        tasks: the partitions.
        jobs: how many at a time; of an instance of this machine, its processors.

    Raises:
        ConfigError: Ray is not installed.
        ExportError: `worker_lost`.
    """
    # Nobody asked for a report to the makers of Ray.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray, ray_data = import_module("ray"), import_module("ray.data")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"expected the packages of {_EXTRA}, {error.name} is not installed",
            where="--engine ray",
            hint=install_hint("ray"),
        ) from error
    own = not ray.is_initialized()
    if own:
        logging.getLogger("ray").setLevel(logging.ERROR)
        address = os.environ.get("RAY_ADDRESS")
        local: dict[str, Any] = {} if address else {"num_cpus": jobs, "include_dashboard": False}
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
    try:
        yield from _reports(ray, ray_data, job, tasks, jobs)
    finally:
        if own:
            ray.shutdown()


def _reports(ray: Any, ray_data: Any, job: BuildJob, tasks: Sequence[PartTask], jobs: int) -> Generator[PartReport]:
    context = ray_data.DataContext.get_current()
    context.enable_progress_bars = False
    rows = [{"task": msgspec.json.encode(task).decode()} for task in tasks]
    with warnings.catch_warnings():
        # Without `max_retries` Ray Data would start a partition that kills its worker again and again. Newer versions
        # than the extra allows have no place for it.
        warnings.simplefilter("ignore")
        made = ray_data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            _MakePart(msgspec.msgpack.encode(job)),
            batch_size=1,
            batch_format="numpy",
            compute=ray_data.TaskPoolStrategy(size=jobs),
            num_cpus=1,
            max_retries=0,
        )
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    rows_made: Any = iter(made.iter_rows())
    try:
        for row in rows_made:
            yield msgspec.json.decode(row["report"], type=PartReport)
    except ray.exceptions.RayError as error:
        raise worker_lost(str(error).partition("\n")[0]) from error
    finally:
        # What runs is told to stop, when the build has ended before.
        rows_made.close()
