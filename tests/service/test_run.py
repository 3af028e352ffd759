from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import CaptureError, Code, ConfigError, LedgerError
from gristmill.gateway.config import GatewayConfig
from gristmill.ledger import AttemptState, SqliteLedger, SqliteReader
from gristmill.records import Attribution, Failure
from gristmill.scripted import ScriptedEngine
from gristmill.service.harnesses import HARNESSES
from gristmill.service.place import Begun, Place, begin, joined
from gristmill.service.run import Asked, Report, run_harness
from tests.corpus.policies import first_call
from tests.service.gateways import SCRIPT, Gateway, config_of, scripted_gateway

AGENT = [sys.executable, str(Path(__file__).with_name("agent.py"))]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    with scripted_gateway(tmp_path / "run.gristmill") as running:
        yield running


@pytest.fixture
def place(gateway: Gateway) -> Place:
    return joined(gateway.url, None, gateway.ledger)


def run_one(asked: Asked, place: Place, **opening: Any) -> Report:
    """Open a rollout and run a harness in it."""
    return run_harness(asked, Begun(place, place.client.open(**opening)))


def asked(out: Path, *more: str, **fields: Any) -> Asked:
    given = {"command": [*AGENT, str(out), *more], "harness": HARNESSES["openai"], **fields}
    return Asked(**given)


def stored(place: Place, report: Report) -> Any:
    assert place.ledger is not None
    with SqliteReader(place.ledger) as ledger:
        capture, result = ledger.read(report.key)
        summary = ledger.summary(report.key)
    assert result is not None
    return capture, result, summary


def test_a_harness_becomes_a_rollout(tmp_path: Path, place: Place) -> None:
    """The main job of `run`: command in, counted rollout out."""
    report = run_one(
        asked(
            tmp_path,
            result_file=tmp_path / "result.json",
            reward_command="test $HARNESS_EXIT_CODE = 0 && test $GRISTMILL_ROLLOUT_ID = task-1 && echo 0.5",
        ),
        place,
        rollout_id="task-1",
        group_id="g",
    )
    assert (report.rollout_id, report.attempt, report.exit_code, report.reward) == ("task-1", 0, 0, 0.5)
    assert (report.policy, report.outcome.outcome) == ("returned_history", "selected")
    assert report.outcome.funnel.trained_calls == 2
    assert report.history_sources == (str(tmp_path / "result.json"),)
    _, result, summary = stored(place, report)
    assert (result.reward, result.group_id) == (0.5, "g")
    assert dict(result.metadata) == {"harness": "openai", "exit_code": 0}
    assert summary.state is AttemptState.FINISHED
    again = run_one(asked(tmp_path), place, rollout_id="task-1")
    assert again.attempt == 1


@pytest.mark.parametrize(("attribution", "code"), [(Attribution.MASK, "failure_masked"), (Attribution.SCORE, None)])
def test_a_failure_counts_as_it_was_asked(
    tmp_path: Path, place: Place, attribution: Attribution, code: str | None
) -> None:
    """Only whoever runs the harness knows whether its exit code says something about the policy."""
    report = run_one(asked(tmp_path, "3", reward_command="echo 0", on_failure=attribution), place)
    assert report.outcome.code == code
    assert report.failure == Failure("the harness ended with exit code 3", attribution)
    assert stored(place, report)[1].failure == report.failure
    assert run_one(asked(tmp_path, on_failure=attribution), place).failure is None


def test_without_a_history_the_last_context_is_counted(tmp_path: Path, place: Place) -> None:
    """Any program can be run; what it does not hand back is not made up."""
    report = run_one(asked(tmp_path), place)
    assert report.policy == "final_context"
    assert report.outcome.outcome == "selected"
    assert report.history_missing is not None
    _, result, _ = stored(place, report)
    assert result.value is None
    assert result.metadata["history_missing"] == report.history_missing


