"""The examples of the documentation do what the pages say."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill.gateway.settings import load_settings
from tests.docs.console import commands, make_sandbox, matches, run, trimmed, wrapped
from tests.docs.pages import ROOT, Fence, fences, name_of, pages

RUN = {"console", "python", "output", "json", "toml"}
SHOWN = {"text", "sh", "py"}


def _pages_with(*languages: str) -> list[Path]:
    return [page for page in pages() if {fence.language for fence in _fences(page)} & set(languages)]


def _fences(page: Path) -> list[Fence]:
    return list(fences(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_every_block_is_of_a_known_kind(page: Path) -> None:
    """A block in a language that nobody checks can be wrong for years."""
    assert {fence.language for fence in _fences(page)} <= RUN | SHOWN


@pytest.mark.parametrize("page", _pages_with("console"), ids=name_of)
def test_console_blocks_print_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    """A reader who types the commands of a page must see what it shows."""
    folder = tmp_path / "page"
    folder.mkdir()
    programs = make_sandbox(folder)
    for fence in _fences(page):
        if fence.language != "console":
            continue
        block = commands(fence)
        results = run(block, folder, programs)
        following = [command.text for command in block[1:]] + [""]
        for command, ran, after in zip(block, results, following, strict=True):
            place = f"{name_of(page)}:{command.line}: $ {command.text}"
            shown = "\n".join(ran.lines)
            assert matches(trimmed(command.expected), ran.lines), f"{place} printed\n{shown}"
            assert ran.code == 0 or after == "echo $?", f"{place} ended with {ran.code}\n{shown}"


@pytest.mark.parametrize("page", _pages_with("python", "output"), ids=name_of)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's Python is one program; an `output` block behind a part of it holds what that part prints."""
    folder = tmp_path / "page"
    folder.mkdir()
    make_sandbox(folder)
    monkeypatch.chdir(folder)
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    printed = ""
    for fence in _fences(page):
        if fence.language == "python":
            assert not printed, f"{name_of(page)}:{fence.line}: the block before prints, and no output block says what"
            code = compile("\n" * (fence.line - 1) + fence.text, str(page), "exec")
            with contextlib.redirect_stdout(io.StringIO()) as stream:
                exec(code, namespace)
            printed = stream.getvalue()
        elif fence.language == "output":
            assert wrapped(printed) == fence.lines, f"{name_of(page)}:{fence.line}: it prints\n{printed}"
            printed = ""
    assert not printed, f"{name_of(page)}: the last block prints, and no output block says what"


@pytest.mark.parametrize("page", _pages_with("py"), ids=name_of)
def test_python_for_trainers_is_run_beside_them(page: Path) -> None:
    """A `py` block needs a trainer's package: whoever has it, or stands in for it, runs the page by its name."""
    tests = [*(ROOT / "tests/e2e/trainers").rglob("check.py"), *(ROOT / "tests/export/trainers").glob("test_*.py")]
    assert any(f'"{page.name}"' in test.read_text(encoding="utf-8") for test in tests)


@pytest.mark.parametrize("page", _pages_with("toml"), ids=name_of)
def test_toml_blocks_are_settings(page: Path, tmp_path: Path) -> None:
    """A reader copies them into a configuration file."""
    for fence in _fences(page):
        if fence.language == "toml":
            (tmp_path / "gristmill.toml").write_text(fence.text, encoding="utf-8")
            assert load_settings({}, environment={}, file=tmp_path / "gristmill.toml").upstreams


@pytest.mark.parametrize("page", _pages_with("json"), ids=name_of)
def test_json_blocks_are_json(page: Path) -> None:
    """A reader copies them into files."""
    for fence in _fences(page):
        if fence.language == "json":
            try:
                json.loads(fence.text)
            except json.JSONDecodeError:
                for line in fence.lines:
                    json.loads(line)


def _make_targets() -> Iterator[tuple[str, str]]:
    for page in pages():
        # As a command: what a program prints may hold the word too.
        for target in re.findall(r"^(?:\$ |.*&& )?make ([a-z][a-z-]*)\b", "\n".join(_code(page)), re.MULTILINE):
            yield name_of(page), target


def _code(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    yield from re.findall(r"`([^`\n]+)`", text)
    for fence in fences(text):
        yield fence.text


def test_every_make_target_exists() -> None:
    """The first commands of a new user are make's."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    missing = {(page, target) for page, target in _make_targets() if target not in targets}
    assert not missing


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        (["a", "b"], ["a", "b"], True),
        (["a", "…", "d"], ["a", "b", "c", "d"], True),
        (["a", "…", "b"], ["a", "b"], True),
        (["a"], ["a", "b"], False),
        (["a…"], ["ab"], False),
        ([], ["a"], False),
        (["at 2026-01-02 03:04:05"], ["at 2027-02-03 04:05:06"], True),
        (["at 2026-01-02 03:04:05"], ["at noon"], False),
    ],
)
def test_output_is_compared_line_by_line(expected: list[str], got: list[str], same: bool) -> None:
    """A runner that accepts everything proves nothing."""
    assert matches(expected, got) is same
