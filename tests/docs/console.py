"""Console blocks: commands after `$ `, continued after `> `, each followed by what it prints.

What a command prints is standard output and standard error in order. Lines of more than 118 columns are wrapped as a
terminal would; a line that is only `…` stands for any number of lines, and a date with a time for any other. A command
that fails must be followed by `$ echo $?`. `python -m tests.docs.console PAGE…` fills in what commands print; read the
difference before keeping it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.docs.pages import ROOT, Fence, fences, pages

WIDTH = 118
ELISION = "…"
_TIME = re.compile(r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\b")
_PROGRAM = "import sys; from gristmill.cli import main; sys.exit(main())"
_END = "\x1e"


class Command(NamedTuple):
    """One command of a block, and the output that the page gives for it."""

    line: int
    text: str
    expected: list[str]


class Ran(NamedTuple):
    """What a command printed, wrapped, and how it ended."""

    lines: list[str]
    code: int


def commands(fence: Fence) -> list[Command]:
    """Split a console block into its commands."""
    found: list[Command] = []
    for number, line in enumerate(fence.lines, fence.line):
        if line.startswith("$ "):
            found.append(Command(number, line[2:], []))
        elif not found:
            raise ValueError(f"line {number}: a console block begins with a command after `$ `")
        elif (line.startswith("> ") or line == ">") and not found[-1].expected:
            last = found[-1]
            found[-1] = last._replace(text=f"{last.text}\n{line[2:]}")
        else:
            found[-1].expected.append(line)
    return found


def make_sandbox(folder: Path) -> Path:
    """Prepare a folder in which a page's commands run as in a clone: `src`, and `gristmill` on the path."""
    (folder / "src").symlink_to(ROOT / "src")
    programs = folder.parent / f"{folder.name}-bin"
    programs.mkdir()
    for name, arguments in (("gristmill", ["-c", _PROGRAM]), ("python", [])):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, *arguments])} "$@"\n')
        program.chmod(0o755)
    return programs


def run(block: Sequence[Command], folder: Path, programs: Path) -> list[Ran]:
    """Run the commands of one block in one shell."""
    script = "".join(
        f"{{ {command.text}\n}} 2>&1\n__code=$?; printf '{_END}%s{_END}' $__code; (exit $__code)\n" for command in block
    )
    environment = {
        "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYTHONPATH": str(ROOT / "src"),
        "PYTHONUNBUFFERED": "1",
        "PYTHONUTF8": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "NO_COLOR": "1",
        "LC_ALL": "C.UTF-8",
        "HOME": str(folder),
    }
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, check=False, timeout=300
    )
    pieces = done.stdout.decode().split(_END)
    if len(pieces) != 2 * len(block) + 1:
        raise RuntimeError(f"the block did not run to its end: {done.stdout!r} {done.stderr!r}")
    return [Ran(wrapped(pieces[at]), int(pieces[at + 1])) for at in range(0, len(pieces) - 1, 2)]


def wrapped(text: str) -> list[str]:
    """Wrap long lines at white space, as on a terminal of 118 columns."""
    lines: list[str] = []
    for line in text.splitlines():
        if len(line) <= WIDTH:
            lines.append(line.rstrip())
        else:
            lines += textwrap.wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False)
    while lines and not lines[-1]:
        lines.pop()
    return lines


def matches(expected: Sequence[str], got: Sequence[str]) -> bool:
    """Compare given output with real output; a line `…` stands for any lines, a time for any other time."""
    pattern = "".join(
        r"(?:.*\n)*" if line.strip() == ELISION else re.escape(_timeless(line.rstrip())) + r"\n" for line in expected
    )
    return re.fullmatch(pattern, "".join(f"{_timeless(line)}\n" for line in got)) is not None


def _timeless(line: str) -> str:
    return _TIME.sub("(time)", line)


def trimmed(lines: Sequence[str]) -> list[str]:
    """Leave out empty lines at the end."""
    kept = list(lines)
    while kept and not kept[-1].strip():
        kept.pop()
    return kept


def refresh(page: Path) -> bool:
    """Fill in what the commands of a page print; return whether the page changed."""
    text = page.read_text(encoding="utf-8")
    lines = text.splitlines()
    blocks = [commands(fence) for fence in fences(text) if fence.language == "console"]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "page"
        folder.mkdir()
        programs = make_sandbox(folder)
        results = [run(block, folder, programs) for block in blocks]
    for block, ran in reversed(list(zip(blocks, results, strict=True))):
        for command, result in reversed(list(zip(block, ran, strict=True))):
            if not matches(trimmed(command.expected), result.lines):
                start = command.line + command.text.count("\n")
                lines[start : start + len(command.expected)] = result.lines
    new = "\n".join(lines) + "\n"
    page.write_text(new, encoding="utf-8")
    return new != text


if __name__ == "__main__":
    for chosen in [Path(name).resolve() for name in sys.argv[1:]] or pages():
        if refresh(chosen):
            sys.stdout.write(f"changed {chosen.relative_to(ROOT)}\n")