def test_a_harness_that_fails_is_kept_with_its_code(tmp_path: Path, place: Place) -> None:
    """A crash is an outcome to count, not a rollout that never was."""
    report = run_one(asked(tmp_path, "3", reward_command="echo 1; exit 1"), place)
    assert report.exit_code == 3
    assert report.reward is None
    assert "code 1" in str(report.reward_error)
    _, result, _ = stored(place, report)
    assert result.reward is None
    assert result.metadata["exit_code"] == 3
    assert result.metadata["reward_error"] == report.reward_error


def test_a_history_that_cannot_be_read_is_none(tmp_path: Path, place: Place) -> None:
    """Half a file proves nothing."""
    command = [sys.executable, "-c", f"open({str(tmp_path / 'broken.json')!r}, 'w').write('{{')"]
    for name in ("broken.json", "none.json"):
        told = Asked(command=command, harness=HARNESSES["openai"], result_file=tmp_path / name)
        report = run_one(told, place)
        assert name in str(report.history_missing)
        assert report.policy == "final_context"


def test_files_of_an_earlier_run_are_none(tmp_path: Path, place: Place) -> None:
    """A harness that fails before it writes must not be given the last run's result and reward."""
    reward, result = tmp_path / "reward", tmp_path / "stale.json"
    reward.write_text("1")
    result.write_text('{"messages": [{"role": "assistant", "content": "Old."}]}')
    report = run_one(asked(tmp_path, reward_file=reward, result_file=result), place)
    assert report.reward is None
    assert str(reward) in str(report.reward_error)
    assert str(result) in str(report.history_missing)
    assert (report.policy, report.history_sources) == ("final_context", ())
    _, kept, _ = stored(place, report)
    assert (kept.value, kept.reward) == (None, None)
    command = [sys.executable, "-c", f"open({str(reward)!r}, 'w').write('1')"]
    again = run_one(Asked(command=command, harness=HARNESSES["openai"], reward_file=reward), place)
    assert (again.reward, again.reward_error) == (1.0, None)


@pytest.mark.parametrize(("text", "told"), [("[]", '{"messages"'), ('"done"', "an object"), ("null", "null")])
def test_a_result_file_of_another_form_is_no_history(tmp_path: Path, place: Place, text: str, told: str) -> None:
    """A bare list of messages is refused with the form that is wanted, and the rollout is kept."""
    file = tmp_path / "result.json"
    command = [sys.executable, "-c", f"open({str(file)!r}, 'w').write({text!r})"]
    report = run_one(Asked(command=command, harness=HARNESSES["openai"], result_file=file), place)
    assert told in str(report.history_missing)
    _, kept, _ = stored(place, report)
    assert kept.value is None


