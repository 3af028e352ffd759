"""`python -m bench [NAME…] [--json FILE] [--quick]`: run benchmarks, print a table, write the numbers.

Invariant: it ends with 0 whatever the numbers are: a benchmark is no test. How time is taken is each module's affair.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

import bench
from gristmill.cli.nearest import did_you_mean

__all__ = ["command", "names"]

_ORDER: Final = ("fingerprints", "selection", "lineage", "rows", "decode")
_UNITS: Final = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))

Result = dict[str, Any]


def names() -> list[str]:
    """Return the benchmark modules that there are, in the order of the pipeline."""
    found = [module.name for module in pkgutil.iter_modules(bench.__path__) if not module.name.startswith("_")]
    return sorted(found, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name))


def _run(name: str, quick: bool) -> Iterator[Result]:
    module = importlib.import_module(f"bench.{name}")
    run = getattr(module, "run", None)
    if run is None:
        return
    takes_quick = "quick" in inspect.signature(run).parameters
    for result in run(quick=quick) if takes_quick else run():
        yield {"benchmark": name, **result}


def _amount(name: str, amount: float) -> str:
    return f"{amount:,.0f}" if name.startswith(("bytes of ", "number of ")) else _time(amount)


def _time(seconds: float) -> str:
    unit, size = next(((unit, size) for unit, size in _UNITS if seconds >= size), _UNITS[-1])
    return f"{seconds / size:.3g} {unit}"


def _machine() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
    }


def _table(results: list[Result]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("benchmark", style="dim")
    table.add_column("name")
    for heading in ("time", "floor", "ratio", "target"):
        table.add_column(heading, justify="right")
    table.add_column("ok")
    for result in results:
        target = result.get("target")
        met = bool(result["ok"])
        table.add_row(
            result["benchmark"],
            result["name"],
            _amount(result["name"], result["seconds"]),
            _amount(result["name"], result["floor_seconds"]),
            f"{result['ratio']:.2f}",
            "" if target is None else f"{target:.2f}",
            "" if target is None else ("yes" if met else "no"),
            style="" if met or target is None else "yellow",
        )
    return table


@click.command("bench")
@click.argument("chosen", nargs=-1, metavar="[NAME]...")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the numbers.")
@click.option("--quick", is_flag=True, help="Fewer rounds and smaller sizes, where a benchmark has them.")
def command(chosen: tuple[str, ...], json_file: Path | None, quick: bool) -> None:
    """Run benchmarks: all, or those that are named."""
    known = names()
    for name in chosen:
        if name not in known:
            raise click.UsageError(f"no benchmark {name!r} in {', '.join(known)}. {did_you_mean(name, known)}")
    results: list[Result] = []
    for name in chosen or known:
        click.echo(f"{name} …", err=True)
        results += _run(name, quick)
    Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(_table(results))
    met = sum(bool(result["ok"]) for result in results if result.get("target") is not None)
    of = sum(result.get("target") is not None for result in results)
    click.echo(f"{met} of {of} targets met")
    if json_file is not None:
        document: dict[str, Any] = {"machine": _machine(), "quick": quick, "results": results}
        if json_file.exists() and (scale := json.loads(json_file.read_text(encoding="utf-8")).get("scale")):
            # The long run puts its numbers into the same file.
            document["scale"] = scale
        json_file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        click.echo(f"written: {json_file}", err=True)


if __name__ == "__main__":
    command()
