"""Every story of tests/corpus is read as a user's capture is, and must come out as its expectation says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gristmill.captures import read_capture
from gristmill.errors import Code
from gristmill.pipeline import RebuiltRollout, outcome_verdicts, run_rollout
from gristmill.records import Capture, Result
from gristmill.selection import Rejected, resolve_selection_policy
from tests.corpus import make

FOLDER = Path(make.FOLDER)
STORIES = sorted(place.parent.name for place in FOLDER.glob("*/STORY.md"))

WITHOUT_STORY = {
    Code.ITEM_TOO_LARGE: "the limit is 16 Mi characters; tests/test_canonical.py and tests/test_atoms.py reach it",
    Code.POLICY_UNKNOWN: "raised before a rollout is read; tests/selection/test_policies.py",
    Code.POLICY_LOAD_FAILED: "raised before a rollout is read; tests/selection/test_policies.py",
    Code.POLICY_NOT_CALLABLE: "raised before a rollout is read; tests/selection/test_policies.py",
    Code.POLICY_OPTION_INVALID: "raised before a rollout is read; tests/selection/test_policies.py",
}
"""Codes of selection and pipeline that no small story can show, and why."""


def expectation(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name / "expect.json").read_text(encoding="utf-8"))


def read(name: str) -> tuple[Capture, Result]:
    [rollout] = read_capture(FOLDER / name).rollouts.values()
    assert rollout.result is not None
    return rollout.capture, rollout.result


def run(name: str) -> RebuiltRollout | Rejected:
    expect = expectation(name)
    policy = resolve_selection_policy(expect["policy"], expect.get("options"))
    return run_rollout(*read(name), policy, train_model=expect.get("train_model"))


@pytest.mark.parametrize("name", STORIES)
def test_story(name: str) -> None:
    # A user whose rollout goes this way would get a wrong row, a wrong reason, or no help with a refusal.
    expect, outcome = expectation(name), run(name)
    verdicts = {verdict.model_call_id: str(verdict.code) for verdict in outcome_verdicts(outcome)}
    if expect["outcome"] == "reject":
        assert isinstance(outcome, Rejected), outcome
        assert (outcome.code, outcome.where) == (expect["code"], expect["where"]), outcome.message
        told = f"{outcome.where} {outcome.message} {json.dumps(outcome.evidence, ensure_ascii=False)}"
        assert [mention for mention in expect["mentions"] if mention not in told] == [], told
        capture, _ = read(name)
        refused = {record.model_call_id: "rollout_rejected" for record in capture.records}
        refused |= {call.model_call_id: "lost" for call in capture.lost}
        assert verdicts == refused | expect.get("verdicts", {})
        return
    assert isinstance(outcome, RebuiltRollout), outcome
    selection = outcome.selection
    assert list(selection.calls) == expect["calls"]
    assert selection.terminal_response_id == expect["terminal"]
    assert verdicts == expect["verdicts"]
    rows = [[span.call_id for span in row.spans if span.role == "sampled"] for row in outcome.rows]
    assert rows == expect["rows"]
    credits = [[list(msgspec.structs.astuple(credit)) for credit in row.credits] for row in outcome.rows]
    assert credits == expect.get("credits", [[]] * len(rows))
    assert list(outcome.rebuilt.empty) == expect.get("empty", [])
    assert selection.truncated is expect.get("truncated", False)
    assert dict(selection.options) == expect.get("options", {})
    notes = "\n".join(selection.notes)
    assert [note for note in expect.get("notes", []) if note not in notes] == [], notes


def test_stories_are_what_the_generator_writes() -> None:
    # An expectation edited by hand in one place only would be lost, or never take effect.
    written: dict[str, str] = {}
    for story in make.stories():
        for name, text in story.files().items():
            written[f"{story.name}/{name}"] = text
    found = {
        f"{path.parent.name}/{path.name}": path.read_text(encoding="utf-8")
        for name in STORIES
        for path in (FOLDER / name).iterdir()
    }
    assert found == written


def test_writing_removes_what_nobody_tells(tmp_path: Path) -> None:
    # A renamed story must not leave its old folder behind to be tested for ever.
    (tmp_path / "old_story").mkdir()
    (tmp_path / "old_story" / "STORY.md").write_text("# Old")
    assert make.write(tmp_path) == len(STORIES)
    assert sorted(place.name for place in tmp_path.iterdir()) == STORIES


def _reachable() -> set[Code]:
    """Codes of selection, pipeline and policies, and of verdicts: all before those of tokens."""
    codes = list(Code)
    return set(codes[: codes.index(Code.TOKEN_IDS_MISSING)])


def test_every_code_has_a_story() -> None:
    # A code without a story is one that nobody has seen happen: its message may be wrong or useless.
    shown: set[str] = set()
    for name in STORIES:
        expect = expectation(name)
        shown.add(expect.get("code", ""))
        shown.update(expect.get("verdicts", {}).values())
        if expect["outcome"] == "reject":
            shown.add("rollout_rejected")
    missing = {code for code in _reachable() if code not in shown}
    assert missing == set(WITHOUT_STORY)


def test_every_story_says_what_it_is_about() -> None:
    # A reader who opens a folder must learn what happened without reading JSON.
    for name in STORIES:
        text = (FOLDER / name / "STORY.md").read_text(encoding="utf-8")
        assert len(text.partition("\n\n")[2]) >= 30, name
