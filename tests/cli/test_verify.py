from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gristmill.demo import recordings
from gristmill.errors import Code
from gristmill.export import Manifest, read_manifest
from tests.cli.stories import TWO_TURNS, Json, good_story, refused_story, returned, run, story, write_story


@pytest.fixture
def made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with captures (`in`) of a good and a refused rollout, and their rows (`out`)."""
    good_story(tmp_path / "in" / "a", "a")
    refused_story(tmp_path / "in" / "b", "b")
    assert run(capsys, "rows", tmp_path / "in", "--out", tmp_path / "out").code == 0
    return tmp_path


def codes(ran: Any) -> set[str]:
    return {finding["code"] for finding in ran.json["findings"]}


def verify(capsys: pytest.CaptureFixture[str], made: Path, *more: str) -> Any:
    return run(capsys, "verify", made / "in", made / "out", "--json", *more)


def change_rows(made: Path, change: Callable[[Json], Any], *, reseal: bool = True) -> None:
    """Change the first row; with `reseal` the manifest is made to agree, as a careful forger would."""
    path = made / "out" / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows[0])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if reseal:
        manifest = read_manifest(made / "out")
        data = path.read_bytes()
        entry = msgspec.structs.replace(
            manifest.files[1], bytes=len(data), sha256=sha256(data).hexdigest(), rows=len(rows)
        )
        ids = sha256("".join(f"{row['row_id']}\n" for row in rows).encode()).hexdigest()
        write_manifest(made, msgspec.structs.replace(manifest, files=(manifest.files[0], entry), rows_digest=ids))


def write_manifest(made: Path, manifest: Manifest) -> None:
    sealed = msgspec.structs.replace(manifest, manifest_digest=manifest.digest())
    (made / "out" / "manifest.json").write_bytes(sealed.encode())


def test_what_was_made_is_proved(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A check that finds faults in good rows is a check that nobody runs."""
    ran = verify(capsys, made)
    assert ran.code == 0
    assert set(ran.json) == {"findings", "checked", "funnel", "bad_lines"}
    assert ran.json["findings"] == []
    assert ran.json["checked"] == {"rollouts": 2, "calls": 6, "rows": 1, "manifest": True}
    assert ran.json["funnel"]["trained_tokens"] == 4
    told = run(capsys, "verify", made / "in", made / "out")
    assert "checked 2 rollouts, 6 calls, 1 row and their manifest: nothing found" in told.out
    alone = run(capsys, "verify", made / "in")
    assert (alone.code, "checked 2 rollouts, 6 calls: nothing found" in alone.out) == (0, True)


@pytest.mark.parametrize("mode", ["per_call", "tree"])
def test_every_mode_is_proved(made: Path, capsys: pytest.CaptureFixture[str], mode: str) -> None:
    """The manifest says how rows were made, and verify makes them again in that way."""
    run(capsys, "rows", made / "in", "--out", made / "out", "--overwrite", "--mode", mode)
    assert verify(capsys, made).code == 0


def _span(row: Json, name: str, value: Any) -> None:
    row["spans"][0][name] = value


TAMPERINGS: dict[str, tuple[Callable[[Json], Any], Code]] = {
    "id": (lambda row: row["token_ids"].__setitem__(4, 99), Code.ROW_TOKENS_DIFFER),
    "mask bit": (lambda row: row["loss_mask"].__setitem__(5, 1), Code.ROW_MASK_DIFFERS),
    "log-prob": (lambda row: row["logprobs"].__setitem__(3, -0.401), Code.ROW_LOGPROBS_DIFFER),
    "span": (lambda row: _span(row, "end", 2), Code.ROW_SPANS_INVALID),
    "span's call": (lambda row: _span(row, "call_id", "x1"), Code.ROW_LINEAGE_DIFFERS),
    "parent": (
        lambda row: row["spans"][2]["certificate"].__setitem__("parent_call_id", "x1"),
        Code.ROW_LINEAGE_DIFFERS,
    ),
    "row id": (lambda row: row.__setitem__("row_id", "0" * 32), Code.ROW_ID_DIFFERS),
    "reward": (lambda row: row.__setitem__("reward", 0.5), Code.ROW_METADATA_DIFFERS),
    "weight": (lambda row: row.__setitem__("loss_weight", 0.5), Code.ROW_METADATA_DIFFERS),
    "rollout": (lambda row: row.__setitem__("rollout_id", "c"), Code.ROW_UNEXPECTED),
    "attempt": (lambda row: row.__setitem__("attempt", 1), Code.ROW_MISSING),
    "refused rollout": (lambda row: row.__setitem__("rollout_id", "b"), Code.ROW_UNEXPECTED),
    "type": (lambda row: row.__setitem__("attempt", "0"), Code.ROW_MALFORMED),
    "unknown field": (lambda row: row.__setitem__("more", 1), Code.ROW_MALFORMED),
    "array": (lambda row: row["token_ids"].append("x"), Code.ROW_MALFORMED),
    "length": (lambda row: row["loss_mask"].pop(), Code.ROW_MALFORMED),
}


