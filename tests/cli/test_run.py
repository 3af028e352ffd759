from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill.cli import main
from gristmill.cli.run import _NAMES
from gristmill.ledger import AttemptKey, SqliteReader
from gristmill.scripted import ScriptedEngine
from gristmill.service.harnesses import HARNESSES
from tests.cli.stories import Ran
from tests.service.gateways import SCRIPT, scripted_gateway

AGENT = [sys.executable, str(Path(__file__).parents[1] / "service" / "agent.py")]


@pytest.fixture
def engine() -> Iterator[str]:
    with ScriptedEngine(SCRIPT).serve() as url:
        yield url


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is nearly full is not what these tests are about."""
    monkeypatch.setenv("GRISTMILL_MIN_FREE_BYTES", "0")


def run(capfd: pytest.CaptureFixture[str], *arguments: Any) -> Ran:
    """Run the command line in this process, with the output of its children."""
    capfd.readouterr()
    code = main([str(argument) for argument in arguments])
    return Ran(code, *capfd.readouterr())


def test_a_harness_is_one_command(tmp_path: Path, engine: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The first command of a new user: a harness in, a counted rollout out, and the next command."""
    ledger = tmp_path / "run.gristmill"
    result = ["--result-file", tmp_path / "result.json", "--reward-command", "echo 1"]
    ran = run(capfd, "run", "--ledger", ledger, "--upstream", engine, *result, "--", *AGENT, tmp_path)
    assert ran.code == 0
    assert ran.out == "agent: done\n", "standard output is the harness's"
    with SqliteReader(ledger) as store:
        [summary] = store.summaries()
    rollout_id = summary.key.rollout_id
    assert f"rollout: {rollout_id}  attempt 0  returned_history  selected" in ran.err
    assert "captured 2 calls" in ran.err
    assert "reward: 1" in ran.err
    next_command = ["rows", str(ledger), "--rollout", rollout_id, "--policy", "returned_history", "--out"]
    assert f"next: gristmill {' '.join(next_command)} rows" in ran.err
    rows = run(capfd, *next_command, tmp_path / "rows")
    assert rows.code == 0
    assert run(capfd, "verify", ledger, tmp_path / "rows").code == 0


