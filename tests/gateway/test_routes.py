"""The closed table of routes."""

from __future__ import annotations

import pytest

from gristmill.gateway.routes import Purpose, find_route, is_rollout_id
from gristmill.records import Dialect


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/v1/chat/completions", Dialect.CHAT),
        ("/v1/completions", Dialect.COMPLETIONS),
        ("/v1/responses", Dialect.RESPONSES),
        ("/v1/messages", Dialect.MESSAGES),
    ],
)
def test_model_routes_with_and_without_a_rollout(path: str, dialect: Dialect) -> None:
    # A harness whose base address has a prefix would be turned away.
    for prefix, rollout, attempt in (("", None, None), ("/r/task-7", "task-7", None), ("/r/a.b_C/12", "a.b_C", 12)):
        found = find_route(prefix + path)
        assert found is not None
        assert (found.route.purpose, found.route.dialect) == (Purpose.SAMPLE, dialect)
        assert (found.rollout_id, found.attempt) == (rollout, attempt)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions/batch",
        "/v1/chat/completions/",
        "/v1/chat/completions/render",
        "/inference/v1/generate",
        "/v1/embeddings",
        "/v1/../v1/messages",
        "/r/../v1/messages",
        "/r/./v1/messages",
        "/r//v1/messages",
        "/r/a/01/v1/messages",
        "/r/a/-1/v1/messages",
        "/r/a/1/2/v1/messages",
        "/r/a b/v1/messages",
        "/r/a/metrics",
        "/r/a/healthz",
        "/R/a/v1/messages",
        "//v1/messages",
        "/V1/messages",
        "/v1/messages\x00",
        "/r/" + "a" * 129 + "/v1/messages",
    ],
)
def test_everything_else_is_no_route(path: str) -> None:
    # What is forwarded without being known could reach an engine's administration.
    assert find_route(path) is None


@pytest.mark.parametrize("text", ["", ".", "..", "...", "a/b", "a b", "é", "a\n", "a" * 129])
def test_ids_are_refused_not_cleaned(text: str) -> None:
    # Two ids that were cleaned to the same text would share a rollout.
    assert not is_rollout_id(text)


def test_a_rollout_may_look_like_a_number() -> None:
    # A task id of only digits is common.
    found = find_route("/r/17/3/v1/messages")
    assert found is not None
    assert (found.rollout_id, found.attempt) == ("17", 3)
