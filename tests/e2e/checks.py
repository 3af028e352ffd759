"""The table of checks that an end-to-end run prints, and its exit status.

Invariant: a check that was announced is counted, whatever became of it; the closing line counts all of them.
"""

from __future__ import annotations

import shutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

__all__ = ["Checks"]


class Checks:
    """Collects checks by subject; `close` prints the closing line and returns the exit status."""

    def __init__(self) -> None:
        self._passed = 0
        self._failed: list[str] = []
        self._subject = ""
        self._began = monotonic()

    @contextmanager
    def subject(self, name: str) -> Iterator[None]:
        """Group checks; an exception inside is a failed check of the subject, and the run goes on."""
        self._subject, began = name, monotonic()
        self._write(f"\n{name}\n")
        try:
            yield
        except Exception:  # noqa: BLE001 the boundary: one subject that breaks must not hide the others
            self.check("runs to its end", False, traceback.format_exc())
        self._write(f"  {monotonic() - began:.1f} s\n")

    def check(self, name: str, holds: bool, detail: object = "") -> bool:
        """Count one check; `detail` is printed where it does not hold."""
        self._write(f"  {'ok  ' if holds else 'FAIL'}  {name}\n")
        if holds:
            self._passed += 1
        else:
            self._failed.append(f"{self._subject}: {name}")
            for line in str(detail).splitlines()[-40:]:
                self._write(f"        {line[:400]}\n")
        return holds

    def equal(self, name: str, expected: object, got: object) -> bool:
        """Check that two values are equal."""
        return self.check(name, expected == got, f"expected {expected!r}\ngot      {got!r}")

    def close(self, folder: Path) -> int:
        """Print what failed and the closing line; return the exit status. `folder` is removed if nothing failed."""
        if self._failed:
            self._write(f"\nlogs and ledgers are in {folder}\n")
        else:
            shutil.rmtree(folder, ignore_errors=True)
        self._write(f"\n{monotonic() - self._began:.0f} s\n")
        for name in self._failed:
            self._write(f"FAILED {name}\n")
        self._write(f"{self._passed} passed, {len(self._failed)} failed\n")
        return 1 if self._failed or not self._passed else 0

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
