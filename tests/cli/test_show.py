from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gristmill.demo import recordings
from tests.cli.stories import TWO_TURNS, Json, call, good_story, refused_story, returned, run, story, write_story
from tests.cli.test_command_line import terminal_output

CALL_KEYS = {
    *("model_call_id", "depth", "parent_call_id", "parent_resolution", "kind", "purpose", "included", "code"),
    *("evidence", "scored", "response_id", "dialect", "model", "response_status", "finish_reason", "served", "usable"),
    *("unusable_reason", "prompt_tokens", "sampled_tokens", "context", "continuation", "delivery", "admitted_at"),
    "completed_at",
}


def wide_story() -> list[Json]:
    """A conversation with a retry, a branch that goes on, a sub-agent, a compaction, a title and a lost parent."""
    tool = {"type": "function", "id": "t", "function": {"name": "grep", "arguments": "{}"}}
    return [
        call("c1", "one", [1, 2, 3], [4, 5], delivery="delivered"),
        call("x1", "again", [1, 2, 3], [6], finish_reason="length", response_status="incomplete"),
        call("b1", "aside", [1, 2, 3, 4, 5, 8], [9], parent_call_id="c1"),
        call("b2", "aside two", [1, 2, 3, 4, 5, 8, 9, 1], [2], parent_call_id="b1"),
        call("c2", TWO_TURNS[1], [1, 2, 3, 4, 5, 6], [7, 8], parent_call_id="c1"),
        call("c3", "three", [1, 9, 9], [3], parent_call_id="c2"),
        call("s1", "sub", [7], [8], purpose={"label": "subagent", "evidence": "header"}),
        call("k1", "sum", [7], [9], purpose={"label": "compaction"}),
        call("a1", "title", [5], [9], purpose={"label": "auxiliary"}, parent_call_id="c1"),
        call(
            "o1",
            "late",
            [5, 5],
            [9],
            parent_call_id="never",
            output_items=[{"role": "assistant", "tool_calls": [tool]}],
        ),
        call("u1", "no ids", [], [], parent_resolution="ambiguous", prompt_token_ids=None, generation_token_ids=None),
        {"kind": "lost", "rollout_id": "r", "model_call_id": "gone", "parent_call_id": "b2", "maybe_received": False},
    ]


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    return write_story(tmp_path / "wide", wide_story(), returned("one", TWO_TURNS[1], "three"))


