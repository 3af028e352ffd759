"""What is compared before anything is rendered, and what is kept of renderings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gristmill.gateway.continuation.cache import RenderingCache
from gristmill.gateway.continuation.conditions import Past, condition, digest_of, told_of
from gristmill.lineage import ParentLink
from gristmill.records import Continuation, ContinuationReason, ContinuationState, Dialect, ParentResolution

Json = dict[str, Any]

USER: Json = {"role": "user", "content": "hi"}
SAID: Json = {"role": "assistant", "content": "a"}
BODY: Json = {"model": "m", "messages": [USER, SAID, USER]}
LINK = ParentLink("c", ParentResolution.RESOLVED)


def reason(body: Json, before: Json | None = None, *, link: ParentLink = LINK, **past: Any) -> Any:
    """Say why a body is not continued after one with other fields."""
    parent = told_of({**BODY, **(before or {})})
    said = Continuation(
        state=ContinuationState.REFUSED,
        reason=ContinuationReason.NO_PARENT,
        model=parent.model,
        settings_digest=parent.digest,
    )
    known = Past(**{"usable": True, "media": False, "said": said, **past})
    return condition(Dialect.CHAT, link, known, told_of({**BODY, **body}))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_generation_prompt": True, "continue_final_message": False, "chat_template_kwargs": {}},
        {"temperature": 0.5, "max_tokens": 3, "tool_choice": "auto", "stop": ["x"]},
        {"tool_choice": "required"},
        {"tools": [], "reasoning_effort": None},
    ],
)
def test_what_says_nothing_of_the_prompt(fields: Json) -> None:
    """A harness may spell a default out in one call and leave it out in the next."""
    assert reason(fields) is None
    assert reason({}, fields) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "high"},
        {"documents": [{"text": "d"}]},
        {"tool_choice": "none"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tool_choice": {"type": "function"}},
    ],
)
def test_what_may_change_the_prompt(fields: Json) -> None:
    """A template that was given other variables wrote another beginning."""
    assert reason(fields) is ContinuationReason.SETTINGS_CHANGED
    assert reason({}, fields) is ContinuationReason.SETTINGS_CHANGED
    assert reason(fields, fields) is None


def test_a_message_that_is_to_be_written_on() -> None:
    """It is no new turn, whether or not the parent was asked so, too."""
    fields = {"continue_final_message": True}
    assert reason(fields, fields) is ContinuationReason.SETTINGS_CHANGED


def test_media_anywhere() -> None:
    """A placeholder is no text, wherever it stands."""
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}
    text = {"role": "user", "content": [{"type": "text", "text": "t"}, "plain"]}
    assert reason({"messages": [USER, SAID, picture]}) is ContinuationReason.MEDIA
    assert reason({"messages": [picture, SAID, USER]}) is ContinuationReason.MEDIA
    assert (
        reason({"messages": [USER, {**SAID, "content": None, "audio": {"id": "a"}}, USER]}) is ContinuationReason.MEDIA
    )
    assert reason({}, media=True) is ContinuationReason.MEDIA
    assert reason({"messages": [text, SAID, text]}) is None


def test_bodies_that_are_no_conversations() -> None:
    """What cannot be read is not continued, and no error."""
    assert told_of({"model": "m"}).messages == []
    assert reason({"messages": [7, SAID, USER]}) is None
    assert reason({"messages": [SAID, USER]}) is ContinuationReason.PARENT_UNRESOLVED
    assert reason({"messages": [USER]}, link=ParentLink(None, ParentResolution.ROOT)) is ContinuationReason.NO_PARENT
    assert len(digest_of({"text": "\ud800"})) == 64


def test_renderings_are_bounded() -> None:
    """A gateway that runs for weeks keeps the renderings that are used, and no more than it may."""
    cache = RenderingCache(10)
    for name in "abc":
        cache.put(name, np.arange(4, dtype=np.int32))
        cache.get("a")
    assert (cache.get("b"), cache.size_T) == (None, 8)
    assert cache.get("a") is not None
    cache.put("a", np.arange(9, dtype=np.int32))
    cache.put("large", np.arange(11, dtype=np.int32))
    assert (cache.get("large"), cache.size_T) == (None, 8)
