from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill.export.row_json import decode_row
from gristmill.ledger import AttemptKey, AttemptState, SqliteReader
from gristmill.records import Attribution, Failure, PurposeLabel
from tests.service.gateways import Answer, Gateway, scripted_gateway, two_turns, user, wait_until


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with scripted_gateway(tmp_path_factory.mktemp("gateway") / "run.gristmill") as running:
        yield running


def below(minted: dict[str, object], act: str = "") -> str:
    return f"/rollouts/{minted['rollout_id']}/{minted['attempt']}{act}"


def key_of(minted: dict[str, object]) -> AttemptKey:
    return AttemptKey(str(minted["rollout_id"]), int(str(minted["attempt"])))


def test_a_rollout_from_key_to_rows(gateway: Gateway) -> None:
    """The main job: a key, an agent that uses it, a result, rows."""
    minted = gateway.mint(rollout_id="first", group_id="g1", metadata={"task": 7})
    assert minted["rollout_id"] == "first"
    assert minted["attempt"] == 0
    assert minted["openai_base_url"] == f"{gateway.url}/v1"
    assert minted["prefix_base_urls"] == {
        "openai": f"{gateway.url}/r/first/0/v1",
        "anthropic": f"{gateway.url}/r/first/0",
    }
    messages = two_turns(gateway, minted["key"])
    calls = gateway.admin("GET", below(minted, "/calls")).json["calls"]
    assert [call["finish_reason"] for call in calls] == ["tool_calls", "stop"]
    assert calls[1]["parent_call_id"] == calls[0]["model_call_id"]
    finished = gateway.admin(
        "POST", below(minted, "/finish"), {"result": {"messages": messages}, "reward": 0.5, "metadata": {"exit": 0}}
    )
    assert finished.status == 200
    told = finished.json
    assert (told["state"], told["outcome"], told["policy"]) == ("finished", "selected", "returned_history")
    assert told["funnel"]["trained_calls"] == 2
    rows = gateway.admin("GET", below(minted, "/rows"))
    assert rows.headers["content-type"] == "application/x-ndjson"
    read = [decode_row(line, "row") for line in rows.body.splitlines()]
    assert sum(int(row.loss_mask.sum()) for row in read) == told["funnel"]["trained_tokens"]
    assert {row.reward for row in read} == {0.5}
    assert {row.group_id for row in read} == {"g1"}
    verdicts = gateway.admin("GET", below(minted, "/verdicts?policy=all_captured")).json
    assert verdicts["policy"] == "all_captured"
    with SqliteReader(gateway.ledger) as ledger:
        capture, result = ledger.read(key_of(minted))
    assert result is not None
    assert dict(result.metadata) == {"task": 7, "exit": 0}
    assert [record.purpose.label for record in capture.records] == [PurposeLabel.AGENT] * 2


def test_attempts_are_numbered_and_listed(gateway: Gateway) -> None:
    """A restarted rollout is the next attempt; nobody has to count."""
    minted = [gateway.mint(rollout_id="again", group_id="listed") for _ in range(3)]
    assert [each["attempt"] for each in minted] == [0, 1, 2]
    assert gateway.mint(rollout_id="again", attempt=7, group_id="listed")["attempt"] == 7
    taken = gateway.admin("POST", "/rollouts", {"rollout_id": "again", "attempt": 1})
    assert (taken.status, taken.error) == (409, "key_exists")
    page = gateway.admin("GET", "/rollouts?group=listed&limit=3").json
    assert [each["attempt"] for each in page["rollouts"]] == [0, 1, 2]
    rest = gateway.admin("GET", f"/rollouts?group=listed&after={page['after']}").json
    assert [each["attempt"] for each in rest["rollouts"]] == [7]
    assert rest["after"] is None
    assert gateway.admin("GET", "/rollouts?group=listed&state=finished").json["rollouts"] == []
    shown = gateway.admin("GET", "/rollouts/again/7").json
    assert (shown["state"], shown["in_flight"], shown["group_id"]) == ("open", 0, "listed")


