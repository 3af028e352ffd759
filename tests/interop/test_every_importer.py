"""What holds for captures of every other program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gristmill.captures import read_lines, write_lines
from gristmill.errors import Code, ConfigError, DecodeError
from gristmill.interop import IMPORTERS, importer_named, importer_of
from tests.interop.foreign_files import FORMATS, TURNS, Format, imported, tokens_of

EVERY = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)


@EVERY
def test_tokens_come_out_as_they_stand(form: Format, tmp_path: Path) -> None:
    """An id or a log-probability that changes on the way in is trained wrong for ever."""
    found = imported(form.name, form.write(tmp_path / form.file, {}))
    assert found.reasons == dict.fromkeys(form.calls)
    assert tokens_of(found.capture) == dict(zip(form.calls, TURNS, strict=True))
    assert found.parents == dict(zip(form.calls, (None, *form.calls), strict=False))
    assert set(found.report.losses) <= set(IMPORTERS[form.name].losses)
    assert not found.report.bad


@EVERY
def test_what_is_imported_can_be_written_and_read(form: Format, tmp_path: Path) -> None:
    """A capture that only the importer can hold would be lost with the file that it came from."""
    rollout = imported(form.name, form.write(tmp_path / form.file, {})).one
    again = read_lines(write_lines(rollout.capture, rollout.result))
    [read] = again.rollouts.values()
    assert tokens_of(read.capture) == tokens_of(rollout.capture)
    assert read.capture.records == rollout.capture.records
    assert (read.result or rollout.result) == rollout.result


UNUSABLE: tuple[tuple[str, Any, str], ...] = (
    ("sampled", None, Code.TOKEN_IDS_MISSING),
    ("prompt", None, Code.PROMPT_IDS_MISSING),
    ("logprobs", None, Code.LOGPROBS_MISSING),
    ("logprobs", [-1.0, -0.5], Code.LOGPROB_COUNT_MISMATCH),
    ("logprobs", [-1.0, float("nan"), -2.0], Code.LOGPROB_NOT_FINITE),
    ("logprobs", [-1.0, float("-inf"), -2.0], Code.LOGPROB_NOT_FINITE),
    ("logprobs", [-1.0, 10**400, -2.0], Code.LOGPROB_NOT_FINITE),
    ("logprobs", [-1.0, "low", -2.0], Code.LOGPROB_NOT_FINITE),
    ("prompt", [1, -2], Code.TOKEN_ID_INVALID),
    ("prompt", [1, 2**31], Code.TOKEN_ID_INVALID),
    ("prompt", [1, "huge"], Code.TOKEN_ID_INVALID),
    ("prompt", [1, 2.5], Code.TOKEN_ID_INVALID),
    ("prompt", [1, True], Code.TOKEN_ID_INVALID),
)


@EVERY
@pytest.mark.parametrize(("place", "value", "reason"), UNUSABLE)
def test_tokens_that_may_not_be_trained(form: Format, place: str, value: Any, reason: str, tmp_path: Path) -> None:
    """A call without exact tokens is kept with its reason: neither guessed at nor left out, nor the others with it."""
    # Python itself does not write an integer of so many digits.
    path = form.write(tmp_path / form.file, {place: value})
    path.write_text(path.read_text().replace('"huge"', "1" + "0" * 5000))
    found = imported(form.name, path)
    first, second, last = form.calls
    if (
        form.name == "request-response"
        and place == "prompt"
        and not all(type(entry) is int for entry in value or [None])
    ):
        # In an engine's reply a list that does not hold integers alone is no list of ids.
        reason = Code.PROMPT_IDS_MISSING
    assert found.reasons == {first: None, second: None, last: reason}
    assert set(tokens_of(found.capture)) == {first, second}
    assert not found.report.bad


@EVERY
@pytest.mark.parametrize("cut", [1, 40, 0.3, 0.6, 0.97])
def test_a_truncated_file_is_refused(form: Format, cut: float, tmp_path: Path) -> None:
    """Half a file must never pass for a whole one."""
    path = form.write(tmp_path / form.file, {})
    data = path.read_bytes().rstrip()
    path.write_bytes(data[: cut if isinstance(cut, int) else int(len(data) * cut)])
    with pytest.raises(DecodeError) as refused:
        imported(form.name, path)
    assert refused.value.code is Code.FILE_MALFORMED
    assert str(path) in (refused.value.where or "")


@EVERY
@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "[",
        "3",
        '"text"',
        "null",
        "{}",
        "[[]]",
        '{"a": 1, "a": 2}',
        "\xff",
        "{" * 9000,
        "NaN",
        '{"a": NaN',
        '{"a": NaN, "b": ' + "[" * 500 + "]" * 500 + "}",
    ],
)
def test_files_that_hold_something_else(form: Format, text: str, tmp_path: Path) -> None:
    """What is no capture is refused or empty; it never becomes a call."""
    path = tmp_path / form.file
    path.write_bytes(text.encode("latin-1"))
    skipped = imported(form.name, path, skip_bad=True)
    assert not any(rollout.capture.records for rollout in skipped.rollouts)
    if skipped.report.bad:
        with pytest.raises(DecodeError) as refused:
            imported(form.name, path)
        assert refused.value.code is Code.FILE_MALFORMED
    else:
        assert not text.strip()
        assert not imported(form.name, path).rollouts


@EVERY
def test_a_file_that_is_not_there(form: Format, tmp_path: Path) -> None:
    """A mistyped path is said to be one."""
    with pytest.raises(DecodeError) as refused:
        imported(form.name, tmp_path / form.file)
    assert refused.value.code is Code.FILE_UNREADABLE


@EVERY
def test_a_format_that_tells_itself(form: Format, tmp_path: Path) -> None:
    """A user should not have to know what wrote a file that says it."""
    path = form.write(tmp_path / form.file, {})
    found = importer_of(path.parent if form.name == "harbor" else path)
    assert found is not None
    assert found.name == form.name


def test_our_own_captures_are_nobody_elses(tmp_path: Path) -> None:
    """A capture of ours that is read as a foreign one would lose what only we keep."""
    for path in sorted(Path("tests/corpus").glob("*/capture.jsonl")):
        assert importer_of(path) is None
        assert importer_of(path.parent) is None
    assert importer_of(tmp_path / "none.jsonl") is None
    assert importer_of(tmp_path) is None


def test_a_name_that_is_nobodys() -> None:
    """A program that names a format gets the same answer as the command line."""
    with pytest.raises(ConfigError) as refused:
        importer_named("harbour")
    assert (refused.value.code, refused.value.where) == (Code.OPTION_INVALID, "--from")
    assert "harbor" in refused.value.message


def test_losses_have_a_sentence() -> None:
    """A name alone does not tell a user what is gone."""
    for importer in IMPORTERS.values():
        assert importer.title.endswith(".")
        assert all(sentence.endswith(".") and len(sentence) > 20 for sentence in importer.losses.values())
