"""Writes the stories of this folder: `python -m tests.corpus.make`.

Every story is told in one of the `tales_*.py` files beside this one, expectation included, by hand from the rules.
Nothing here asks the product what it answers. A test checks that the folders are what this writes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.corpus import (
    tales_credit,
    tales_faults,
    tales_history,
    tales_identity,
    tales_options,
    tales_policies,
    tales_values,
)
from tests.corpus.telling import Story

__all__ = ["FOLDER", "stories", "write"]

FOLDER = Path(__file__).parent


def stories() -> Iterator[Story]:
    """Tell all stories, each under a name of its own."""
    seen: set[str] = set()
    for tales in (
        tales_values,
        tales_history,
        tales_identity,
        tales_options,
        tales_policies,
        tales_faults,
        tales_credit,
    ):
        for story in tales.stories():
            if story.name in seen:
                raise ValueError(f"expected one story to be called {story.name}, got two")
            seen.add(story.name)
            yield story


def write(folder: Path = FOLDER) -> int:
    """Write every story's folder, remove those that nobody tells any more, and return how many there are."""
    told = list(stories())
    names = {story.name for story in told}
    for old in folder.glob("*/STORY.md"):
        if old.parent.name not in names:
            shutil.rmtree(old.parent)
    for story in told:
        place = folder / story.name
        place.mkdir(exist_ok=True)
        for name, text in story.files().items():
            (place / name).write_text(text, encoding="utf-8", newline="\n")
    return len(told)


if __name__ == "__main__":
    write()