def test_random_ids_do_not_meet(gateway: Gateway) -> None:
    """Two programs that name nothing must not share a rollout or a key."""
    one, other = gateway.mint(), gateway.mint()
    assert one["rollout_id"] != other["rollout_id"]
    assert one["key"] != other["key"]
    assert one["key"].startswith("gm_")


def test_the_same_result_again_changes_nothing(gateway: Gateway) -> None:
    """A trainer that retries `finish` after a broken connection must get the same answer, and never overwrite."""
    minted = gateway.mint()
    asked = {"result": {"messages": two_turns(gateway, minted["key"])}, "reward": 1}
    first = gateway.admin("POST", below(minted, "/finish"), asked)
    second = gateway.admin("POST", below(minted, "/finish"), asked)
    assert first.json == second.json
    other = gateway.admin("POST", below(minted, "/finish"), {**asked, "reward": 0})
    assert (other.status, other.error) == (409, "attempt_differs")


def test_numbers_of_a_result_stay_as_they_were_written(gateway: Gateway) -> None:
    """A tool argument that a float would change no longer matches what the model said."""
    minted = gateway.mint()
    text = b'{"result": {"messages": [], "seen": [9007199254740993, 1.10, 1e400]}, "reward": 1e0}'
    assert gateway.admin("POST", below(minted, "/finish"), data=text).status == 200
    with SqliteReader(gateway.ledger) as ledger:
        _, result = ledger.read(key_of(minted))
    from gristmill.captures.exact import dumps

    assert result is not None
    assert dumps(result.value) == b'{"messages":[],"seen":[9007199254740993,1.10,1e400]}'
    assert result.reward == 1.0


def test_credit_is_stored_with_the_result(gateway: Gateway) -> None:
    """Whoever scores single calls names them by the header that every reply carries."""
    minted = gateway.mint()
    answer = gateway.chat(minted["key"])
    call_id = answer.headers["x-gristmill-call-id"]
    asked = {
        "policy": "final_context",
        "reward": 1,
        "advantage": 0.5,
        "credits": [{"model_call_id": call_id, "reward": 2}],
        "failure": {"reason": "slow", "attribution": "score"},
    }
    assert gateway.admin("POST", below(minted, "/finish"), asked).json["outcome"] == "selected"
    [row] = [
        json.loads(line) for line in gateway.admin("GET", below(minted, "/rows?policy=final_context")).body.splitlines()
    ]
    [credit] = row["credits"]
    assert (credit["call_id"], credit["reward"], credit["start"]) == (call_id, 2.0, row["prompt_len"])
    with SqliteReader(gateway.ledger) as ledger:
        _, result = ledger.read(key_of(minted))
    assert result is not None
    assert (result.advantage, result.failure) == (0.5, Failure("slow", Attribution.SCORE))


@pytest.mark.parametrize(
    ("asked", "where"),
    [
        ({"credits": [{"model_call_id": "c", "reward": "1"}]}, "$.credits[0].reward"),
        ({"credits": [{"model_call_id": "c", "reward": 1, "tokens": 1}]}, "$.credits[0].tokens"),
        ({"failure": {"reason": "x", "attribution": "perhaps"}}, "$.failure.attribution"),
        ({"advantage": []}, "$.advantage"),
    ],
)
def test_credit_that_is_none_is_refused_first(gateway: Gateway, asked: object, where: str) -> None:
    """A rollout that was stored with half of its credit could not be finished again."""
    minted = gateway.mint()
    refused = gateway.admin("POST", below(minted, "/finish"), asked)
    assert (refused.status, refused.error, refused.json["error"]["where"]) == (400, "request_malformed", where)
    assert gateway.admin("GET", below(minted)).json["state"] == "open"


def test_a_rejected_rollout_is_an_answer(gateway: Gateway) -> None:
    """A rollout that cannot be trained is finished all the same, and says why."""
    minted = gateway.mint()
    two_turns(gateway, minted["key"])
    strange = {"messages": [user("x"), {"role": "assistant", "content": "Never said."}]}
    told = gateway.admin("POST", below(minted, "/finish"), {"result": strange}).json
    assert (told["state"], told["outcome"], told["code"]) == ("finished", "rejected", "match_missing")
    assert told["funnel"]["captured_calls"] == 2
    rows = gateway.admin("GET", below(minted, "/rows"))
    assert (rows.status, rows.error) == (422, "match_missing")
    assert gateway.admin("GET", below(minted, "/verdicts")).json["outcome"] == "rejected"