@pytest.mark.parametrize("what", TAMPERINGS)
def test_a_changed_row_is_found_even_under_a_new_manifest(
    made: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    """One wrong id, bit or log-probability trains the model on something that never happened."""
    change, code = TAMPERINGS[what]
    change_rows(made, change)
    ran = verify(capsys, made)
    assert ran.code == 1
    assert code in codes(ran)
    assert run(capsys, "verify", made / "in", made / "out").code == 1


def _changed(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, dict):
        return {**value, "added": [1, 2]} if not value else {key: _changed(held) for key, held in value.items()}
    if isinstance(value, list):
        return [_changed(held) for held in value]
    if isinstance(value, str):
        return {"merged": "per_call", "returned_history": "final_context"}.get(value, value[::-1] + "0")
    return 0 if value == 1 else 1 if value is None else value + 1


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The place of every entry that holds no other."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [place for key, held in members for place in _paths(held, (*path, key))]
    return found or [path]


MANIFEST_ENTRIES = [
    *("schema", "format", "policy", "mode", "rows_digest", "context_tokens", "manifest_digest"),
    *(f"files.{index}.{name}" for index in (0, 1) for name in ("name", "bytes", "sha256", "rows")),
    *("rollouts.selected", "rollouts.rejected", "rejected.match_missing", "options", "train_model", "forks"),
    *(f"funnel.{stage}_calls" for stage in ("captured", "usable", "selected", "trained", "lost")),
    *(f"funnel.{stage}_tokens" for stage in ("captured", "usable", "selected", "trained")),
    *("funnel.excluded.retry_superseded.0", "funnel.excluded.retry_superseded.1"),
    *("funnel.excluded.rollout_rejected.0", "funnel.excluded.rollout_rejected.1"),
]


def test_no_manifest_entry_is_forgotten_here(made: Path) -> None:
    """A new entry must be tampered with below."""
    document = json.loads((made / "out" / "manifest.json").read_text())
    assert {".".join(map(str, path)) for path in _paths(document)} == set(MANIFEST_ENTRIES)


@pytest.mark.parametrize("reseal", [False, True], ids=["as it is", "resealed"])
@pytest.mark.parametrize("entry", MANIFEST_ENTRIES)
def test_a_changed_manifest_entry_is_found(
    made: Path, capsys: pytest.CaptureFixture[str], entry: str, reseal: bool
) -> None:
    """Counts, digests and settings in a manifest are believed by whoever trains on the rows."""
    path = made / "out" / "manifest.json"
    document = json.loads(path.read_text())
    *place, last = (int(key) if key.isdigit() else key for key in entry.split("."))
    holder = document
    for key in place:
        holder = holder[key]
    holder[last] = {
        "policy": "all_captured",
        "train_model": "m",
        "options": {"whitespace": "trim"},
        "forks": {"unknown": 1},
        "schema": 0,
    }.get(entry, _changed(holder[last]))
    path.write_text(json.dumps(document))
    if reseal and entry != "manifest_digest":
        write_manifest(made, read_manifest(made / "out"))
    ran = verify(capsys, made)
    # Settings that come to the same here are found by the manifest's own digest alone.
    same = {"train_model", "options"}
    if not (reseal and entry in same):
        assert ran.code == 1
    if not (reseal and entry in {*same, "policy", "mode"}):
        assert Code.MANIFEST_DIFFERS in codes(ran)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 3}', '{"schema": "x"}', "\udc80"])