def test_a_failing_harness_counts_as_it_is_asked(
    tmp_path: Path, engine: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A sandbox that dies must not teach the agent that its work was worth nothing."""
    options = ["--ledger", tmp_path / "run.gristmill", "--upstream", engine, "--rollout-id", "r"]
    ran = run(capfd, "run", *options, "--on-failure", "mask", "--reward-command", "echo 0", "--", *AGENT, tmp_path, "4")
    assert ran.code == 4
    assert "failure: mask: the harness ended with exit code 4" in ran.err
    assert "rejected: failure_masked" in ran.err
    assert run(capfd, "groups", tmp_path / "run.gristmill", "--json").json["totals"]["ungrouped"] == 1


def test_json_is_one_document(tmp_path: Path, engine: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A script reads standard output; what the harness prints must not be in it."""
    ledger = tmp_path / "run.gristmill"
    options = ["--ledger", ledger, "--upstream", engine, "--rollout-id", "r", "--group", "g", "--json"]
    ran = run(capfd, "run", *options, "--reward-file", tmp_path / "none", "--", *AGENT, tmp_path, "4")
    assert ran.code == 4
    assert "agent: done\n" in ran.err
    assert set(ran.json) == {
        "rollout_id",
        "attempt",
        "gateway",
        "ledger",
        "harness",
        "exit_code",
        "signal",
        "reward",
        "reward_error",
        "failure",
        "history_sources",
        "history_missing",
        "aborted",
        "unusable",
        "policy",
        "outcome",
    }
    assert ran.json["rollout_id"] == "r"
    assert (ran.json["exit_code"], ran.json["reward"], ran.json["policy"]) == (4, None, "final_context")
    assert "none" in ran.json["reward_error"]
    assert ran.json["outcome"]["funnel"]["selected_calls"] == 2


def test_trouble_is_told_and_the_exit_code_is_the_harnesses(
    tmp_path: Path, engine: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """What went wrong has to be on the screen when the harness has scrolled by."""
    ledger = tmp_path / "run.gristmill"
    wrong = '{"messages": [{"role": "assistant", "content": "Never said."}]}'
    options = ["--result-file", tmp_path / "wrong.json", "--reward-command", "echo no"]
    harness = ["sh", "-c", f"printf %s '{wrong}' > '{tmp_path}/wrong.json'; exec \"$@\"", "sh", *AGENT, tmp_path, "3"]
    ran = run(capfd, "run", "--ledger", ledger, "--upstream", engine, *options, "--", *harness)
    assert ran.code == 3
    assert "rejected: match_missing" in ran.err
    assert "hint: Capture the call that authored it; " in ran.err
    assert "warning: no reward" in ran.err
    assert "exit code 3" in ran.err
    assert f"next: gristmill explain {ledger}" in ran.err


def test_a_gateway_can_be_joined_by_name_or_by_ledger(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Where a gateway runs already, a run needs no engine."""
    with scripted_gateway(tmp_path / "run.gristmill") as gateway:
        by_ledger = run(capfd, "run", "--ledger", gateway.ledger, "--json", "--", *AGENT, tmp_path)
        key_file = ["--admin-key-file", gateway.service.config.admin_key_path]
        elsewhere = ["--ledger", tmp_path / "not-here", *key_file]
        by_name = run(capfd, "run", "--gateway", gateway.url, *elsewhere, "--json", "--", *AGENT, tmp_path)
        for ran in (by_ledger, by_name):
            assert ran.code == 0, ran.err
            assert ran.json["gateway"] == gateway.url
            assert "joined the gateway" in ran.err
        assert by_ledger.json["ledger"] == str(gateway.ledger)
        assert by_name.json["ledger"] is None
        assert len(gateway.admin("GET", "/rollouts").json["rollouts"]) == 2


def test_what_a_rejection_needs_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Most agents drop reasoning; the option that takes it so is the whole remedy."""
    script = {"thinking": True, "rules": [{"reply": {"content": "Hi.", "reasoning": "Greet them."}}]}
    history = '{"messages": [{"role": "assistant", "content": "Hi."}]}'
    agent = f"""import json, os, urllib.request
body = json.dumps({{"model": "scripted", "messages": [{{"role": "user", "content": "hi"}}]}}).encode()
headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()
open({str(tmp_path / "result.json")!r}, "w").write({history!r})
"""
    options = ["--ledger", tmp_path / "l", "--result-file", tmp_path / "result.json"]
    with ScriptedEngine(script).serve() as engine:
        ran = run(capfd, "run", *options, "--upstream", engine, "--", sys.executable, "-c", agent)
    assert "rejected: match_missing" in ran.err
    assert "--set reasoning=optional" in ran.err


def test_calls_that_are_not_usable_are_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """An engine that is down makes a night of empty rollouts; the first one has to say so."""
    options = ["--ledger", tmp_path / "l", "--upstream", "http://127.0.0.1:1"]
    none = run(capfd, "run", *options, "--", "true")
    assert "warning: no call was captured: did the harness use the address and key it was given?" in none.err
    ran = run(capfd, "run", *options, "--json", "--", *AGENT, tmp_path)
    assert ran.json["outcome"]["funnel"]["usable_calls"] == 0
    [unusable] = ran.json["unusable"]
    assert (unusable["reason"], unusable["calls"]) == ("call_failed", 1)
    told = run(capfd, "run", *options, "--", *AGENT, tmp_path)
    assert "1 call, none usable: 1 × call_failed (" in told.err
    assert "engine_unreachable" in told.err


def test_a_rollouts_own_sampling_settings(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A temperature for one rollout, at a gateway that others use too."""
    with scripted_gateway(tmp_path / "run.gristmill") as gateway:
        options = ["--ledger", gateway.ledger, "--override", "temperature=0.25", "--override", "top_k=3"]
        idle = ["--upstream", "http://127.0.0.1:1", "--model", "other"]
        ran = run(capfd, "run", *options, *idle, "--rollout-id", "r", "--", *AGENT, tmp_path)
        assert ran.code == 0, ran.err
        assert f"note: joined the gateway at {gateway.url}; its own engines and models are used, " in ran.err
        assert "--upstream and --model not" in ran.err
    with SqliteReader(gateway.ledger) as store:
        setup = store.setup(AttemptKey("r"))
        capture, _ = store.read(AttemptKey("r"))
    assert setup is not None
    assert setup.overrides == {"temperature": 0.25, "top_k": 3}
    assert capture.records[0].sampling.temperature == 0.25


def test_an_address_of_something_else(tmp_path: Path, engine: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The engine's address is the likeliest to be given for the gateway's."""
    key = tmp_path / "key"
    key.write_text("gma_" + "k" * 43)
    key.chmod(0o600)
    ran = run(capfd, "run", "--gateway", engine, "--admin-key-file", key, "--", "true")
    assert ran.code == 2
    assert f"no gateway of ours answers at {engine}" in ran.err


def test_a_model_name_is_the_harnesses(tmp_path: Path, engine: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A harness that wants its own name gets it; the gateway knows what is meant."""
    show = [sys.executable, "-c", "import os; print(os.environ['ANTHROPIC_MODEL'])"]
    for models, told in (
        (["--model", "claude-x=scripted"], "claude-x"),
        (["--model", "*"], "scripted"),
        ([], "scripted"),
    ):
        options = ["--ledger", tmp_path / "run.gristmill", "--upstream", engine, "--for", "claude-code", *models]
        assert run(capfd, "run", *options, "--", *show).out == f"{told}\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--", "no-such-program"], "no-such-program"),
        (["--reward-file", "a", "--reward-command", "b", "--", "true"], "--reward-file"),
        (["--policy", "nonesuch", "--", "true"], "nonesuch"),
        (["--rollout-id", "../x", "--", "true"], "rollout id"),
        (["--override", "top_q=1", "--", "true"], "top_q"),
        (["--override", "x", "--", "true"], "--override"),
        (["--for", "emacs", "--", "true"], "emacs"),
        ([], "COMMAND"),
    ],
)
def test_mistakes_open_no_rollout(
    tmp_path: Path, engine: str, capfd: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    """A typing error must not leave an open rollout behind."""
    ledger = tmp_path / "run.gristmill"
    ran = run(capfd, "run", "--ledger", ledger, "--upstream", engine, *arguments)
    assert ran.code == 2, ran.err
    assert told in ran.err
    if ledger.exists():
        with SqliteReader(ledger) as store:
            assert list(store.attempts()) == []


def test_options_of_the_harness_are_the_harnesses(
    tmp_path: Path, engine: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """`--json` behind the harness's name is not ours."""
    show = [sys.executable, "-c", "import sys; print(sys.argv[1:])", "--json", "--policy", "x"]
    ran = run(capfd, "run", "--ledger", tmp_path / "l", "--upstream", engine, *show)
    assert ran.out == "['--json', '--policy', 'x']\n"


def test_names_of_harnesses() -> None:
    """The list in the help is the list of what there is."""
    assert set(_NAMES) == set(HARNESSES)


def test_a_policy_in_the_working_directory(
    tmp_path: Path, engine: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy that one is writing lies where one works."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_run_policy.py").write_text(
        "def last(records, result):\n    return records[-1:], records[-1].response_id\n"
    )
    options = ["--ledger", "run.gristmill", "--upstream", engine, "--policy", "my_run_policy:last", "--json"]
    ran = run(capfd, "run", *options, "--", *AGENT, tmp_path)
    assert ran.json["outcome"]["policy"] == "my_run_policy:last"
    assert ran.json["outcome"]["funnel"]["selected_calls"] == 1