@pytest.mark.parametrize("result", [[], "done", 1, False, [{"role": "assistant", "content": "Hello."}]])
def test_a_result_that_is_no_object_is_refused_first(gateway: Gateway, result: object) -> None:
    """A bare list of messages is the likeliest mistake; once it is stored, the rollout is lost."""
    minted = gateway.mint()
    refused = gateway.admin("POST", below(minted, "/finish"), {"result": result})
    assert (refused.status, refused.error) == (400, "option_invalid")
    error = refused.json["error"]
    assert error["where"] == "$.result"
    for form in ('{"messages": […]}', '{"response": …}', '{"responses": […]}'):
        assert form in error["hint"]
    assert gateway.admin("GET", below(minted)).json["state"] == "open"
    assert gateway.chat(minted["key"]).status == 200


def test_a_rollouts_attempts(gateway: Gateway) -> None:
    """Whoever knows the rollout alone finds its attempts, and how paths go on."""
    for _ in range(2):
        gateway.mint(rollout_id="twice")
    told = gateway.admin("GET", "/rollouts/twice").json
    assert [each["attempt"] for each in told["rollouts"]] == [0, 1]
    assert told["rollouts"][0] == gateway.admin("GET", "/rollouts/twice/0").json
    unknown = gateway.admin("GET", "/rollouts/nobody")
    assert (unknown.status, unknown.error) == (404, "rollout_unknown")
    for path in ("/rollouts/twice", "/rollouts/twice/finish"):
        refused = gateway.admin("POST", path, {})
        assert refused.error == "route_unknown"
        assert "/gristmill/v1/rollouts/ID/ATTEMPT/" in refused.json["error"]["hint"]
    assert gateway.admin("POST", "/nothing").json["error"]["hint"] is None


def test_finish_takes_no_more_calls(gateway: Gateway) -> None:
    """A call after the end would be a call that nobody rewarded."""
    minted = gateway.mint()
    assert gateway.chat(minted["key"]).status == 200
    gateway.admin("POST", below(minted, "/finish"), {"policy": "final_context"})
    late = gateway.chat(minted["key"])
    assert (late.status, late.error) == (409, "attempt_closed")


def _in_background(gateway: Gateway, key: str, answers: list[Answer]) -> threading.Thread:
    thread = threading.Thread(target=lambda: answers.append(gateway.chat(key, user("slow"))))
    thread.start()
    return thread


def test_finish_aborts_what_does_not_end(gateway: Gateway) -> None:
    """A harness that left a call running must not hold up its trainer, and the call stays in the books."""
    minted = gateway.mint()
    gateway.chat(minted["key"])
    answers: list[Answer] = []
    thread = _in_background(gateway, minted["key"], answers)
    wait_until(lambda: gateway.admin("GET", below(minted)).json["in_flight"] == 1, "the call is in flight")
    told = gateway.admin("POST", below(minted, "/finish"), {"drain_s": 0, "policy": "final_context"}).json
    thread.join()
    assert told["aborted"] == 1
    summary = gateway.admin("GET", below(minted)).json
    assert summary["state"] == "finished"
    assert summary["calls"] + summary["lost"] == 2


def test_a_result_that_is_refused_closes_nothing(gateway: Gateway) -> None:
    """After a typing error in `finish` the agent must still be able to go on."""
    minted = gateway.mint()
    for bad in ({"reward": "1"}, {"reward": True}, {"result": {}, "rewrad": 1}, {"drain_s": -1}, {"policy": "no"}):
        refused = gateway.admin("POST", below(minted, "/finish"), bad)
        assert refused.status == 400, bad
    assert gateway.chat(minted["key"]).status == 200