def test_a_conversation_goes_straight_down(wide: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was thrown away must be seen beside what took its place."""
    ran = run(capsys, "show", wide)
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0] == "r  frozen, reward 1, group g  returned_history  3 of 12 calls"
    assert [re.match(r" *\S (\S+)", line)[1] for line in lines[1:12]] == [
        *("c1", "b1", "b2", "a1", "c2", "c3", "x1", "s1", "k1", "o1", "u1"),
    ]
    assert lines[1] == ("  ● c1  content  start, 3+2 tokens, completed (stop), served text, delivered")
    assert lines[2].startswith("    ○ b1  not_returned  continuation, 6+1 tokens, completed (stop), exact")
    assert lines[3].startswith("    ○ b2  not_returned  continuation")
    assert lines[5].startswith("  ● c2  content  branch, 6+2 tokens, completed (stop), exact")
    assert lines[6].startswith("  ★ c3  content  continuation, 3+1 tokens, completed (stop), forked: unknown at 1")
    assert lines[7].startswith("  ○ x1  retry_superseded  retry, 3+1 tokens, incomplete (length)")
    for kind in ("subagent", "compaction", "auxiliary"):
        assert f"  {kind}, " in ran.out
    assert "continues never, which was not captured" in ran.out
    assert "served call of grep" in ran.out
    assert "parent ambiguous, unusable: " in ran.out
    assert "lost gone (continues b2): no outcome was stored" in ran.out
    assert ran.err == f"next: gristmill show {wide} r --call u1\n"


def test_json(wide: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The documented keys, a tree in them."""
    [rollout] = run(capsys, "show", wide, "--json").json["rollouts"]
    assert set(rollout) == {
        *("rollout_id", "attempt", "state", "outcome", "code", "where", "message", "policy", "options", "reward"),
        *("group_id", "advantage", "credits", "failure", "terminal_call_id", "rows", "calls", "lost", "funnel"),
    }
    assert {frozenset(one) for one in rollout["calls"]} == {frozenset(CALL_KEYS)}
    calls = {one["model_call_id"]: one for one in rollout["calls"]}
    assert len(calls) == 11
    assert (calls["b2"]["depth"], calls["c2"]["depth"]) == (1, 0)
    assert calls["c3"]["context"] == {"relation": "forked", "cause": "unknown", "position": 1}
    assert (calls["c1"]["context"], calls["c3"]["scored"]) == (None, True)
    assert rollout["lost"] == [
        {
            "model_call_id": "gone",
            "parent_call_id": "b2",
            "maybe_received": False,
            "code": "lost",
            "reason": "no outcome was stored",
        }
    ]
    assert rollout["funnel"]["lost_calls"] == 1


def test_a_refused_rollout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its calls are looked at most of all."""
    path = refused_story(tmp_path)
    ran = run(capsys, "show", path)
    assert ran.code == 0
    assert "rejected" in ran.out.splitlines()[0]
    assert "match_missing at $.response.output[3]: " in ran.out
    [rollout] = run(capsys, "show", path, "--json").json["rollouts"]
    assert (rollout["outcome"], rollout["code"], rollout["rows"]) == ("rejected", "match_missing", 0)
    assert rollout["terminal_call_id"] is None


def test_one_of_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The id stands behind the paths; what was mistyped is told, and nothing is shown by accident."""
    for name in ("rollout-1", "rollout-2"):
        good_story(tmp_path / "in" / name, name)
    ledger = tmp_path / "run.gristmill"
    run(capsys, "import", tmp_path / "in", "--into", ledger)
    for path in (tmp_path / "in", ledger):
        assert run(capsys, "show", path, "rollout-2").out.startswith("rollout-2  frozen")
        assert run(capsys, "show", path, "--rollout", "rollout-2").out.startswith("rollout-2  frozen")
        ran = run(capsys, "show", path, "rolout-2", "--json")
        assert (ran.code, ran.json["error"]["hint"]) == (2, "Did you mean 'rollout-2'?")
        ran = run(capsys, "show", path)
        assert (ran.code, ran.out) == (2, "")
        assert "there are several: 'rollout-1', 'rollout-2'" in ran.err
    assert run(capsys, "show", tmp_path / "in" / "rollout-1").code == 0


def test_attempts_of_a_rollout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A restarted rollout is shown try by try."""
    calls = [{**line, "attempt": number} for number in (0, 1) for line in story()]
    path = write_story(tmp_path, calls)
    titles = [line for line in run(capsys, "show", path).out.splitlines() if line.startswith("r")]
    assert titles[0].startswith("r  frozen, no reward  returned_history  rejected")
    assert titles[1].startswith("r attempt 1  frozen")
    assert "--attempt 1 --call c2" in run(capsys, "show", path, "--attempt", "1").err
    ran = run(capsys, "show", path, "--call", "c1")
    assert ran.code == 2
    assert "is in attempts 0, 1" in ran.err
    assert run(capsys, "show", path, "--call", "c1", "--attempt", "1").out.startswith("r attempt 1  c1  start\n")


def test_chains_and_cycles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rollout of a thousand turns must not run into a limit, and wrong parents must not hide a call."""
    calls = [
        call(f"c{at}", f"t{at}", [at + 1], [at + 2], parent_call_id=f"c{at - 1}" if at else None) for at in range(1500)
    ]
    ran = run(capsys, "show", write_story(tmp_path / "long", calls, returned("t1")))
    assert sum("continuation" in line for line in ran.out.splitlines()) == 1499
    calls = [
        call("a", "a", [1], [2], parent_call_id="b"),
        call("b", "b", [1], [3], parent_call_id="a"),
        call("self", "c", [1], [4], parent_call_id="self"),
    ]
    [rollout] = run(capsys, "show", write_story(tmp_path / "odd", calls, returned("a")), "--json").json["rollouts"]
    assert sorted(one["model_call_id"] for one in rollout["calls"]) == ["a", "b", "self"]


def test_on_a_terminal(wide: Path) -> None:
    """A tree with lines, in colour."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", terminal_output(["show", str(wide)], COLUMNS="120"))
    assert "├── ● c1  content" in text
    assert "│   ├── ○ b1" in text
    listed = re.sub(r"\x1b\[[0-9;]*m", "", terminal_output(["ls", str(wide)], COLUMNS="60"))
    assert all(len(line) <= 60 for line in listed.split("\r\n")[:2])
    assert listed.split("\r\n")[0].split() == [
        "rollout",
        "state",
        "verdict",
        "reward",
        "calls",
        "lost",
        "tokens",
        "rows",
    ]
    assert "note: the terminal is too narrow for attempt, group, models, time" in listed
    assert "forked: unknown at 1" in terminal_output(["drift", str(wide)], COLUMNS="120")


def test_only_lost_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rollout whose every call was lost has no call to look at next."""
    lost = {"kind": "lost", "rollout_id": "r", "model_call_id": "gone"}
    ran = run(capsys, "show", write_story(tmp_path, [lost], returned("one")))
    assert (ran.code, ran.err) == (0, "")
    assert "lost gone: no outcome was stored" in ran.out


def test_a_recorded_retry(capsys: pytest.CaptureFixture[str]) -> None:
    """The digests of a request tell a retry, whatever was sampled."""
    calls = run(capsys, "show", str(recordings()), "mend-the-mill", "--json").json["rollouts"][0]["calls"]
    assert [one["model_call_id"] for one in calls if one["kind"] == "retry"] == ["c07"]
    assert [one["model_call_id"] for one in calls if one["depth"]] == ["c06"]


# ---- one call ----------------------------------------------------------------------------------------------


def exchange(**fields: Json | list[Json] | str | None) -> Json:
    body = {
        "model": "asked",
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, "odd"],
        "tools": [{"type": "function", "function": {"name": "bash"}}, {"type": "web_search"}, "odd"],
        "temperature": 0.5,
    }
    return {"request": body, "reply": {"id": "x"}, "http_status": 200, "request_headers": {"user-agent": "h"}, **fields}


