"""`gristmill cases`: run conformance cases, one JSON line a case.

A line is `{"id", "outcome", …}` as the cases' own page documents per kind; a case that cannot be read or run has
the outcome `error` with `code` and `message`. With `--check` each line has `ok` and `problems` besides.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click

from gristmill.cli.failure import DATA_FAILED

__all__ = ["command"]


class _Line(NamedTuple):
    where: str
    data: bytes


@click.command("cases")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--check", "checking", is_flag=True, help="Compare with the expectation; exit code 1 on a difference.")
@click.option("--json", "as_json", is_flag=True, help="Errors as JSON too; cases always are.")
def command(*, files: tuple[Path, ...], checking: bool, as_json: bool) -> int:
    """Run conformance cases: one JSON line a case on standard output.

    FILES hold one case a line. Kinds that need a running server, or that are not known, are reported as unsupported.
    """
    from gristmill.cli.document import json_text

    counts: Counter[str] = Counter()
    for line in _lines(files):
        told = _told(line, checking)
        sys.stdout.write(json_text(told) + "\n")
        counts["cases"] += 1
        counts["error"] += told["outcome"] == "error"
        counts["unsupported"] += told["outcome"] == "unsupported"
        counts["differ"] += told.get("ok") is False
    _summarise(counts, checking)
    return DATA_FAILED if counts["differ"] or counts["error"] else 0


def _lines(files: tuple[Path, ...]) -> Iterator[_Line]:
    for path in files:
        with path.open("rb") as lines:
            for number, data in enumerate(lines, 1):
                if data.strip():
                    yield _Line(f"{path} line {number}", data)


def _told(line: _Line, checking: bool) -> dict[str, Any]:
    """Run one case; whatever it does, the others run too."""
    from gristmill.conformance import check, read_case, run_case
    from gristmill.errors import Code, GristmillError

    case: dict[str, Any] = {}
    try:
        case = read_case(line.data, line.where)
        outcome = run_case(case)
    except GristmillError as error:
        outcome = {"outcome": "error", "code": str(error.code), "where": error.where, "message": error.message}
    except Exception as error:  # noqa: BLE001  a named boundary: a case that breaks us is a finding, not the end
        outcome = {"outcome": "error", "code": str(Code.INTERNAL), "message": f"{type(error).__name__}: {error}"}
    told = {"id": case.get("id", line.where), **outcome}
    if checking:
        checked = check(case, outcome)
        told |= {"ok": checked.ok, "problems": list(checked.problems)}
    return told


def _summarise(counts: Counter[str], checking: bool) -> None:
    parts = [f"{counts['cases']} cases"]
    if checking:
        parts.append(f"{counts['cases'] - counts['differ']} as expected")
        parts.append(f"{counts['differ']} not")
    if counts["unsupported"]:
        parts.append(f"{counts['unsupported']} unsupported")
    if counts["error"]:
        parts.append(f"{counts['error']} could not be run")
    sys.stderr.write(", ".join(parts) + "\n")
