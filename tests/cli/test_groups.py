"""Groups and advantages on the command line, from captures to what `verify` proves of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gristmill.cli.attempts import Captures
from gristmill.ledger import AttemptKey, SqliteLedger
from gristmill.records import Result
from tests.cli.stories import TWO_TURNS, Json, returned, run, story


def told(rollout_id: str, *, attempt: int = 0, **fields: Any) -> list[Json]:
    """The lines of one attempt: its calls, and its result with these fields."""
    key = {"rollout_id": rollout_id, "attempt": attempt}
    result = {"kind": "result", "result": returned(*TWO_TURNS), "reward": None, "group_id": None, **fields}
    return [{**line, **key} for line in (*story(), result)]


@pytest.fixture
def captures(tmp_path: Path) -> Path:
    """Two groups and what falls out of them: no reward, a masked failure, no group, an attempt before the last one."""
    lines = [
        *told("won", reward=1.0, group_id="g"),
        *told("lost", reward=0.0, group_id="g"),
        *told("again", reward=0.0, group_id="g"),
        *told("again", attempt=1, reward=1.0, group_id="g"),
        *told("open", group_id="g"),
        *told("broken", reward=0.0, group_id="g", failure={"reason": "sandbox gone", "attribution": "mask"}),
        *told("same-a", reward=0.5, group_id="h"),
        *told("same-b", reward=0.5, group_id="h", failure={"reason": "out of steps", "attribution": "score"}),
        *told("alone", reward=1.0),
    ]
    return written(tmp_path / "run.jsonl", lines)


def written(path: Path, lines: list[Json]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def advantages(folder: Path) -> dict[tuple[str, int], float]:
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    return {(row["rollout_id"], row["attempt"]): row["advantage"] for row in rows}


def refusals(folder: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in (folder / "rejected.jsonl").read_text().splitlines()]
    return {line["rollout_id"]: line["code"] for line in lines}


def test_groups(captures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether a run teaches anything is the first thing that its owner asks."""
    made = run(capsys, "groups", captures, "--json").json
    first, second = made["groups"]
    std = first.pop("std")
    assert first == {
        "group_id": "g", "size": 5, "rewarded": 3, "missing": 1, "masked": 1, "solved": 2, "repeated": 1,
        "mean": pytest.approx(2 / 3), "degenerate": False,
    }  # fmt: skip
    assert std == pytest.approx(3**-0.5)
    assert (second["mean"], second["std"], second["degenerate"]) == (0.5, 0.0, True)
    totals = made["totals"]
    assert (totals["rollouts"], totals["solved"], totals["ungrouped"]) == (7, 4, 1)
    assert (totals["solved_share"], totals["degenerate_share"]) == (0.8, 0.5)
    higher = run(capsys, "groups", captures, "--json", "--solved-above", "0.5").json
    assert (higher["totals"]["solved"], higher["solved_above"]) == (2, 0.5)
    ran = run(capsys, "groups", captures)
    assert ran.code == 0
    assert "4 of 5 rewarded rollouts solved (80.0%); 1 of 2 groups without a signal (50.0%)" in ran.out
    for note in ("1 rollout without a reward", "1 rollout with a masked failure", "1 rollout without a group"):
        assert note in ran.err
    assert "1 more attempt with a reward: the last of a rollout counts" in ran.err
    one = run(capsys, "groups", captures, "--group", "h")
    assert one.out.splitlines()[1].split() == ["h", "2", "2", "0", "0", "2", "0.5", "0", "none:", "degenerate"]