def test_whether_calls_were_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the engine was given is seen where the rollout is looked at, and why it was rendered anew."""
    continued = {"state": "continued", "parent_call_id": "c1", "closed": True, "suffix_len": 2}
    calls = [
        call("c1", "one", [1, 2, 3], [4, 5], continuation={"state": "refused", "reason": "no_parent"}),
        call("c2", "two", [1, 2, 3, 4, 5, 6, 7], [8], parent_call_id="c1", continuation=continued),
        call(
            *("c3", "three", [1, 2, 3, 9], [8]),
            parent_call_id="c2",
            continuation={"state": "refused", "reason": "system_changed"},
        ),
    ]
    source = write_story(tmp_path, calls, returned("one", "two", "three"))
    [rollout] = run(capsys, "show", source, "--json").json["rollouts"]
    told = {one["model_call_id"]: one["continuation"] for one in rollout["calls"]}
    assert told["c1"] == {**continued, "state": "refused", "reason": "no_parent", "parent_call_id": None} | {
        "closed": False,
        "suffix_len": 0,
    }
    assert told["c2"] == {**continued, "reason": None}
    text = run(capsys, "show", source).out
    assert "continued, " in text
    assert "not continued: system_changed" in text
    assert "not continued: no_parent" not in text
    said = [run(capsys, "explain", source, name).out for name in ("c1", "c2", "c3")]
    assert "rendered anew" not in said[0]
    assert "exact sequence of c1 and 2 tokens more, the first of them to end the turn that was cut" in " ".join(
        said[1].split()
    )
    assert "rendered anew (system_changed): the system text is another one" in " ".join(said[2].split())


def test_a_call_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Why was this token trained on that context? The answer begins here."""
    calls = story()
    calls[2] |= exchange()
    path = write_story(tmp_path / "in", calls, returned(*TWO_TURNS))
    ledger = tmp_path / "run.gristmill"
    run(capsys, "import", path, "--into", ledger)
    for source in (path, ledger):
        told = run(capsys, "show", source, "--call", "c2", "--json").json
        assert set(told) == CALL_KEYS | {
            *("rollout_id", "attempt", "text", "items", "tokens", "certificate", "weight_versions", "sampling"),
            *("request", "reply"),
        }
        assert told["tokens"]["before"] == [1, 2, 3, 4, 5, 6]
        assert told["tokens"]["sampled"] == [7, 8]
        assert told["tokens"]["logprobs"] == [-0.7, -0.8]
        assert (told["tokens"]["prompt_len"], told["tokens"]["base_call_id"]) == (6, "c1")
        assert told["certificate"] == {"relation": "exact", "parent_call_id": "c1"}
        assert told["request"]["messages"] == {"system": 1, "user": 1, "other": 1}
        assert told["request"]["tools"] == ["bash", "web_search", "other"]
        assert told["request"]["parameters"] == {"temperature": 0.5}
        assert told["reply"] == {"status": 200, "kind": "body", "bytes": 10}
        assert told["items"][0]["text"].startswith("text 'two")
    text = run(capsys, "show", ledger, "--call", "c2").out
    for line in (
        "r  c2  retry",
        "request: model asked, messages: 1 system, 1 user, 1 other",
        "tools: bash, web_search, other",
        'parameters: {"temperature":0.5}',
        "reply: body of 10 bytes, status 200",
        "prompt: 6 tokens, 5 of them those of c1, the last: 1 2 3 4 5 6",
        "sampled: 2 tokens, the first: 7 8",
        "logprobs: -0.7 -0.8",
        "item: text text 'two, at some length'",
        'context: {"relation":"exact","parent_call_id":"c1"}',
    ):
        assert line in text.splitlines()
    assert "Call c2 of m continues c1" in text


