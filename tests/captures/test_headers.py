from __future__ import annotations

import json
from typing import Any

import pytest

from gristmill.captures.headers import KEPT_HEADERS, Session, kept_headers, session_of
from tests.captures.harness import NAMES, recorded

SECRETS = (
    "Authorization",
    "X-Api-Key",
    "Api-Key",
    "Cookie",
    "Set-Cookie",
    "Proxy-Authorization",
    "Proxy-Connection",
    "X-Auth-Token",
    "X-Goog-Api-Key",
    "OpenAI-Organization",
    "Forwarded",
    "X-Forwarded-For",
    "Never-Heard-Of",
)


# A key that is kept once is in every ledger, export and bug report from then on.
@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize("spelling", [str, str.lower, str.upper])
def test_no_credential_is_kept(name: str, spelling: Any) -> None:
    kept, dropped = kept_headers({spelling(name): "secret", "User-Agent": "agent/1"})
    assert kept == {"user-agent": "agent/1"}
    assert dropped == (name.lower(),)


# The list itself must not grow a hole.
def test_no_kept_header_is_a_credential() -> None:
    words = ("auth", "key", "cookie", "token", "secret", "proxy", "forward", "password", "signature")
    assert not [name for name in KEPT_HEADERS if name != name.lower() or any(word in name for word in words)]


# Recorded runs hold what clients really send, and all of it has to be sorted.
@pytest.mark.parametrize("name", NAMES)
def test_what_harnesses_say_of_their_session_is_kept(name: str) -> None:
    for call in recorded(name):
        kept, dropped = kept_headers(call.headers)
        assert set(kept) | set(dropped) == set(call.headers)
        assert session_of(kept, call.body) == session_of(call.headers, call.body)


def said(headers: dict[str, str] | None = None, body: Any = None) -> dict[str, Any]:
    session = session_of(headers or {}, body)
    fields = {name: getattr(session, name) for name in session.__struct_fields__ if name != "places"}
    found = {name: value for name, value in fields.items() if value is not None}
    assert session.places.keys() == found.keys()
    return found


# Each harness has words of its own; one that is not understood leaves its subagents among the agent's own calls.
@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ({}, None, {}),
        ({}, [], {}),
        (
            {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a", "x-claude-code-parent-agent-id": "p"},
            {},
            {"session_id": "s", "agent_id": "a", "parent_agent_id": "p", "parent_session_id": "p"},
        ),
        (
            {"session-id": "s", "thread-id": "t", "x-codex-parent-thread-id": "p", "x-openai-subagent": "review"},
            {},
            {"session_id": "s", "thread_id": "t", "parent_session_id": "p", "subagent": "review"},
        ),
        ({"x-codex-window-id": "abc:3"}, {}, {"window": 3}),
        ({"x-codex-window-id": "abc:x"}, {}, {}),
        ({"x-session-id": "s", "x-parent-session-id": "p"}, {}, {"session_id": "s", "parent_session_id": "p"}),
        ({"session_id": "s"}, {"prompt_cache_key": "other"}, {"session_id": "s"}),
        ({}, {"prompt_cache_key": "k"}, {"session_id": "k"}),
        ({}, {"metadata": {"user_id": '{"device_id": "d", "session_id": "s"}'}}, {"session_id": "s"}),
        ({}, {"metadata": {"user_id": "user_1"}}, {}),
        ({}, {"metadata": {"user_id": '{"session_id": 7}'}}, {}),
        ({}, {"metadata": "x", "client_metadata": 5, "system": "text"}, {}),
        (
            {},
            {"client_metadata": {"session_id": "s", "thread_id": "t", "x-openai-subagent": "u"}},
            {"session_id": "s", "thread_id": "t", "subagent": "u"},
        ),
        ({}, {"system": [{"type": "text", "text": "x-anthropic-billing-header: cc_version=1.2;"}]}, {}),
        (
            {},
            {"system": ["text", {"text": "x-anthropic-billing-header: cc_version=1; cc_is_subagent=true;"}]},
            {"subagent": "cc_is_subagent"},
        ),
    ],
)
def test_sessions(headers: dict[str, str], body: Any, expected: dict[str, Any]) -> None:
    assert said(headers, body) == expected


# codex says the same thing in a header and in the body, of which a proxy may drop one.
def test_a_turn_is_read_wherever_it_stands() -> None:
    turn = {
        "session_id": "s",
        "thread_id": "t",
        "parent_thread_id": "p",
        "request_kind": "compaction",
        "subagent_kind": "thread_spawn",
        "window_number": 2,
        "more": {"a": 1},
    }
    expected = {
        "session_id": "s",
        "thread_id": "t",
        "parent_session_id": "p",
        "request_kind": "compaction",
        "subagent": "thread_spawn",
        "window": 2,
    }
    assert said({"x-codex-turn-metadata": json.dumps(turn)}) == expected
    assert said({}, {"client_metadata": {"x-codex-turn-metadata": json.dumps(turn)}}) == expected
    assert (
        session_of({"x-codex-turn-metadata": json.dumps(turn)}, {}).places["window"] == "header x-codex-turn-metadata"
    )
    assert said({"x-codex-turn-metadata": json.dumps({"window_number": -1})}) == {}


# What cannot be stored, or is no name, must not end up in a record.
@pytest.mark.parametrize("value", ["", "x" * 513, "\ud800"])
def test_what_is_no_name_is_none(value: str) -> None:
    assert session_of({"x-session-id": value}, {"prompt_cache_key": value}) == Session()
    assert said({}, {"metadata": {"user_id": json.dumps({"session_id": value})}}) == {}
    assert said({"x-codex-turn-metadata": '{"session_id": "\ud800"}'}) == {}


# A client that nests without end must not bring the gateway down.
def test_deep_metadata_is_passed_over() -> None:
    assert said({"x-codex-turn-metadata": "[" * 100_000}) == {}
    assert said({"x-codex-turn-metadata": '{"a":' * 100_000}) == {}
