"""What a harness may not send on."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill.errors import Code
from gristmill.gateway.front import RequestRefused
from gristmill.gateway.parameters import apply_overrides, permitted


@pytest.mark.parametrize(
    "name",
    [
        "kv_transfer_params",
        "ec_transfer_params",
        "request_id",
        "cache_salt",
        "priority",
        "vllm_xargs",
        "session_id",
        "extra_key",
        "routed_dp_rank",
        "disagg_prefill_dp_rank",
        "routing_key",
    ],
)
def test_what_only_schedules_is_removed_and_noted(name: str) -> None:
    # A harness could take over another call's id, or jump the queue.
    body = {"model": "m", name: {"x": 1}}
    kept, notes = permitted(body)
    assert kept == {"model": "m"}
    assert notes == (f"removed:{name}",)
    assert name in body


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": [1]},
        {"chat_template": "{{ x }}"},
        {"logits_processors": ["a.b"]},
        {"lora_request": {"name": "x"}},
        {"lora": "x"},
        {"kv_transfer_params": {"prompt_token_ids": [1, 2]}},
        {"use_beam_search": True},
        {"session_params": {"id": "x"}},
        {"custom_logit_processor": "x"},
        {"chat_template_kwargs": {"chat_template": "{{ x }}"}},
        {"chat_template_kwargs": {"tokenize": True}},
        {"chat_template_kwargs": {"documents": [{"text": "x"}]}},
        {"messages": [{"role": "user", "content": [{"type": "image_embeds", "image_embeds": "AAAA"}]}]},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}, "uuid": "x"}],
                }
            ]
        },
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "file:///etc/passwd"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://x"}}]}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://x/y.png"}]}]},
        {"input": [{"type": "function_call_output", "output": [{"type": "input_image", "image_url": "ftp://x"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "HTTP://x"}}]}]},
    ],
)
def test_what_would_change_the_question_is_refused(body: dict[str, Any]) -> None:
    # Removed in silence, the model would have been asked something else than the record says; fetched, an address
    # reaches services that only the engine's machine can reach.
    with pytest.raises(RequestRefused) as raised:
        permitted(body)
    assert (raised.value.status, raised.value.code) == (400, Code.PARAMETER_REFUSED)
    assert raised.value.where.startswith("$.")


def test_inline_media_and_arguments_pass() -> None:
    # A tool argument that holds an address is only text.
    body: dict[str, Any] = {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]},
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "get", "arguments": '{"image_url":"http://x"}'}}],
            },
            {"role": "tool", "content": "http://x"},
        ],
        "chat_template_kwargs": {"enable_thinking": False, "effort": "low", "budget": 1, "x": None},
        "tools": [{"function": {"parameters": {"properties": {"image_url": {"type": "string"}}}}}],
    }
    assert permitted(body) == (body, ())


def test_overrides_win_and_are_noted() -> None:
    # A run whose sampling is set by the trainer must not depend on what the harness asks for.
    body = {"temperature": 0, "max_completion_tokens": 5, "chat_template_kwargs": {"a": 1, "b": 1}}
    changed, notes = apply_overrides(body, {"temperature": 1.0, "max_tokens": 9, "chat_template_kwargs": {"b": 2}})
    assert changed == {"temperature": 1.0, "max_tokens": 9, "chat_template_kwargs": {"a": 1, "b": 2}}
    assert notes == ("override:temperature", "override:max_tokens", "override:chat_template_kwargs")
    assert body["temperature"] == 0