@pytest.mark.parametrize(
    ("fields", "messages", "reply"),
    [
        ({}, None, None),
        ({"request": "text", "reply": "data: x"}, None, {"status": 200, "kind": "stream", "bytes": 7}),
        ({"request": {"input": "hi"}, "reply": None}, {"user": 1}, {"status": 200, "kind": "nothing", "bytes": 0}),
        ({"request": {"input": [{"type": "function_call_output"}]}}, {"function_call_output": 1}, None),
        ({"request": {"prompt": [1, 2]}}, {"other": 2}, None),
        ({"request": {"n": 1}}, None, None),
    ],
)
def test_calls_of_which_less_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: Json, messages: Json | None, reply: Json | None
) -> None:
    """What was not captured is said to be missing."""
    calls = story()
    calls[0] |= exchange(**fields) if fields else {}
    calls[0] |= {"output_items": [{"kind": "unsupported", "fingerprint": "f", "type": "odd"}]}
    calls[0] |= {"prompt_token_ids": None} if not fields else {}
    path = write_story(tmp_path, calls, returned(*TWO_TURNS))
    told = run(capsys, "show", path, "--call", "c1", "--json").json
    assert (told["request"] or {}).get("messages") == messages
    if reply is not None:
        assert told["reply"] == reply
    text = run(capsys, "show", path, "--call", "c1").out
    assert "item: unsupported whose content is not known" in text
    if not fields:
        assert "request: was not captured" in text
        assert "tokens: none that can be read" in text


def test_a_call_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A typo in an id of thirty characters is found by the nearest one."""
    ran = run(capsys, "show", good_story(tmp_path), "--call", "c22", "--json")
    assert (ran.code, ran.json["error"]["code"], ran.json["error"]["hint"]) == (2, "call_unknown", "Did you mean 'c2'?")


def test_tokens_that_contradict_their_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One damaged call must not hide how the others relate."""
    import msgspec

    from gristmill.captures import read_capture
    from gristmill.cli.certificates import certificates

    capture = read_capture(good_story(tmp_path)).rollouts["r", 0].capture
    assert set(certificates(capture)) == {"x1", "c2"}
    records = tuple(
        msgspec.structs.replace(record, sequence_digest="0" * 64) if record.model_call_id == "x1" else record
        for record in capture.records
    )
    assert set(certificates(msgspec.structs.replace(capture, records=records))) == {"c2"}
    assert certificates(msgspec.structs.replace(capture, records=())) == {}
    broken = {name: delta for name, delta in capture.tokens.items() if name != "c1"}
    from gristmill.cli.attempts import Attempt
    from gristmill.cli.choice import Choice
    from gristmill.cli.one_call import _tokens_json
    from gristmill.cli.show import look
    from gristmill.records import Result

    shown = look(Attempt(tmp_path, msgspec.structs.replace(capture, tokens=broken), Result()), Choice())
    assert _tokens_json(shown, capture.records[2]) is None
    assert json.dumps(sorted(shown.certificates)) == '["x1"]' or shown.certificates == {}


def test_what_the_result_credits_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Why a rollout is not trained, and what single calls were worth, must not need a look into the ledger."""
    credit = {"model_call_id": "c1", "start": 1, "reward": 0.5}
    failure = {"reason": "sandbox gone", "attribution": "mask"}
    result = returned(*TWO_TURNS, advantage=2, credits=[credit], failure=failure)
    folder = write_story(tmp_path / "in", result=result)
    [shown] = run(capsys, "show", folder, "--json").json["rollouts"]
    assert (shown["advantage"], shown["credits"], shown["failure"]) == (2.0, [credit], failure)
    assert shown["code"] == "failure_masked"
    assert "reward 1, group g, failed (mask): sandbox gone" in run(capsys, "show", folder).out
