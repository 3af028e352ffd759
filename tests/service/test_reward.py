from __future__ import annotations

import os
from pathlib import Path

import pytest

from gristmill.service.reward import Reward, reward_from_command, reward_from_file, reward_in
from gristmill.service.stamp import stamp_of


@pytest.mark.parametrize(
    ("text", "value"), [("1", 1.0), (" 0.5\n", 0.5), ("-2e-3", -0.002), ("+.5", 0.5), ("0", 0.0), ("1.", 1.0)]
)
def test_a_number_is_a_reward(text: str, value: float) -> None:
    """What graders write is a number with white space around it."""
    assert reward_in(text) == Reward(value)


@pytest.mark.parametrize(
    "text", ["", "nan", "inf", "-Infinity", "1e999", "1 2", "0x1", "1_0", "true", "null", '"1"', "1,5", "score: 1", "١"]
)
def test_anything_else_is_missing_and_not_zero(text: str) -> None:
    """A grader that failed must not teach the model that the answer was wrong."""
    reward = reward_in(text)
    assert reward.value is None
    assert reward.error


def test_a_file_holds_the_reward(tmp_path: Path) -> None:
    """A verifier writes `reward.txt` beside its log."""
    path = tmp_path / "reward.txt"
    assert "No such file" in str(reward_from_file(path).error)
    path.write_text("0.25\n")
    assert reward_from_file(path) == Reward(0.25)
    path.write_bytes(b"\xff")
    assert reward_from_file(path).value is None
    path.write_bytes(b"1" * 70_000)
    assert "larger" in str(reward_from_file(path).error)
    assert reward_from_file(tmp_path).value is None


def test_a_command_prints_the_reward_last(capfd: pytest.CaptureFixture[str]) -> None:
    """Graders print a report first; their standard error stays visible."""
    environment = {**os.environ, "SCORE": "0.75"}
    assert reward_from_command("echo 3 tests; echo report >&2; echo $SCORE; echo", environment) == Reward(0.75)
    assert "report" in capfd.readouterr().err
    assert "code 3" in str(reward_from_command("echo 1; exit 3", environment).error)
    assert "no output" in str(reward_from_command("true", environment).error)
    assert reward_from_command("echo 1; echo done", environment).value is None
    assert reward_from_command("cat", environment).error, "it must not wait for somebody to type"


def test_a_file_of_an_earlier_run_is_no_reward(tmp_path: Path) -> None:
    """A harness that crashed before it graded must not get the last run's reward."""
    file = tmp_path / "reward"
    file.write_text("1")
    before = stamp_of(file)
    stale = reward_from_file(file, before)
    assert stale.value is None
    assert "was not written" in str(stale.error)
    assert str(file) in str(stale.error)
    other = tmp_path / "other"
    other.write_text("1")
    other.replace(file)
    assert reward_from_file(file, before) == Reward(1.0), "put in its place, it is the run's"
    assert reward_from_file(file, stamp_of(tmp_path / "none")) == Reward(1.0), "there was none before"


def test_what_stands_in_a_files_place_is_not_waited_for(tmp_path: Path) -> None:
    # A harness that makes a pipe of its reward file would hang the run for ever, a device fill the memory.
    pipe, device, folder = tmp_path / "pipe", tmp_path / "device", tmp_path / "folder"
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    folder.mkdir()
    for path in (pipe, device, folder):
        reward = reward_from_file(path)
        assert reward.value is None
        assert reward.error is not None


def test_the_text_of_a_file_is_not_repeated(tmp_path: Path) -> None:
    # A reward file may be a link to a key; its text would stand in logs and in the ledger.
    secret, link = tmp_path / "secret", tmp_path / "link"
    secret.write_text("gma_secret")
    link.symlink_to(secret)
    reward = reward_from_file(link)
    assert reward.error is not None
    assert "gma_secret" not in reward.error


def test_a_nought_has_no_sign(tmp_path: Path) -> None:
    # The ledger keeps none, so that a rollout with one could not be read back as it was written.
    file = tmp_path / "reward"
    file.write_text("-0\n")
    assert str(reward_from_file(file).value) == "0.0"
