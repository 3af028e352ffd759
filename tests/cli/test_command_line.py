from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from gristmill.canonical import JsonNumber
from gristmill.cli import main
from gristmill.cli.app import COMMANDS, application
from gristmill.cli.document import Document, json_text
from gristmill.cli.failure import exit_code_of, failure_of
from gristmill.cli.nearest import did_you_mean
from gristmill.cli.visible import visible
from gristmill.errors import Code, LedgerError
from tests.cli.stories import TWO_TURNS, good_story, refused_story, returned, run, story, write_story

PROGRAM = [sys.executable, "-c", "import sys; from gristmill.cli import main; sys.exit(main())"]
HEAVY = ("starlette", "aiohttp", "psycopg", "pyarrow", "ray", "torch", "rich", "orjson")
NASTY = "\x1b[31mred\x1b[0m \x9b2J \u202eevil\u2066 [bold]x[/bold] :smile: \r\n\x07"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """A command that help does not name does not exist for users."""
    for arguments in ([], ["--help"], ["-h"]):
        ran = run(capsys, *arguments)
        assert ran.code == 0
        for name, summary in COMMANDS.items():
            assert re.search(rf"^  {name} +{re.escape(summary)}$", ran.out, re.MULTILINE)
    for name in COMMANDS:
        command = application.get_command(click.Context(application), name)
        assert command is not None
        assert command.name == name
        assert (command.help or "").startswith(COMMANDS[name].split(",")[0].rstrip(".").split(":")[0][:8])
        assert run(capsys, name, "--help").code == 0


def test_commands_can_be_listed() -> None:
    """The generated reference lists them by click's own means."""
    context = click.Context(application)
    group = application
    assert isinstance(group, click.Group)
    assert group.list_commands(context) == list(COMMANDS)
    assert group.get_command(context, "nope") is None


