from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gristmill.credit import AdvantageKind, AdvantageNote
from gristmill.errors import Code, ConfigError
from gristmill.export import DEFAULT_FORMAT, FORMATS, ExportWriter, Loss, Manifest, Needs, loss_lines, open_export
from gristmill.export.messages import conversations
from gristmill.export.trainers import PROJECTIONS
from tests.cli.stories import story
from tests.export.attempts import captured, made


def opened(name: str, folder: Path, **fields: Any) -> ExportWriter:
    return open_export(name, folder, **{"policy": "returned_history", "options": {}, **fields})


def test_the_formats() -> None:
    """The command line offers what is here, the default first."""
    assert list(FORMATS) == ["parquet", "jsonl", "messages", *PROJECTIONS]
    assert next(iter(FORMATS)) == DEFAULT_FORMAT
    assert {name: held.needs for name, held in FORMATS.items()} == {
        "parquet": Needs.ROWS,
        "jsonl": Needs.ROWS,
        "messages": Needs.SELECTION,
        **dict.fromkeys(PROJECTIONS, Needs.ROWS),
    }
    assert all(held.name == name and held.title and held.losses for name, held in FORMATS.items())


@pytest.mark.parametrize(
    ("name", "fields", "where"),
    [("gold", {}, "--to"), ("messages", {"advantage": AdvantageNote(AdvantageKind.GIVEN)}, "--advantage")],
)
def test_what_is_not_offered_is_refused(tmp_path: Path, name: str, fields: dict[str, Any], where: str) -> None:
    """A misspelt format, or advantages that a format has no place for, must not become something else."""
    with pytest.raises(ConfigError) as caught:
        opened(name, tmp_path / "out", **fields)
    assert (caught.value.code, caught.value.where) == (Code.OPTION_INVALID, where)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["parquet", "jsonl"])
def test_rows_lose_nothing_and_say_so(tmp_path: Path, name: str) -> None:
    """The loss report is there even where it has nothing to report."""
    capture = captured()
    outcome, result = made(capture)
    with opened(name, tmp_path / "out") as writer:
        assert writer.add(capture, result, outcome) is None
        assert writer.totals.selected == 1
        manifest = writer.finish()
    assert manifest.losses == ()
    assert b"losses" not in manifest.encode()
    assert loss_lines(manifest) == (f"{name}: nothing is dropped or changed",)


def test_losses_are_said(tmp_path: Path) -> None:
    """Each with its count, also those that a newer version wrote."""
    with opened("messages", tmp_path / "out") as writer:
        manifest: Manifest = writer.finish()
    changed = msgspec.structs.replace(manifest, losses=(Loss("refusals", 1200), Loss("x", 1)))
    assert loss_lines(changed) == (
        "messages: refusals 1,200: Refusals are written as content.",
        "messages: x 1: not known to this version",
    )
    assert loss_lines(msgspec.structs.replace(changed, format="gold"))[0].startswith("gold: refusals 1,200")


def test_every_loss_has_a_statement() -> None:
    """A name that is counted and not explained is no report."""
    import re

    sources = Path(str(conversations.__code__.co_filename)).parent
    counted = {
        name
        for path in sources.glob("*.py")
        for name in re.findall(r'(?:lost\(|lost\[|losses\[|losses\.append\()"(\w+)"', path.read_text("utf-8"))
    }
    assert counted
    assert counted <= {name for held in FORMATS.values() for name in held.losses}


@pytest.mark.parametrize("name", list(FORMATS))
def test_attempts_end_up_in_exactly_one_place(tmp_path: Path, name: str) -> None:
    """Every format writes records or a refusal of an attempt, and the manifest counts both."""
    calls = [{**line, "sampling": {"temperature": 1.0}} for line in story()]
    with opened(name, tmp_path / "out") as writer:
        for rollout_id, texts in (("a", ()), ("b", ("nobody said this",))):
            capture = captured(calls, rollout_id)
            outcome, result = made(capture, *texts, advantage=0.5)
            writer.add(capture, result, outcome)
        manifest = writer.finish()
    assert manifest.rollouts.selected + manifest.rollouts.rejected == 2
    assert manifest.rollouts.selected == (0 if name == "messages" else 1)
    refused = next(entry for entry in manifest.files if entry.name == "rejected.jsonl")
    assert refused.rows == manifest.rollouts.rejected