def test_the_agent_sees_its_own_key_alone(
    tmp_path: Path, gateway: Gateway, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the agent under test can read, it can use."""
    monkeypatch.setenv("GRISTMILL_UPSTREAM_KEY", "sk-upstream-0123456789")
    monkeypatch.setenv("LEAK", f"Bearer {gateway.admin_key}")
    monkeypatch.setenv("GRISTMILL_ADMIN_KEY_FILE", str(gateway.service.config.admin_key_path))
    opened = joined(gateway.url, None, gateway.ledger)
    report = run_one(asked(tmp_path), opened, rollout_id="sealed")
    text = (tmp_path / "environment.json").read_text()
    environment = json.loads(text)
    assert environment["GRISTMILL_ROLLOUT_ID"] == "sealed"
    assert environment["OPENAI_API_KEY"].startswith("gm_")
    assert {name for name in environment if name.startswith("GRISTMILL_")} == {
        "GRISTMILL_ROLLOUT_ID",
        "GRISTMILL_ATTEMPT",
    }
    for secret in (gateway.admin_key, "sk-upstream-0123456789", str(gateway.service.config.admin_key_path)):
        assert secret not in text
    key = environment["OPENAI_API_KEY"]
    assert gateway.chat(key).status == 401, "the key has to be worthless when the run has ended"
    assert report.exit_code == 0


def test_what_breaks_in_between_still_finishes(
    tmp_path: Path, gateway: Gateway, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open rollout that nobody finishes holds its group back for a day."""
    script = tmp_path / "gone"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    with pytest.raises(ConfigError) as caught:
        run_one(Asked(command=[str(script)], harness=HARNESSES["openai"]), place, rollout_id="broken")
    assert "gone" in caught.value.message
    shown = gateway.admin("GET", "/rollouts/broken/0").json
    assert (shown["state"], shown["has_result"], shown["reward"]) == ("finished", True, None)


def test_a_policy_of_ones_own_runs_here(tmp_path: Path, place: Place) -> None:
    """The command line is where code may be named; the gateway is never asked to run it."""
    report = run_one(asked(tmp_path, own_policy=first_call, result_file=tmp_path / "result.json"), place)
    assert report.outcome.policy == "tests.corpus.policies:first_call"
    assert report.outcome.funnel.selected_calls == 1


def test_a_gateway_is_started_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One command has to be enough to try it out."""
    ledger = tmp_path / "run.gristmill"
    monkeypatch.setenv("ENGINE_KEY", "sk-engine-0123456789")
    with ScriptedEngine(SCRIPT).serve() as engine:

        def settings(**more: Any) -> GatewayConfig:
            upstreams = [{"url": engine, "key_env": "ENGINE_KEY"}]
            config = config_of(engine, ledger, host="0.0.0.0", public_url="https://elsewhere.example", **more)
            import msgspec

            from gristmill.gateway.config import EngineSetting

            return msgspec.structs.replace(config, upstreams=tuple(EngineSetting(**each) for each in upstreams))

        with begin(settings, {}) as begun:
            assert begun.place.own
            report = run_harness(asked(tmp_path), begun)
            environment = json.loads((tmp_path / "environment.json").read_text())
    assert report.outcome.outcome == "selected"
    assert report.gateway.startswith("http://127.0.0.1:")
    assert environment["OPENAI_BASE_URL"] == f"{report.gateway}/v1"
    assert "sk-engine-0123456789" not in environment.values()
    with SqliteReader(ledger) as store:
        assert store.counts().attempts == {AttemptState.FINISHED: 1}


def test_a_ledger_in_use_is_joined(tmp_path: Path, gateway: Gateway) -> None:
    """Ten runs at once on one ledger share one gateway."""

    def settings(**more: Any) -> GatewayConfig:
        if "upstreams" not in more:
            return config_of("http://127.0.0.1:1", gateway.ledger)
        return config_of("http://127.0.0.1:2", gateway.ledger)

    def without_engine(**more: Any) -> GatewayConfig:
        if "upstreams" not in more:
            raise ConfigError("expected at least one engine", where="upstreams")
        return config_of("http://127.0.0.1:2", gateway.ledger)

    for read in (settings, without_engine):
        with begin(read, {}) as begun:
            assert not begun.place.own
            assert begun.place.client.base_url == gateway.url
            assert run_harness(asked(tmp_path), begun).outcome.outcome == "selected"


def test_a_policy_of_ones_own_needs_the_ledger(tmp_path: Path, gateway: Gateway) -> None:
    """Code runs here and not there, so what it runs over has to be here."""

    def settings(**more: Any) -> GatewayConfig:
        key_file = gateway.service.config.admin_key_path
        return config_of("http://127.0.0.1:2", tmp_path / "elsewhere", admin_key_file=key_file)

    opened = begin(settings, {}, gateway=gateway.url, needs_ledger=True)
    with pytest.raises(ConfigError) as caught, opened:
        pass
    assert caught.value.code == Code.POLICY_OPTION_INVALID
    assert gateway.admin("GET", "/rollouts").json["rollouts"] == []


def test_a_lock_file_that_lies_is_no_gateway(tmp_path: Path) -> None:
    """A gateway that was killed leaves its address behind."""
    (tmp_path / "run.gristmill.lock").write_text(
        json.dumps({"pid": 1, "host": "h", "instance": "i", "started": 0.0, "address": "http://127.0.0.1:1"})
    )
    key = tmp_path / "run.gristmill.admin-key"
    key.write_text("gma_" + "k" * 43)
    key.chmod(0o600)

    def without_engine(**more: Any) -> GatewayConfig:
        if "upstreams" not in more:
            raise ConfigError("expected at least one engine", where="upstreams")
        return config_of("http://127.0.0.1:2", tmp_path / "run.gristmill")

    with pytest.raises(ConfigError) as caught, begin(without_engine, {}):
        pass
    assert caught.value.where == "upstreams"


def test_a_gateway_stays_for_those_who_joined(tmp_path: Path) -> None:
    """The run that started the gateway must not take it from under the others."""
    ledger = tmp_path / "run.gristmill"
    told: list[int] = []
    with ScriptedEngine(SCRIPT).serve() as engine:

        def settings(**more: Any) -> GatewayConfig:
            return config_of(engine, ledger)

        def finish_other(others: int) -> None:
            told.append(others)
            other.finish(opened.attempt_key, None, None, policy="final_context")

        with begin(settings, {}, waiting=finish_other) as begun:
            other = joined(begun.place.client.base_url, None, ledger).client
            opened = other.open(rollout_id="other")
            run_harness(asked(tmp_path), begun)
    assert told == [1]


def test_a_gateway_that_is_not_there_is_said_to_be(tmp_path: Path) -> None:
    """A wrong address must not look like a fault of the harness."""
    key = tmp_path / "key"
    key.write_text("gma_" + "k" * 43)
    key.chmod(0o600)
    place = joined("http://127.0.0.1:1", key)
    with pytest.raises(CaptureError) as caught:
        place.client.open()
    assert "127.0.0.1:1" in caught.value.message
    for address in ("127.0.0.1:1", "ftp://x", "http://", "http://x?y"):
        with pytest.raises(ConfigError):
            joined(address, key)
    with pytest.raises(ConfigError) as without:
        joined("http://127.0.0.1:1", None)
    assert without.value.where == "--admin-key-file"
    assert "GRISTMILL_ADMIN_KEY_FILE" not in os.environ


def test_a_ledger_that_somebody_writes_to_is_refused_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import that has the ledger is no gateway to join."""
    monkeypatch.setattr("gristmill.service.place._STARTS_s", 0.3)
    with SqliteLedger(tmp_path / "run.gristmill"):
        opened = begin(lambda **more: config_of("http://127.0.0.1:1", tmp_path / "run.gristmill", **more), {})
        with pytest.raises(LedgerError) as caught, opened:
            pass
    assert caught.value.code == Code.LEDGER_LOCKED


def test_runs_that_start_together_share_one_gateway(tmp_path: Path) -> None:
    """A shell loop with `&` starts them in the same moment."""
    ledger = tmp_path / "run.gristmill"
    reports: list[Report] = []
    with ScriptedEngine(SCRIPT).serve() as engine:

        def one(number: int) -> None:
            out = tmp_path / str(number)
            out.mkdir()
            opening = {"rollout_id": f"r{number}"}
            with begin(lambda **more: config_of(engine, ledger, **more), opening) as begun:
                reports.append(run_harness(asked(out), begun))

        # Signals are the main thread's: here the harnesses are started from others.
        with (
            pytest.MonkeyPatch.context() as patch,
            ThreadPoolExecutor(5) as pool,
        ):
            patch.setattr("gristmill.service.child._FORWARDED", ())
            list(pool.map(one, range(5)))
    assert {report.outcome.outcome for report in reports} == {"selected"}
    with SqliteReader(ledger) as store:
        assert store.counts().attempts == {AttemptState.FINISHED: 5}