def test_freeze_returns_the_digest_again(gateway: Gateway) -> None:
    """The snapshot id is what `retire` asks for; it must not depend on when one asks."""
    minted = gateway.mint()
    gateway.chat(minted["key"])
    gateway.admin("POST", below(minted, "/finish"), {"policy": "final_context"})
    one = gateway.admin("POST", below(minted, "/freeze")).json
    assert one["snapshot_id"] == gateway.admin("POST", below(minted, "/freeze"), {}).json["snapshot_id"]
    assert len(one["snapshot_id"]) == 64
    gone = gateway.chat(minted["key"])
    assert (gone.status, gone.error) == (401, "key_unknown")
    after = gateway.admin("POST", below(minted, "/finish"), {"reward": 3})
    assert after.status == 409


def test_abandon_is_for_open_rollouts_only(gateway: Gateway) -> None:
    """An abandoned rollout says that nobody finished it; a finished one was."""
    minted = gateway.mint()
    gateway.chat(minted["key"])
    assert gateway.admin("POST", below(minted, "/abandon")).status == 200
    assert gateway.admin("GET", below(minted)).json["state"] == AttemptState.ABANDONED
    assert gateway.chat(minted["key"]).status == 401
    finished = gateway.mint()
    gateway.admin("POST", below(finished, "/finish"), {"policy": "final_context"})
    refused = gateway.admin("POST", below(finished, "/abandon"))
    assert (refused.status, refused.error) == (409, "attempt_closed")


def test_revoke_ends_the_key_and_nothing_else(gateway: Gateway) -> None:
    """A leaked key must be worthless at once, and the calls that were made must still earn their reward."""
    minted = gateway.mint()
    messages = two_turns(gateway, minted["key"])
    assert gateway.admin("POST", below(minted, "/revoke"), {"drain_s": 0}).json["aborted"] == 0
    assert gateway.chat(minted["key"]).status == 401
    told = gateway.admin("POST", below(minted, "/finish"), {"result": {"messages": messages}}).json
    assert told["outcome"] == "selected"
    assert gateway.admin("POST", below(minted, "/revoke")).status == 200


def test_overrides_reach_the_engine(gateway: Gateway) -> None:
    """A trainer that fixes the temperature must not depend on what the harness asks for."""
    minted = gateway.mint(overrides={"temperature": 0.25, "max_tokens": 3, "chat_template_kwargs": {"a": 1.5}})
    gateway.chat(minted["key"], temperature=1.0)
    with SqliteReader(gateway.ledger) as ledger:
        capture, _ = ledger.read(key_of(minted))
    assert capture.records[0].sampling.temperature == 0.25
    assert capture.records[0].finish_reason == "length"
    refused = gateway.admin("POST", "/rollouts", {"overrides": {"top_q": 1}})
    assert (refused.status, refused.json["error"]["where"]) == (400, "$.overrides.top_q")


def test_weights_and_engines(gateway: Gateway) -> None:
    """Which weights sampled a call is asked of the trainer where the engine does not tell."""
    engine = gateway.admin("GET", "/engines").json["engines"][0]["engine"]
    assert gateway.admin("POST", "/weights", {"version": "step-1", "upstream": engine}).status == 200
    minted = gateway.mint()
    gateway.chat(minted["key"])
    with SqliteReader(gateway.ledger) as ledger:
        capture, _ = ledger.read(key_of(minted))
    assert capture.records[0].weights_at_start == "step-1"
    unknown = gateway.admin("POST", "/weights", {"version": "2", "upstream": "elsewhere"})
    assert (unknown.status, unknown.error) == (400, "option_invalid")
    assert gateway.admin("POST", "/weights", {}).status == 400


def test_what_is_not_there_is_said_to_be(gateway: Gateway) -> None:
    """A mistyped id must not begin a rollout by finishing it."""
    for method, act in (
        ("GET", ""),
        ("GET", "/calls"),
        ("GET", "/verdicts"),
        ("GET", "/rows"),
        ("POST", "/finish"),
        ("POST", "/freeze"),
        ("POST", "/abandon"),
        ("POST", "/revoke"),
    ):
        answer = gateway.admin(method, f"/rollouts/nobody/0{act}", {} if method == "POST" else None)
        assert (answer.status, answer.error) == (404, "rollout_unknown"), act
    with SqliteReader(gateway.ledger) as ledger:
        assert ledger.rollout("nobody") == ()
    assert gateway.admin("GET", "/rollouts?after=nobody/0").status == 404