def test_a_manifest_that_is_none(made: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    """Any bytes in a manifest give a code."""
    (made / "out" / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    ran = verify(capsys, made)
    newer = text == '{"schema": 3}'
    assert (ran.code, ran.json["error"]["code"]) == ((3, "schema_unsupported") if newer else (1, "file_malformed"))


def test_a_folder_that_was_not_finished(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows without a manifest are what a crash leaves."""
    (made / "out" / "manifest.json").unlink()
    ran = verify(capsys, made)
    assert (ran.code, ran.json["error"]["code"]) == (3, "file_unreadable")
    assert "its manifest is written last" in ran.json["error"]["hint"]


@pytest.mark.parametrize("name", ["rows.jsonl", "rejected.jsonl"])
def test_a_file_that_is_gone(made: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Missing files must not pass as empty ones."""
    (made / "out" / name).unlink()
    ran = verify(capsys, made)
    assert ran.code == 1
    assert f"expected {name}, it is not there" in {finding["message"] for finding in ran.json["findings"]}
    (made / "out" / name).mkdir()
    assert verify(capsys, made).json["error"]["code"] == "file_unreadable"


@pytest.mark.parametrize("name", ["rows.jsonl", "rejected.jsonl"])
def test_lines_that_are_none(made: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Garbage in a file is named by its line and hides nothing."""
    with (made / "out" / name).open("ab") as file:
        file.write(b'{"odd": \xff}\n{"attempt": 0}\n')
    found = verify(capsys, made).json["findings"]
    assert any(f"{name} line 2" in finding["where"] for finding in found)
    assert any(f"{name} line 3" in finding["where"] for finding in found)


def test_refusals_are_checked_too(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A refusal that is forged or missing changes what a run says it lost."""
    path = made / "out" / "rejected.jsonl"
    good = path.read_text()
    for text in ("", good.replace("match_missing", "match_ambiguous"), good + good, good.replace('"b"', '"z"')):
        path.write_text(text)
        ran = verify(capsys, made)
        assert ran.code == 1
        assert any("refusal" in finding["message"] for finding in ran.json["findings"])
    path.write_text(good + good.replace('"rollout_id":"b"', '"rollout_id":"a"'))
    assert any("expected no refusal" in finding["message"] for finding in verify(capsys, made).json["findings"])


def test_rows_of_one_rollout_stand_together(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trainers that read step by step rely on it."""
    good_story(made / "in" / "c", "c")
    run(capsys, "rows", made / "in", "--out", made / "out", "--overwrite", "--mode", "per_call")
    path = made / "out" / "rows.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[index] for index in (0, 2, 1, 3)))
    assert any("to stand together" in finding["message"] for finding in verify(capsys, made).json["findings"])


def test_one_rollout_can_be_checked_alone(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counts of the whole run must not be compared with one rollout's."""
    ran = verify(capsys, made, "--rollout", "a")
    assert (ran.code, ran.json["checked"]["rollouts"]) == (0, 1)
    change_rows(made, lambda row: row.__setitem__("reward", 2.0))
    assert verify(capsys, made, "--rollout", "a").code == 1
    assert verify(capsys, made, "--rollout", "b").code == 0


@pytest.mark.parametrize("more", [["--policy", "all_captured"], ["--train-model", "m"], ["--set", "whitespace=trim"]])
def test_other_settings_than_the_manifests_are_found(
    made: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    """Rows checked under settings that they were not made with prove nothing."""
    assert "manifest_differs" in codes(verify(capsys, made, *more))


def test_a_policy_of_ones_own_is_only_run_when_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest is data: it must not be able to make us import code."""
    (tmp_path / "keep_all.py").write_text("def keep(records, result):\n    return records, records[-1].response_id\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    good_story(tmp_path / "in")
    assert run(capsys, "rows", "in", "--out", "out", "--policy", "keep_all:keep").code == 0
    refused = run(capsys, "verify", "in", "out", "--json")
    assert refused.code == 2
    assert "--policy keep_all:keep" in refused.json["error"]["hint"]
    assert run(capsys, "verify", "in", "out", "--policy", "keep_all:keep").code == 0


# ---- captures alone ----------------------------------------------------------------------------------------


def test_a_parent_that_was_never_captured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A hole in the lineage is a call that nobody captured."""
    calls = [story()[0], {**story()[2], "parent_call_id": "ghost"}]
    ran = run(capsys, "verify", write_story(tmp_path, calls, returned(*TWO_TURNS)), "--json")
    assert ran.code == 1
    [finding] = ran.json["findings"]
    assert finding["code"] == "row_lineage_differs"
    assert finding["where"] == "rollout=r call=c2"
    assert set(finding) == {"code", "where", "message", "evidence"}


def test_findings_are_counted_for_people(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says how bad it is."""
    change_rows(made, lambda row: row["token_ids"].__setitem__(4, 99), reseal=False)
    told = run(capsys, "verify", made / "in", made / "out").out
    assert "row_tokens_differ at rollout=a row=" in told
    assert "manifest_differs at " in told
    assert " findings" in told


def test_a_whole_manifest_of_a_newer_version(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A newer version may mean other things by the same fields."""
    write_manifest(made, msgspec.structs.replace(read_manifest(made / "out"), schema=3))
    ran = verify(capsys, made)
    assert (ran.code, ran.json["error"]["code"]) == (3, "schema_unsupported")


def test_a_file_entry_that_is_gone_or_added(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The manifest names every file, and no other."""
    manifest = read_manifest(made / "out")
    for files in (manifest.files[:1], (*manifest.files, manifest.files[0])):
        write_manifest(made, msgspec.structs.replace(manifest, files=files))
        found = verify(capsys, made).json["findings"]
        assert any("$.files[" in finding["where"] for finding in found)


def test_an_edited_ledger_is_found(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was changed with a database tool would train the wrong way, and the rows would look proved."""
    ledger = made / "run.gristmill"
    assert run(capsys, "import", made / "in", "--into", ledger).code == 0
    assert run(capsys, "verify", ledger).code == 0
    connection = sqlite3.connect(ledger)
    connection.execute("update attempts set rollout_id = 'forged' where rollout_id = 'a'")
    connection.commit()
    connection.close()
    done = run(capsys, "verify", ledger, "--json")
    assert done.code == 1
    assert codes(done) == {Code.LEDGER_DAMAGED}


def test_an_input_is_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--overwrite` into the folder of the only copy of a capture must not destroy it."""
    story = good_story(tmp_path / "a")
    capture = tmp_path / "rows.jsonl"
    capture.write_bytes((story / "capture.jsonl").read_bytes())
    before = capture.read_bytes()
    for words in (("rows",), ("export", "--to", "jsonl")):
        ran = run(capsys, *words, capture, "--result", story / "result.json", "--out", tmp_path, "--overwrite")
        assert ran.code == 3
    assert capture.read_bytes() == before


def test_an_attempt_that_cannot_be_read_takes_no_other_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One damaged rollout of a thousand must not keep the others from being proved."""
    ledger = tmp_path / "run.gristmill"
    captures = Path(str(recordings()))
    assert run(capsys, "import", captures, "--into", ledger).code == 0
    with contextlib.closing(sqlite3.connect(ledger)) as database:
        (number,) = database.execute("SELECT attempt_no FROM attempts WHERE rollout_id = 'two-tries'").fetchone()
        database.execute("UPDATE results SET value = ? WHERE attempt_no = ?", (b'{"messages": []}', number))
        database.commit()
    ran = run(capsys, "verify", ledger, "--json")
    assert ran.code == 1
    assert [(one["code"], one["where"]) for one in ran.json["findings"]] == [("ledger_damaged", "rollout=two-tries")]
    assert ran.json["checked"]["rollouts"] == 3


@pytest.mark.parametrize("more", [[], ["--rollout", "a"], ["--state", "frozen"]])
def test_a_ledger_whose_only_attempt_is_damaged_has_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    """ "No such rollout", exit code 2, sends people looking for a typing error."""
    good_story(tmp_path / "in", "a")
    ledger = tmp_path / "run.gristmill"
    assert run(capsys, "import", tmp_path / "in", "--into", ledger).code == 0
    with contextlib.closing(sqlite3.connect(ledger)) as database:
        database.execute("UPDATE calls SET record = x'00'")
        database.commit()
    ran = run(capsys, "verify", ledger, *more, "--json")
    assert [(one["code"], one["where"]) for one in ran.json["findings"]] == [("ledger_damaged", "rollout=a")]
    assert (ran.code, ran.json["checked"]["rollouts"]) == (1, 0)
    told = run(capsys, "verify", ledger, *more)
    assert (told.code, "ledger_damaged at rollout=a" in told.out) == (1, True)
    assert run(capsys, "verify", ledger, "--rollout", "b").code == 2


def test_what_ends_the_check_hides_no_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One ledger is damaged, the next one cannot be opened."""
    good_story(tmp_path / "in", "a")
    ledger = tmp_path / "a.gristmill"
    assert run(capsys, "import", tmp_path / "in", "--into", ledger).code == 0
    other = tmp_path / "b.gristmill"
    with contextlib.closing(sqlite3.connect(ledger)) as database, contextlib.closing(sqlite3.connect(other)) as foreign:
        database.execute("UPDATE calls SET record = x'00'")
        database.commit()
        foreign.execute("CREATE TABLE theirs (a)")
        foreign.commit()
    ran = run(capsys, "verify", ledger, other)
    assert ran.code != 0
    assert "ledger_damaged at rollout=a" in ran.out
    assert ran.err.startswith("error:")