def test_groups_of_a_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rollout that is still running is one of its group; nobody has to wait for it to look."""
    from gristmill.ledger import AttemptSetup
    from tests.ledger.attempts import fill

    path = tmp_path / "run.gristmill"
    with SqliteLedger(path) as ledger:
        for number, reward in enumerate((1.0, 0.0, None)):
            key = AttemptKey(f"r{number}")
            ledger.begin(key, AttemptSetup(group_id="g", created_at=1.0))
            fill(ledger, key, calls=1, seed=number)
            if reward is not None:
                ledger.finish(key, Result(reward=reward, group_id="g"))
    [group] = run(capsys, "groups", path, "--json").json["groups"]
    assert (group["size"], group["rewarded"], group["missing"]) == (3, 2, 1)


@pytest.mark.parametrize(
    ("kind", "won", "lost"), [("group_mean", 1 / 3, -2 / 3), ("group_norm", 3**-0.5, -2 * 3**-0.5)]
)
def test_an_export_with_advantages(
    captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, won: float, lost: float
) -> None:
    """Numbers of a textbook in the file; whoever has none is refused with the reason, and verify makes them again."""
    out = tmp_path / "out"
    ran = run(capsys, "export", captures, "--to", "jsonl", "--advantage", kind, "--out", out)
    assert ran.code == 0
    assert f"advantages: {kind} over 6 rewards in 2 groups" in ran.out
    expected = {
        ("won", 0): won, ("lost", 0): lost, ("again", 0): lost, ("again", 1): won,
        ("same-a", 0): 0.0, ("same-b", 0): 0.0,
    }  # fmt: skip
    assert advantages(out) == pytest.approx(expected)
    assert refusals(out) == {"open": "reward_missing", "broken": "failure_masked", "alone": "group_missing"}
    manifest = json.loads((out / "manifest.json").read_text())
    stated = manifest["advantage"]
    assert (manifest["schema"], stated["kind"], stated["groups"], stated["rewards"]) == (2, kind, 2, 6)
    assert run(capsys, "verify", captures, out).code == 0


def test_a_part_is_exported_and_verified_by_the_whole_group(
    captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rollout that is looked at must not become a group of its own."""
    out = tmp_path / "out"
    asked = ("--rollout", "won", "--to", "jsonl", "--advantage", "group_mean", "--out", out)
    assert run(capsys, "export", captures, *asked).code == 0
    assert advantages(out) == pytest.approx({("won", 0): 1 / 3})
    assert run(capsys, "verify", captures, out, "--rollout", "won").code == 0


@pytest.mark.parametrize("to", ["parquet", "jsonl", "tinker"])
def test_what_cannot_be_proved_is_said(
    captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    """With a part of a group at hand its mean is unknown: that is one finding, and not a wrong one for each row."""
    out = tmp_path / "out"
    assert run(capsys, "export", captures, "--to", to, "--advantage", "group_mean", "--out", out).code == 0
    part = written(tmp_path / "part.jsonl", told("won", reward=1.0, group_id="g"))
    found = run(capsys, "verify", part, out, "--rollout", "won", "--json")
    assert found.code == 1
    [finding] = found.json["findings"]
    assert (finding["code"], finding["where"]) == ("manifest_differs", f"{out / 'manifest.json'} $.advantage")
    assert "of 1 attempt are not proved" in finding["message"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"advantage":0.33', '"advantage":0.34'),
        ('"advantage":-0.6666666666666666,', '"advantage":null,'),
        ('"advantage":0.0', '"advantage":0.5'),
    ],
)
def test_an_advantage_that_was_changed_is_found(
    captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str
) -> None:
    """A number that nobody can make again must not be trained with."""
    out = tmp_path / "out"
    run(capsys, "export", captures, "--to", "jsonl", "--advantage", "group_mean", "--out", out)
    text = (out / "rows.jsonl").read_text()
    assert old in text
    (out / "rows.jsonl").write_text(text.replace(old, new, 1))
    codes = {finding["code"] for finding in run(capsys, "verify", captures, out, "--json").json["findings"]}
    assert codes == {"row_metadata_differs", "manifest_differs"}


