"""How adapters send a prompt as tokens and have one rendered, by what the probe saw the engine do."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill.gateway.continuation.renderer import Rendering
from gristmill.gateway.upstream.adapters import engine_for
from gristmill.gateway.upstream.protocol import Capabilities, Engine, EngineKind, Support

YES, NO = Support.YES, Support.NO
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a", "reasoning": "r"}]
TOOL = {"type": "function", "function": {"name": "f"}}
EFFORT = {"add_generation_prompt": False, "reasoning_effort": "low", "chat_template_kwargs": {"x": 1}}


def adapter(kind: EngineKind, **found: Any) -> Engine:
    return engine_for(Capabilities(kind=kind, max_model_len=100, **found))


def rendering(**settings: Any) -> Rendering:
    return Rendering("m", MESSAGES, [TOOL], settings)


def test_prompts_are_sent_where_the_engine_reads_them() -> None:
    """A field that an engine does not read would be passed over, and the history rendered anew in silence."""
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 5}
    vllm = adapter(EngineKind.VLLM, token_in=YES).given(body, (1, 2))
    assert vllm == {**body, "kv_transfer_params": {"prompt_token_ids": [1, 2]}}
    assert adapter(EngineKind.SGLANG, token_in=YES).given(body, (1, 2)) == {**body, "input_ids": [1, 2]}
    assert body == {"model": "m", "messages": MESSAGES, "max_tokens": 5}


@pytest.mark.parametrize("kind", EngineKind)
def test_nothing_is_sent_that_was_not_seen_to_work(kind: EngineKind) -> None:
    """An engine that was not measured is asked nothing that it could misunderstand."""
    assert adapter(kind).given({}, (1,)) is None
    assert adapter(kind, token_in=NO).given({}, (1,)) is None
    assert adapter(kind).render(rendering()) is None
    assert adapter(kind, render=NO, tokenize=NO).render(rendering()) is None
    assert adapter(EngineKind.GENERIC, token_in=YES).given({}, (1,)) is None


def test_vllm_renders_by_chat_or_by_its_tokenizer() -> None:
    """What only Chat reads becomes variables of the template where the tokenizer's route is all there is."""
    ask = adapter(EngineKind.VLLM, render=YES, tokenize=YES).render(rendering(**EFFORT))
    assert ask is not None
    assert ask.path == "/v1/chat/completions/render"
    assert ask.body == {"model": "m", "messages": MESSAGES, "tools": [TOOL], **EFFORT}
    ask = adapter(EngineKind.VLLM, render=NO, tokenize=YES).render(rendering(**EFFORT))
    assert ask is not None
    assert (ask.path, ask.body) == (
        "/tokenize",
        {
            "model": "m",
            "messages": MESSAGES,
            "tools": [TOOL],
            "add_generation_prompt": False,
            "continue_final_message": False,
            "chat_template_kwargs": {"x": 1, "reasoning_effort": "low", "enable_thinking": True},
        },
    )
    plain = adapter(EngineKind.VLLM, tokenize=YES).render(Rendering("m", MESSAGES, None, {}))
    assert plain is not None
    assert plain.body == {
        "model": "m",
        "messages": MESSAGES,
        "add_generation_prompt": True,
        "continue_final_message": False,
    }


def test_sglang_renders_what_was_thought_under_its_own_name() -> None:
    """Under another name the thought would be left out of the rendering, and the witnesses would be no witnesses."""
    ask = adapter(EngineKind.SGLANG, render=YES).render(rendering(**EFFORT))
    assert ask is not None
    thought = {"role": "assistant", "content": "a", "reasoning_content": "r"}
    assert (ask.path, ask.body) == (
        "/tokenize",
        {"model": "m", "messages": [MESSAGES[0], thought], "tools": [TOOL], **EFFORT},
    )


def test_what_fits() -> None:
    """SGLang refuses what does not fit together with its reply, vLLM cuts the reply."""
    body = {"max_tokens": 20}
    assert adapter(EngineKind.VLLM).fits(body, 99)
    assert not adapter(EngineKind.VLLM).fits(body, 100)
    assert not adapter(EngineKind.GENERIC).fits(body, 100)
    sglang = adapter(EngineKind.SGLANG)
    assert sglang.fits(body, 80)
    assert not sglang.fits(body, 81)
    assert sglang.fits({}, 99)
    assert not sglang.fits({**body, "max_completion_tokens": 30}, 71)
    assert engine_for(Capabilities(kind=EngineKind.SGLANG)).fits(body, 10**9)