def test_bodies_are_read_strictly(gateway: Gateway) -> None:
    """A misspelt member that is ignored is a rollout in the wrong group."""
    for data, where in (
        (b'{"grup_id": "x"}', "$.grup_id"),
        (b'{"group_id": 1}', "$.group_id"),
        (b'{"group_id": ""}', "$.group_id"),
        (b'{"rollout_id": "a", "attempt": -1}', "$.attempt"),
        (b'{"rollout_id": "a", "attempt": 1.0}', "$.attempt"),
        (b'{"attempt": 1}', "$.attempt"),
        (b'{"metadata": []}', "$.metadata"),
        (b'{"metadata": {"a": 1, "a": 2}}', "$.metadata"),
        (b'{"group_id": "a", "group_id": "b"}', "$"),
        (b'{"group_id": "\\ud800"}', "$.group_id"),
        (b"[]", "$"),
        (b"{", "$"),
        (b"\xff", "$"),
    ):
        answer = gateway.admin("POST", "/rollouts", data=data)
        assert (answer.status, answer.json["error"]["where"]) == (400, where), data
        assert set(answer.json["error"]) == {"code", "message", "where", "hint"}


def test_queries_are_read_strictly(gateway: Gateway) -> None:
    """A filter that is ignored lists what was not asked for."""
    for query in ("state=odd", "limit=0", "limit=1001", "limit=x", "after=x", "after=x/01", "groop=g", "group="):
        assert gateway.admin("GET", f"/rollouts?{query}").status == 400, query
    minted = gateway.mint()
    assert gateway.admin("GET", below(minted, "/rows?polcy=x")).status == 400


def test_other_methods_and_routes(gateway: Gateway) -> None:
    """An answer in another shape than all others breaks the client that has to read it."""
    for method, path, status in (
        ("PUT", "/rollouts", 405),
        ("GET", "/weights", 405),
        ("GET", "/nothing", 404),
        ("GET", "", 404),
        ("GET", "/rollouts/", 404),
    ):
        answer = gateway.admin(method, path)
        assert (answer.status, answer.error) == (status, "route_unknown"), path


def test_answers_are_not_kept_by_caches(gateway: Gateway) -> None:
    """A key in a proxy's cache is a key that anybody can read."""
    answer = gateway.admin("POST", "/rollouts", {})
    assert answer.headers["cache-control"] == "no-store"


def test_the_public_address_is_what_harnesses_are_told(tmp_path: Path) -> None:
    """A sandbox cannot reach the loopback address of the trainer's machine."""
    with scripted_gateway(tmp_path / "run.gristmill", public_url="https://gate.example/run/") as gateway:
        minted = gateway.mint(rollout_id="r")
        assert minted["openai_base_url"] == "https://gate.example/run/v1"
        assert minted["prefix_base_urls"]["anthropic"] == "https://gate.example/run/r/r/0"
        assert gateway.service.base_url == "https://gate.example/run"


def test_keys_outlive_the_gateway(tmp_path: Path) -> None:
    """A gateway that is restarted must not end the rollouts that run."""
    path = tmp_path / "run.gristmill"
    with scripted_gateway(path) as gateway:
        minted = gateway.mint()
        revoked = gateway.mint()
        gateway.chat(minted["key"])
        gateway.admin("POST", below(revoked, "/revoke"))
        admin_key = gateway.admin_key
    with scripted_gateway(path) as gateway:
        assert gateway.admin_key == admin_key
        assert gateway.chat(minted["key"]).status == 200
        assert gateway.chat(revoked["key"]).status == 401
        assert gateway.admin("GET", below(minted)).json["calls"] == 2


def test_bodies_are_limited(tmp_path: Path) -> None:
    """One request must not take the memory of all rollouts."""
    with scripted_gateway(tmp_path / "run.gristmill", max_body_bytes=1000) as gateway:
        minted = gateway.mint()
        large = json.dumps({"result": {"messages": [user("x" * 2000)]}}).encode()
        assert gateway.admin("POST", below(minted, "/finish"), data=large).error == "body_too_large"
        assert gateway.admin("GET", below(minted)).json["state"] == "open"
