"""A trainer's page in the documentation, as somebody follows it: an export of the demo, and the page's `py` blocks.

Invariant: all `py` blocks of a page are one program, run in the current folder, which holds the
export that the page reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gristmill import resolve_selection_policy, run_rollout
from gristmill.captures import read_capture
from gristmill.export import open_export
from gristmill.reconstruction import Row
from tests.docs.pages import ROOT, fences

__all__ = ["export_demo", "run_page"]


def export_demo(folder: Path) -> list[Sequence[Row]]:
    """Export the demo's rollouts, each with an advantage, and give their rows."""
    policy = resolve_selection_policy()
    made: list[Sequence[Row]] = []
    with open_export("parquet", folder, policy="returned_history", options={}) as writer:
        for place in sorted(path for path in (ROOT / "src/gristmill/demo/data").iterdir() if path.is_dir()):
            for capture, result in read_capture(place).rollouts.values():
                outcome = run_rollout(capture, result, policy, advantage=0.5)
                writer.add(capture, result, outcome)
                rows = getattr(outcome, "rows", ())
                made += [rows] if rows else []
        writer.finish()
    return made


def run_page(name: str) -> dict[str, Any]:
    """Run the `py` blocks of `docs/trainers/NAME`, and give what they define."""
    page = ROOT / "docs/trainers" / name
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    for fence in fences(page.read_text(encoding="utf-8")):
        if fence.language == "py":
            exec(compile("\n" * (fence.line - 1) + fence.text, str(page), "exec"), namespace)
    return namespace
