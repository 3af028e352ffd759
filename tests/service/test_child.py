from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill.errors import ConfigError
from gristmill.ledger import AttemptKey
from gristmill.service.child import Ended, _Forward, check_program, child_environment, clean_environment, run_child
from gristmill.service.harnesses import Setup

KEY = AttemptKey("r1", 2)
URL = "http://127.0.0.1:8600"


def test_no_secret_reaches_the_child() -> None:
    """The agent under test reads its environment; a key in it is a key that it has."""
    environment = {
        "PATH": "/bin",
        "GRISTMILL_UPSTREAM_KEY": "sk-upstream-1",
        "GRISTMILL_ADMIN_KEY_FILE": "/secret/path",
        "MY_ENGINE_KEY": "sk-engine-1",
        "WRAPPED": "Bearer sk-engine-1",
        "SHORT": "abc",
        "CONTAINS_SHORT": "xabcx",
        "OTHER": "gma_admin-key",
    }
    secrets = ["sk-engine-1", "sk-upstream-1", "gma_admin-key", "abc", ""]
    assert clean_environment(environment, secrets) == {"PATH": "/bin", "CONTAINS_SHORT": "xabcx"}
    setup = Setup(variables={"OPENAI_API_KEY": "gm_x"}, removed=("PATH",))
    assert child_environment(environment, secrets, setup, KEY, URL) == {
        "CONTAINS_SHORT": "xabcx",
        "OPENAI_API_KEY": "gm_x",
        "GRISTMILL_ROLLOUT_ID": "r1",
        "GRISTMILL_ATTEMPT": "2",
    }


def test_what_sends_calls_elsewhere_is_taken_away() -> None:
    """A harness that talks to its vendor is not captured, and says nothing of it."""
    environment = {"CLAUDE_CODE_USE_BEDROCK": "1", "OPENAI_API_KEY": "real", "http_proxy": "http://proxy:1"}
    setup = Setup(variables={"OPENAI_API_KEY": "gm_x"}, removed=("CLAUDE_CODE_USE_BEDROCK",))
    child = child_environment(environment, [], setup, KEY, URL)
    assert "CLAUDE_CODE_USE_BEDROCK" not in child
    assert child["OPENAI_API_KEY"] == "gm_x"
    assert child["NO_PROXY"] == child["no_proxy"] == "127.0.0.1"
    with_more = child_environment({**environment, "NO_PROXY": "a.example"}, [], setup, KEY, URL)
    assert with_more["NO_PROXY"] == "a.example,127.0.0.1"


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    """A typing error must not open a rollout."""
    with pytest.raises(ConfigError) as caught:
        check_program(["no-such-program"], {"PATH": str(tmp_path)})
    assert "no-such-program" in caught.value.message
    check_program([sys.executable], {})
    broken = tmp_path / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    with pytest.raises(ConfigError):
        run_child([str(broken)], dict(os.environ))


@pytest.mark.parametrize(("code", "ended"), [("0", Ended(0)), ("7", Ended(7)), ("-9", Ended(137, 9))])
def test_the_exit_code_is_the_childs(code: str, ended: Ended) -> None:
    """Scripts around `run` decide by it, as they did without `run`."""
    source = f"import os, sys, signal; os.kill(os.getpid(), 9) if {code} < 0 else sys.exit({code})"
    assert run_child([sys.executable, "-c", source], dict(os.environ)) == ended


PARENT = """
import os, sys
from gristmill.service.child import run_child
source = '''
import signal, sys, time
caught = []
def on(number, frame):
    print("child", signal.Signals(number).name, flush=True)
    sys.exit(5 if number == signal.SIGTERM else 0) if number != signal.SIGHUP else None
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(number, on)
print("ready", flush=True)
while True: time.sleep(0.05)
'''
print(run_child([sys.executable, "-c", source], dict(os.environ)).exit_code, flush=True)
"""


@pytest.mark.e2e
def test_signals_go_on_to_the_child() -> None:
    """A scheduler that ends `run` means the harness; without it the harness runs on and is paid for."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert parent.stdout is not None
    with parent, parent.stdout as output:
        assert output.readline() == "ready\n"
        parent.send_signal(signal.SIGHUP)
        assert output.readline() == "child SIGHUP\n"
        parent.send_signal(signal.SIGTERM)
        assert output.readline() == "child SIGTERM\n"
        assert output.readline() == "5\n"
    assert parent.returncode == 0


def test_signals_of_this_process_go_on(capfd: pytest.CaptureFixture[str]) -> None:
    """The scheduler knows one process, and means the harness."""
    source = "import os, signal, time; signal.signal(signal.SIGHUP, lambda *_: os._exit(9)); "
    source += f"os.kill({os.getpid()}, signal.SIGHUP); time.sleep(30)"
    assert run_child([sys.executable, "-c", source], dict(os.environ)) == Ended(9)


def test_signals_before_the_child_is_there_are_kept() -> None:
    """A signal in the wrong millisecond must not be lost."""
    forward = _Forward()
    forward(signal.SIGTERM, None)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"]) as child:
        forward.to(child)
        assert child.wait(20) == -signal.SIGTERM


def test_handlers_are_put_back() -> None:
    """After the harness, Ctrl-C is the command's own again."""
    before = signal.getsignal(signal.SIGTERM)
    run_child([sys.executable, "-c", ""], dict(os.environ))
    assert signal.getsignal(signal.SIGTERM) is before


def test_output_can_go_to_standard_error(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With --json standard output is one document, whatever the harness prints."""
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    source = "print('said')"
    run_child([sys.executable, "-c", source], dict(os.environ), output_to_stderr=True)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "said\n")
    run_child([sys.executable, "-c", source], dict(os.environ))
    assert capfd.readouterr().out == "said\n"