def test_help_imports_little() -> None:
    """`gristmill --help` must answer at once, and where no server or trainer is installed."""
    code = (
        "import sys; from gristmill.cli import main; main(['--help']); "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_version(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug reports need it, from an installation and from a checkout."""
    import importlib.metadata

    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.2.3")
    assert run(capsys, "--version").out == "gristmill 1.2.3\n"

    def missing(_: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert run(capsys, "--version").out == "gristmill (not installed)\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["selct"], "no command 'selct'. Did you mean 'select'?"),
        (["select", "--polcy", "x", "p"], "did you mean"),
        (["select"], "missing argument 'PATHS...'"),
        (["select", "p", "--attempt", "-1"], "-1 is not in the range"),
        (["--unheard"], "no such option"),
        (["select", "p", "--set", "x"], "expected --set KEY=VALUE, got 'x'"),
        (["select", "p", "--set", "x=1", "--set", "x=2"], "expected each option once"),
        (["select", "p", "--policy", "returned_histroy"], "expected one of returned_history"),
        (["select", "p", "--set", "reasoning=maybe"], "expected reasoning to be required or optional"),
        (["select", "p", "--policy", "no.such:thing"], "expected to load 'thing' from 'no.such'"),
        (["select", "p", "--policy", "os:sep"], "expected a callable (records, result), got str"),
        (["rows", "p", "--mode", "wide"], "'wide' is not one of"),
        (["ls", "p", "--code", "mach_missing"], "no code 'mach_missing'. Did you mean 'match_missing'?"),
        (["ls", "p", "--selected", "--rejected"], "leave nothing to show"),
        (["ls", "p", "--no-verdicts", "--rejected"], "--no-verdicts leaves no verdict"),
        (["select", "p", "--state", "done"], "'done' is not one of"),
        (["export", "p", "--to", "parket", "--out", "o"], "no format 'parket'. Did you mean 'parquet'?"),
        (["export", "p"], "missing option '--out'"),
        (["import", "p"], "missing option '--into'"),
        (["diff", "p"], "expected a policy to compare with"),
        (["diff", "p", "--against", "all_captued"], "expected one of returned_history"),
        (["show", "p", "a", "--rollout", "b"], "expected one rollout"),
        (["ledger", "mgrate"], "no command 'mgrate'. Did you mean 'migrate'?"),
        (["ledger", "freeze", "p"], "expected either rollouts or --finished"),
        (["completion", "tcsh"], "'tcsh' is not one of"),
    ],
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], arguments: list[str], told: str) -> None:
    """What was mistyped, and what was meant; exit code 2, and JSON where JSON was asked for."""
    ran = run(capsys, *arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("error: ")
    assert told.lower() in ran.err.lower()
    as_json = run(capsys, *arguments, "--json")
    assert as_json.code == 2
    assert as_json.err == ""
    assert set(as_json.json["error"]) == {"code", "message", "where", "hint"}


def test_every_code_has_an_exit_code() -> None:
    """Scripts tell bad data from a bad command and a bad machine by it."""
    assert {code: exit_code_of(code) for code in Code if exit_code_of(code) != 1} == {
        Code.USAGE: 2,
        Code.OPTION_INVALID: 2,
        Code.ROLLOUT_UNKNOWN: 2,
        Code.CALL_UNKNOWN: 2,
        Code.POLICY_UNKNOWN: 2,
        Code.POLICY_LOAD_FAILED: 2,
        Code.POLICY_NOT_CALLABLE: 2,
        Code.POLICY_OPTION_INVALID: 2,
        Code.FILE_UNREADABLE: 3,
        Code.OUTPUT_EXISTS: 3,
        Code.SCHEMA_UNSUPPORTED: 3,
        Code.LEDGER_LOCKED: 3,
        Code.LEDGER_FOREIGN: 3,
        Code.LEDGER_READ_ONLY: 3,
        Code.LEDGER_NETWORK_FILE_SYSTEM: 3,
        Code.LEDGER_FULL: 3,
        Code.LEDGER_WRITE_FAILED: 3,
        Code.LEDGER_DAMAGED: 3,
        Code.LEDGER_BUSY: 3,
        Code.LEDGER_CLOSED: 3,
        Code.LEDGER_UNREACHABLE: 3,
        Code.LEASE_EXPIRED: 3,
        Code.ATTEMPT_ELSEWHERE: 3,
        Code.KEY_MISSING: 3,
        Code.KEY_UNKNOWN: 3,
        Code.KEY_FORBIDDEN: 3,
        Code.HOST_REFUSED: 3,
        Code.GATEWAY_BUSY: 3,
        Code.DISK_LOW: 3,
        Code.NOT_DURABLE: 3,
        Code.ENGINE_UNREACHABLE: 3,
        Code.ENGINE_LOST: 3,
        Code.WORKER_LOST: 3,
        Code.MEMORY_EXHAUSTED: 3,
        Code.INTERNAL: 3,
        Code.INTERRUPTED: 130,
    }
    assert failure_of(LedgerError("m", where="w")).code is Code.FILE_UNREADABLE


def test_interrupts_bugs_and_broken_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody should see a traceback who did not ask for one."""
    path = good_story(tmp_path)

    def raising(error: BaseException) -> None:
        def fail(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr("gristmill.cli.choice.Choice.select", fail)

    raising(KeyboardInterrupt())
    ran = run(capsys, "select", path)
    assert (ran.code, ran.out, ran.err) == (130, "", "error: interrupted\n")
    raising(RuntimeError("odd\x1b"))
    ran = run(capsys, "select", path, "--json")
    assert (ran.code, ran.err, ran.json["error"]["code"]) == (3, "", "internal")
    ran = run(capsys, "select", path)
    assert ran.err.startswith("error: internal: RuntimeError: odd\\x1b\nhint: this is a bug")
    monkeypatch.setenv("GRISTMILL_DEBUG", "1")
    assert "Traceback" in run(capsys, "select", path).err
    raising(OSError(28, "No space left on device"))
    ran = run(capsys, "select", path)
    assert (ran.code, ran.err) == (3, "error: cannot read or write: No space left on device\n")
    raising(SystemExit(0))
    assert run(capsys, "select", path).code == 3
    raising(BrokenPipeError())
    assert run(capsys, "select", path, "--", "--json").code == 0


def test_a_reader_that_has_enough_ends_it_quietly(tmp_path: Path) -> None:
    """`gristmill rows … | head -1` is how people look at rows."""
    for number in range(300):
        good_story(tmp_path / f"{number}", f"r{number}")
    with subprocess.Popen([*PROGRAM, "rows", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


def test_signs_of_an_ascii_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An ASCII terminal must show the table, not a crash."""
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["select", str(good_story(tmp_path))]) == 0
    written = stream.buffer.getvalue().decode()
    assert "\n*  c2" in written
    assert "tokens -> usable" in written


def test_a_full_disk_behind_standard_output(tmp_path: Path) -> None:
    """Data that could not be written must not end with exit code 0."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    path = str(good_story(tmp_path))
    for more in ([], ["--json"]):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                [*PROGRAM, "select", path, *more], stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
        assert done.returncode == 3
        assert "error: cannot read or write: No space left on device\n" in done.stderr
        assert "Traceback" not in done.stderr


# ---- what reaches a terminal -------------------------------------------------------------------------------


def nasty_story(folder: Path) -> Path:
    """A refused story with everything in it that a terminal might act on."""
    calls = [
        {**line, "rollout_id": NASTY, "model": NASTY, "output_items": [{"role": "assistant", "content": text}]}
        for line, text in zip(story(), (NASTY + "\ud800", "aside", f"{NASTY} {TWO_TURNS[1]}"), strict=True)
    ]
    return write_story(folder, calls, returned(NASTY + "\ud800", f"{NASTY} {TWO_TURNS[1]}!"))


def terminal_output(arguments: list[str], **environment: str) -> str:
    """Run on a real terminal and return what it was sent."""
    leader, follower = pty.openpty()
    settings = {"TERM": "xterm-256color", "COLUMNS": "60", **environment}
    inherited = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    with subprocess.Popen(
        [*PROGRAM, *arguments], stdout=follower, stderr=follower, env={**inherited, **settings}
    ) as process:
        os.close(follower)
        sent = b""
        while True:
            try:
                piece = os.read(leader, 65536)
            except OSError:
                break
            if not piece:
                break
            sent += piece
        process.wait()
    os.close(leader)
    return sent.decode()


@pytest.mark.parametrize("command", ["select", "explain", "rows", "verify", "ls", "show", "drift"])
def test_no_control_character_of_a_model_reaches_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Model text could otherwise repaint the screen, or hide what it says."""
    path = nasty_story(tmp_path)
    ran = run(capsys, command, path)
    for text in (ran.out, ran.err):
        assert not re.search(r"[^\n -~¡-\U0010ffff]|[\u202a-\u202e\u2066-\u2069]", text), text
    assert run(capsys, command, path, "--json").out.isascii()
    if command in {"select", "explain", "ls", "show"}:
        assert "[bold]x[/bold] :smile:" in ran.out
        assert "\\x1b[31mred" in ran.out


def test_a_terminal_gets_colour_and_folded_lines_unless_it_declines(tmp_path: Path) -> None:
    """NO_COLOR is a promise; escape sequences of a model never come through either way."""
    path = str(good_story(tmp_path / "good"))
    coloured = terminal_output(["select", path])
    assert "\x1b[32m" in coloured
    assert all(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) <= 60 for line in coloured.split("\r\n")[:5])
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", terminal_output(["select", path], NO_COLOR="1"))
    assert "\x1b[31mred" not in terminal_output(["explain", str(nasty_story(tmp_path / "nasty"))])


def test_colour_can_be_forced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CI logs show colour where they can, and model text stays harmless there too."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32m" in run(capsys, "select", good_story(tmp_path / "good")).out
    assert "\x1b[31mred" not in run(capsys, "select", nasty_story(tmp_path / "nasty")).out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in run(capsys, "select", tmp_path / "good").out


def test_a_terminal_without_the_signs_gets_others(tmp_path: Path) -> None:
    """An ASCII terminal must show the table, not a crash."""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    path = str(good_story(tmp_path))
    done = subprocess.run([*PROGRAM, "select", path], capture_output=True, env=environment, check=True)
    assert b"\n*  c2" in done.stdout
    assert b"\n-  x1" in done.stdout
    assert b"tokens -> usable" in done.stdout


def test_visible_text() -> None:
    """Escapes must show what was there, and leave everything else alone."""
    assert visible("plain · ünï 木 🙂") == "plain · ünï 木 🙂"
    assert visible("a\u00a0b\n") == "a\u00a0b\\n"
    assert visible(NASTY).startswith(
        "\\x1b[31mred\\x1b[0m \\x9b2J \\u202eevil\\u2066 [bold]x[/bold] :smile: \\r\\n\\x07"
    )
    assert visible("\U000e0041\ud800") == "\\U000e0041\\ud800"


def test_json_text_of_everything() -> None:
    """Evidence holds whatever harnesses return: numbers as text, lone surrogates, deep nesting."""
    deep: object = 1
    for _ in range(5000):
        deep = [deep]
    assert json_text({"a": JsonNumber("1e999999999")}) == '{"a":1e999999999}'
    assert json_text("\ud800\u202e") == '"\\ud800\\u202e"'
    assert json_text(deep).startswith("[[[[")


def test_a_document_is_whole_or_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Half a document would break whoever parses it."""
    with Document("list") as document:
        document.add({"a": 1})
        document.add("x" * (20 * 1024 * 1024))
        assert capsys.readouterr().out == ""
        document.finish({"end": True})
    written = json.loads(capsys.readouterr().out)
    assert (written["list"][0], written["end"]) == ({"a": 1}, True)


def test_suggestions() -> None:
    """A list of a thousand ids is no suggestion."""
    assert did_you_mean("c2", ["c1", "c22"]) == "Did you mean 'c22'?"
    assert did_you_mean("zzz", [f"c{number}" for number in range(10)]).endswith("c7 and 2 more.")
    assert did_you_mean("zzz", []) == ""


def test_standard_output_that_is_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program that calls main() with its own streams must not be broken by a closed pipe."""

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    for _ in range(2):
        monkeypatch.setattr(sys, "stdout", Gone())
        assert main(["select", str(refused_story(tmp_path))]) == 0
        assert sys.stdout is None


def test_an_output_that_fails_is_told_on_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error that could not be written as JSON must still be seen."""

    class Failing(io.TextIOWrapper):
        error: OSError = OSError(28, "No space left on device")

        def write(self, text: str) -> int:
            raise self.error

    path = refused_story(tmp_path / "s")
    for error, code, told in (
        (Failing.error, 3, "error: cannot read or write: No space left on device\n"),
        (BrokenPipeError(), 0, ""),
    ):
        with (tmp_path / "out").open("wb") as file:
            failing = Failing(file, "utf-8")
            failing.error = error
            monkeypatch.setattr(sys, "stdout", failing)
            assert main(["select", str(path)]) == code
            assert capsys.readouterr().err == told
            assert main(["select", "nowhere", "--json"]) == (3 if code else 0)
            assert ("error: cannot read nowhere" in capsys.readouterr().err) is bool(code)
            monkeypatch.undo()


# ---- policies of one's own ---------------------------------------------------------------------------------

POLICY = '''
import copy

print("loading is noisy")

def last(records, result):
    """Written against NeMo's records and signature: reads what theirs have, returns theirs."""
    print("so is running")
    done = [record for record in records if record.response_status == "completed"]
    kept = [record for record in done if record.output_items[0].fingerprint]
    return kept[-1:], kept[-1].response_id

def duplicates(records, result):
    return [records[0], records[0]], records[0].response_id

def copies(records, result):
    return [copy.copy(records[0])], records[0].response_id

class Mine:
    model_call_id = response_id = "theirs"

def foreign(records, result):
    return [Mine()], "theirs"

async def coroutine(records, result):
    return list(records), None

def refuses(records, result):
    raise ValueError("not today")

def crashes(records, result):
    raise RuntimeError("a bug of theirs")

class Counting:
    def __init__(self, keep="1"):
        self.keep = int(keep)

    def __call__(self, records, result):
        return records[: self.keep], records[self.keep - 1].response_id
'''


@pytest.fixture
def policy_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with a policy module and a story in it."""
    (tmp_path / "my_policies.py").write_text(POLICY)
    good_story(tmp_path / "s")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
    monkeypatch.delitem(sys.modules, "my_policies", raising=False)
    return tmp_path


def test_a_policy_in_the_current_directory(policy_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """People bring their own policy; what it prints must not spoil the data."""
    ran = run(capsys, "select", "s", "--policy", "my_policies:last", "--json")
    assert ran.code == 0
    assert ran.json["rollouts"][0]["calls"] == ["c2"]
    assert ran.json["rollouts"][0]["policy"] == "my_policies:last"
    assert ran.err == "loading is noisy\nso is running\n"
    codes = [verdict["code"] for verdict in ran.json["rollouts"][0]["verdicts"]]
    assert codes == ["policy_excluded", "policy_excluded", "captured"] or "captured" in codes


def test_options_of_ones_own_policy(policy_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--set` must reach it."""
    ran = run(capsys, "select", "s", "--policy", "my_policies:Counting", "--set", "keep=2", "--json")
    assert ran.json["rollouts"][0]["calls"] == ["c1", "x1"]
    assert run(capsys, "select", "s", "--policy", "my_policies:Counting", "--set", "nope=2").code == 2


@pytest.mark.parametrize("name", ["duplicates", "copies", "foreign", "coroutine"])
def test_a_policy_that_breaks_its_contract_is_refused(
    policy_folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Rows of records that were never captured would be trained otherwise."""
    ran = run(capsys, "select", "s", "--policy", f"my_policies:{name}", "--json")
    assert ran.code == 1
    assert ran.json["rollouts"][0]["code"] == "policy_broke_contract"


def test_a_policy_that_refuses_or_crashes(policy_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A refusal is data; a crash says whose bug it is."""
    ran = run(capsys, "select", "s", "--policy", "my_policies:refuses", "--json")
    assert (ran.code, ran.json["rollouts"][0]["code"]) == (1, "policy_refused")
    ran = run(capsys, "select", "s", "--policy", "my_policies:crashes", "--json")
    assert (ran.code, ran.json["error"]["code"]) == (1, "policy_broke_contract")
    assert "a bug of theirs" in ran.json["error"]["message"]
