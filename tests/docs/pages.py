"""The pages of the documentation, and what stands in them: fences, headings, links.

Invariant: a page that users can reach is here; a fence of a language that nobody runs or reads is found, not skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

_fence = re.compile(r"^(?P<indent> *)```(?P<language>[a-z]*) *$")
_link = re.compile(r"(?<!!)\[[^\]]+\]\((?P<target>[^)\s]+)\)")
_url = re.compile(r"\bhttps?://[^\s)>\"'`\]]+")
_heading = re.compile(r"^#{1,6} +(?P<title>.+?) *$")


class Fence(NamedTuple):
    """A fenced block: its language, the number of its first line (from 1), its lines."""

    language: str
    line: int
    lines: list[str]

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


def pages() -> list[Path]:
    """Return README, everything in docs, and the READMEs of packages."""
    found = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("README.md")]
    return sorted(found)


def name_of(page: Path) -> str:
    """Name a page by its path in the repository."""
    return page.relative_to(ROOT).as_posix()


def fences(text: str) -> Iterator[Fence]:
    """Yield the fenced blocks of a page."""
    open_fence: Fence | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if open_fence is not None:
            if line.strip() == "```":
                yield open_fence
                open_fence = None
            else:
                open_fence.lines.append(line)
        elif match := _fence.match(line):
            open_fence = Fence(match["language"], number + 1, [])
        elif line.lstrip().startswith("```"):
            raise ValueError(f"line {number}: not a fence of one language: {line!r}")
    if open_fence is not None:
        raise ValueError(f"line {open_fence.line}: a fence that does not end")


def prose(text: str) -> str:
    """Return a page without its fenced blocks."""
    kept: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside:
            kept.append(line)
    return "\n".join(kept)


def links(text: str) -> list[str]:
    """Return the targets of a page's links."""
    return [match["target"] for match in _link.finditer(re.sub(r"`[^`\n]*`", "", prose(text)))]


def urls(text: str) -> list[str]:
    """Return every address in a page, fenced or not."""
    return _url.findall(text)


def anchors(text: str) -> set[str]:
    """Return the anchors that a page's headings get."""
    made: set[str] = set()
    for line in prose(text).splitlines():
        if match := _heading.match(line):
            plain = re.sub(r"[^\w\- ]", "", match["title"].lower())
            made.add(plain.replace(" ", "-"))
    return made