def test_a_manifest_that_names_other_advantages_is_found(
    captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """How the numbers were made is as much a claim as the numbers."""
    out = tmp_path / "out"
    run(capsys, "export", captures, "--to", "jsonl", "--advantage", "group_mean", "--out", out)
    path = out / "manifest.json"
    stated = json.loads(path.read_text())
    for change in ({"kind": "group_norm"}, {"kind": "given"}, {"rewards": 7}, {"rewards_digest": "0" * 32}):
        path.write_text(json.dumps({**stated, "advantage": {**stated["advantage"], **change}}))
        assert run(capsys, "verify", captures, out).code == 1
    path.write_text(json.dumps({name: value for name, value in stated.items() if name != "advantage"}))
    assert run(capsys, "verify", captures, out).code == 1


def test_given_advantages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever computes advantages elsewhere hands them in; without a word they stay out of the rows."""
    captures = written(
        tmp_path / "in.jsonl", [*told("a", advantage=0.25, credits=[{"model_call_id": "c1", "reward": 2}]), *told("b")]
    )
    lines = run(capsys, "rows", captures, "--advantage", "given").lines
    assert {(line["rollout_id"], line["advantage"]) for line in lines} == {("a", 0.25)}
    assert [credit["reward"] for line in lines for credit in line.get("credits", ())] == [2.0]
    assert {line["advantage"] for line in run(capsys, "rows", captures).lines} == {None}
    out = tmp_path / "out"
    ran = run(capsys, "rows", captures, "--advantage", "given", "--out", out)
    assert ran.code == 0
    assert "advantages: given\n" in ran.out
    assert refusals(out) == {"b": "advantage_required"}
    assert json.loads((out / "manifest.json").read_text())["advantage"]["kind"] == "given"
    assert run(capsys, "verify", captures, out).code == 0


def test_what_rows_leave_out_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A verifier that scores every call must see how much of its work is used."""
    scored = [{"model_call_id": line["model_call_id"], "reward": 1} for line in story()]
    failure = {"reason": "out of steps", "attribution": "score"}
    captures = written(tmp_path / "in.jsonl", told("a", reward=1.0, advantage=1, credits=scored, failure=failure))
    for to, asked in (("parquet", ()), ("jsonl", ()), ("jsonl", ("--advantage", "given"))):
        out = tmp_path / f"{to}{len(asked)}"
        ran = run(capsys, "export", captures, "--to", to, *asked, "--out", out, "--json")
        losses = {loss["name"]: loss["count"] for loss in ran.json["manifest"]["losses"]}
        expected = {"credits_untrained": len(story()) - 2, "failures": 1}
        assert losses == expected | ({} if asked else {"advantages": 1})
        assert run(capsys, "verify", captures, out).code == 0


def test_results_that_come_in_between_are_an_error(
    captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mean of some rewards beside rows of more is a mean of nothing."""
    reading = Captures.results

    def fewer(self: Captures) -> Any:
        return (attempt for attempt in reading(self) if attempt.capture.rollout_id != "lost")

    monkeypatch.setattr(Captures, "results", fewer)
    out = tmp_path / "out"
    for command in (("export", "--to", "jsonl"), ("rows",)):
        name, *rest = command
        ran = run(capsys, name, captures, *rest, "--advantage", "group_mean", "--out", out, "--json")
        assert (ran.code, ran.json["error"]["code"]) == (1, "attempt_differs")
        assert not out.exists()


def test_the_first_pass_says_nothing_twice(captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A warning that is shown twice looks like two faults."""
    written(captures, [*told("a", reward=1.0, group_id="g", rewrad=1), *told("b", reward=0.0, group_id="g")])
    asked = ("--to", "jsonl", "--out", tmp_path / "out")
    once = run(capsys, "export", captures, *asked)
    twice = run(capsys, "export", captures, *asked, "--overwrite", "--advantage", "group_mean")
    assert once.code == twice.code == 0
    assert "unknown key 'rewrad' on 1 line" in once.err
    assert once.err == twice.err


def test_a_policy_refusal_does_not_take_a_reward_out_of_its_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rollouts that cannot be rebuilt are not all good or all bad ones: leaving them out would move the mean."""
    odd = told("odd", reward=0.0, group_id="g")
    odd[-1]["result"] = returned("never said")
    captures = written(tmp_path / "in.jsonl", [*told("won", reward=1.0, group_id="g"), *odd])
    out = tmp_path / "out"
    run(capsys, "export", captures, "--to", "jsonl", "--advantage", "group_mean", "--out", out)
    assert advantages(out) == {("won", 0): 0.5}
    assert refusals(out) == {"odd": "match_missing"}
    assert run(capsys, "verify", captures, out).code == 0


def test_credit_of_a_ledger_is_that_of_its_files(
    captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Imported, exported and verified, the same rollouts give the same rows."""
    ledger = tmp_path / "run.gristmill"
    assert run(capsys, "import", captures, "--into", ledger).code == 0
    for source, out in ((captures, tmp_path / "a"), (ledger, tmp_path / "b")):
        assert run(capsys, "export", source, "--to", "jsonl", "--advantage", "group_norm", "--out", out).code == 0
        assert run(capsys, "verify", ledger, out).code == 0
    assert advantages(tmp_path / "a") == advantages(tmp_path / "b")
    notes = [json.loads((tmp_path / name / "manifest.json").read_text())["advantage"] for name in "ab"]
    assert notes[0] == notes[1]
    assert run(capsys, "groups", captures, "--json").json == run(capsys, "groups", ledger, "--json").json
