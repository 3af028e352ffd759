"""Calls that are continued: what the engine is given, what is stored, and that a conversation is one row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gristmill.pipeline import RebuiltRollout, run_rollout
from gristmill.reconstruction import RowMode
from gristmill.records import Capture, Continuation, ContinuationState, Result
from gristmill.selection import select_all_captured
from tests.gateway.continuation.talk import (
    ON,
    TOOLS,
    Chat,
    agent,
    dumped,
    oracle,
    outcomes,
    prompt_of,
    sent_prompts,
    sequence,
)
from tests.gateway.running import Answer, Rollout, engine_of, gateway, run

Json = dict[str, Any]

TURNS = 5
LONG = {"deadline_s": 120.0}


def rebuilt(capture: Capture) -> RebuiltRollout:
    """Make the rows of everything captured."""
    result = Result(value={"response": {"id": capture.records[-1].response_id}})
    made = run_rollout(capture, result, select_all_captured, mode=RowMode.MERGED)
    assert isinstance(made, RebuiltRollout), made
    return made


def check_one_row(rollout: Rollout, calls: int) -> None:
    """A conversation that was continued throughout is one row, and every turn in it is certified as exact."""
    capture = rollout.capture()
    assert outcomes(capture.records) == ["no_parent", *["continued"] * (calls - 1)]
    assert all(record.usable for record in capture.records)
    made = rebuilt(capture)
    [row] = made.rows
    assert row.token_ids.tolist() == sequence(capture, capture.records[-1].model_call_id)
    assert row.loss_mask.sum() == sum(record.cum_len - record.prompt_len for record in capture.records)
    assert made.rebuilt.forks == {}
    rollout.sound()


def re_dumped(chat: Chat, **options: Any) -> None:
    for message in chat.messages:
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = dumped(call["function"]["arguments"], **options)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("settings", [{}, {"scale_out": False}, {"profile": "sglang"}])
def test_a_conversation_is_one_row(tmp_path: Path, settings: Json, stream: bool) -> None:
    """Whatever renders, and however replies come: the engine is given what an uninterrupted text would be."""

    async def main() -> None:
        async with agent(**settings).serve() as url, gateway(tmp_path, url, **ON) as running:
            rollout = await running.begin()
            chat = Chat(rollout)
            for turn in range(TURNS):
                if stream:
                    answer = await chat.call(stream=True)
                    chat.take(added_up(answer))
                else:
                    await chat.step()
                await rollout.settled(turn + 1)
            check_one_row(rollout, TURNS)

    run(main(), **LONG)


def added_up(answer: Answer) -> Json:
    """Add a stream up to the message that it holds."""
    message: Json = {"content": "", "reasoning": "", "tool_calls": []}
    for event in answer.events:
        for choice in event["choices"]:
            delta = choice["delta"]
            for name, also in (("content", None), ("reasoning", "reasoning_content")):
                message[name] += delta.get(name) or (delta.get(also) if also else None) or ""
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append(
                        {"id": call["id"], "type": "function", "function": {"name": "", "arguments": ""}}
                    )
                made = message["tool_calls"][call["index"]]["function"]
                made["name"] += call["function"].get("name") or ""
                made["arguments"] += call["function"].get("arguments") or ""
    return {name: value for name, value in message.items() if value}


@pytest.mark.parametrize("how", ["verbatim", "no reasoning", "compact", "other order"])
def test_echoes_of_harnesses(tmp_path: Path, how: str) -> None:
    """Harnesses drop what was thought and write arguments anew: the model still sees what it sampled."""

    async def main() -> None:
        engine = agent()
        async with engine.serve() as url, gateway(tmp_path, url, **ON) as running:
            rollout = await running.begin()
            chat = Chat(rollout)
            new_at: list[int] = []
            for turn in range(TURNS):
                echo = ("content", "tool_calls") if how == "no reasoning" else ("content", "tool_calls", "reasoning")
                await chat.step(echo=echo)
                reply = max(at for at, message in enumerate(chat.messages) if message["role"] == "assistant")
                new_at.append(reply + 1)
                if how == "compact":
                    re_dumped(chat, separators=(",", ":"), ensure_ascii=False)
                elif how == "other order":
                    re_dumped(chat, sort_keys=True)
                await rollout.settled(turn + 1)
            check_one_row(rollout, TURNS)
            capture = rollout.capture()
            given = sent_prompts(engine)
            assert given[0] is None
            for turn, record in enumerate(capture.records[1:], start=1):
                parent = capture.records[turn - 1]
                new = chat.messages[new_at[turn - 1] : new_at[turn] - 1]
                expected = oracle(sequence(capture, parent.model_call_id), new)
                assert given[turn] == expected
                assert prompt_of(capture, record) == expected
                said = record.continuation
                assert said is not None
                assert (said.parent_call_id, said.closed) == (parent.model_call_id, False)
                assert said.suffix_len == len(expected) - parent.cum_len
                # The template writes another text in every turn: without continuation each would be a row.
                assert said.fork is not None

    run(main(), **LONG)


def test_without_it_every_turn_is_a_row(tmp_path: Path) -> None:
    """What the other tests are about does happen, with this very engine."""

    async def main() -> None:
        async with agent().serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            chat = Chat(rollout)
            for turn in range(TURNS):
                await chat.step()
                await rollout.settled(turn + 1)
            capture = rollout.capture()
            assert outcomes(capture.records) == ["none"] * TURNS
            assert all(record.schema == 2 for record in capture.records)
            assert len(rebuilt(capture).rows) == TURNS

    run(main(), **LONG)


def test_settings_of_the_template_reach_both_witnesses(tmp_path: Path) -> None:
    """With thinking switched off, what asks for a reply ends with an empty thought."""

    async def main() -> None:
        engine = agent()
        async with engine.serve() as url, gateway(tmp_path, url, **ON) as running:
            rollout = await running.begin()
            chat = Chat(rollout, chat_template_kwargs={"enable_thinking": False})
            await chat.step(echo=("content", "tool_calls"))
            new = chat.messages[3:]
            await chat.call()
            [first, second] = await rollout.settled(2)
            capture = rollout.capture()
            expected = oracle(sequence(capture, first.model_call_id), new, thinks=False)
            assert prompt_of(capture, second) == expected == sent_prompts(engine)[1]

    run(main())


@pytest.mark.parametrize(
    ("fields", "reply"),
    [
        ({"max_tokens": 3}, {}),
        ({"stop": ["three"]}, {}),
        ({}, {"cut": 4}),
        ({}, {"eos": False}),
    ],
)
def test_a_turn_that_was_cut_is_closed_as_context(tmp_path: Path, fields: Json, reply: Json) -> None:
    """The token that ends it was not sampled: the model sees it, and is not trained on it."""

    async def main() -> None:
        engine = engine_of({"turns": [{"content": "one two three four", **reply}, {"content": "five"}]})
        async with engine.serve() as url, gateway(tmp_path, url, **ON) as running:
            rollout = await running.begin()
            chat = Chat(rollout, tools=None)
            await chat.step(**fields)
            await chat.call()
            [first, second] = await rollout.settled(2)
            capture = rollout.capture()
            assert first.finish_reason in {"length", "stop"}
            assert (first.continuation is not None, second.usable) == (True, True)
            parent = sequence(capture, first.model_call_id)
            expected = oracle(parent, chat.messages[-1:])
            assert len(expected) > len(parent)
            assert prompt_of(capture, second) == expected
            said = second.continuation
            assert said is not None
            assert (said.state, said.closed) == (ContinuationState.CONTINUED, True)
            [row] = rebuilt(capture).rows
            assert row.token_ids.tolist()[: len(parent) + 1] == expected[: len(parent) + 1]
            assert row.loss_mask[len(parent)] == 0

    run(main())


def test_a_stop_token_that_was_asked_for_is_no_end_of_turn(tmp_path: Path) -> None:
    """What the model would have said next is not known: its turn is closed as one that was cut."""

    async def main() -> None:
        engine = engine_of({"turns": [{"content": "one two three four"}, {"content": "five"}]})
        async with engine.serve() as url, gateway(tmp_path, url, **ON) as running:
            rollout = await running.begin()
            chat = Chat(rollout, tools=None)
            first = await chat.call()
            [record] = await rollout.settled(1)
            ids = sequence(rollout.capture(), record.model_call_id)[record.prompt_len :]
            other = await running.begin("other")
            chat = Chat(other, tools=None)
            await chat.step(stop_token_ids=[ids[1]])
            await chat.call()
            [cut, second] = await other.settled(2)
            assert first.status == 200
            assert cut.cum_len - cut.prompt_len == 2
            said = second.continuation
            assert said is not None
            assert (said.state, said.closed) == (ContinuationState.CONTINUED, True)

    run(main())


def test_system_text_behind_the_reply(tmp_path: Path) -> None:
    """Some harnesses add system text after a tool result: it is new, and the witnesses agree on it."""

    async def main() -> None:
        engine = agent()
        async with engine.serve() as url, gateway(tmp_path, url, **ON) as running:
            rollout = await running.begin()
            chat = Chat(rollout)
            await chat.step()
            chat.messages.append({"role": "system", "content": "There are helpers."})
            new = chat.messages[3:]
            await chat.step()
            await chat.step()
            records = await rollout.settled(3)
            assert outcomes(records) == ["no_parent", "continued", "continued"]
            capture = rollout.capture()
            assert sent_prompts(engine)[1] == oracle(sequence(capture, records[0].model_call_id), new)

    run(main())


def test_every_choice_can_be_continued(tmp_path: Path) -> None:
    """Several choices have one prompt; a harness goes on with one of them, and with its tokens."""

    async def main() -> None:
        turns = [{"content": "one {{choice}}"}, {"content": "two {{choice}}"}, {"content": "three"}]
        engine = engine_of({"turns": turns}, split=0.4)
        async with engine.serve() as url, gateway(tmp_path, url, **ON) as running:
            rollout = await running.begin()
            chat = Chat(rollout, tools=None)
            answer = await chat.call(n=2)
            chat.take(answer.value["choices"][1]["message"])
            await rollout.settled(2)
            answer = await chat.call(n=3)
            chat.take(answer.value["choices"][2]["message"])
            await rollout.settled(5)
            await chat.call()
            records = await rollout.settled(6)
            assert outcomes(records) == ["no_parent", "no_parent", *["continued"] * 4]
            capture = rollout.capture()
            assert [record.parent_call_id for record in records[2:]] == [
                *[records[1].model_call_id] * 3,
                records[4].model_call_id,
            ]
            for record in records[2:]:
                parent = sequence(capture, record.parent_call_id or "")
                assert prompt_of(capture, record)[: len(parent)] == parent
            assert running.metric("continuations_total", outcome="continued") == 2
            assert {type(said.fork) for said in map(continued, records[2:])} <= {int, type(None)}
            rollout.sound()

    run(main())


def continued(record: Any) -> Continuation:
    assert record.continuation is not None
    return record.continuation


@pytest.mark.parametrize("keep_exchanges", [True, False])
def test_after_a_restart(tmp_path: Path, keep_exchanges: bool) -> None:
    """Nothing that continuing depends on is in memory alone, nor in exchanges that need not be kept."""

    async def main() -> None:
        settings = {**ON, "keep_exchanges": keep_exchanges}
        async with agent().serve() as url:
            async with gateway(tmp_path, url, **settings) as running:
                rollout = await running.begin()
                chat = Chat(rollout)
                await chat.step()
                await chat.step(max_tokens=5)
            async with gateway(tmp_path, url, **settings) as running:
                rollout = running.again(rollout)
                chat.rollout = rollout
                await chat.step()
                await chat.step()
                records = await rollout.settled(4)
                check_one_row(rollout, 4)
                assert [continued(record).closed for record in records[1:]] == [False, True, False]

    run(main(), **LONG)


def test_a_call_that_is_asked_again_is_continued_again(tmp_path: Path) -> None:
    """A retry after an error continues what the call continued that failed, and is continued itself."""

    async def main() -> None:
        fault = {"fault": {"kind": "status", "status": 500}}
        engine = engine_of({"turns": [{"content": "one"}, [fault, {"content": "two"}], {"content": "three"}]})
        async with engine.serve() as url, gateway(tmp_path, url, **ON) as running:
            rollout = await running.begin()
            chat = Chat(rollout, tools=None)
            await chat.step()
            assert (await chat.call()).status == 500
            await chat.step()
            await chat.step()
            records = await rollout.settled(4)
            assert outcomes(records) == ["no_parent", *["continued"] * 3]
            assert [record.usable for record in records] == [True, False, True, True]
            assert records[2].retry_of == records[1].model_call_id
            assert sent_prompts(engine)[1] == sent_prompts(engine)[2]
            assert records[3].base_call_id == records[2].model_call_id

    run(main())


def test_one_rollout_alone(tmp_path: Path) -> None:
    """What a rollout says counts over what the gateway was told, both ways."""

    async def main() -> None:
        async with agent().serve() as url:
            async with gateway(tmp_path / "off", url) as running:
                rollout = await running.begin(overrides={"continue": "tokens", "temperature": 1.0})
                chat = Chat(rollout)
                await chat.step()
                await chat.step()
                records = await rollout.settled(2)
                assert outcomes(records) == ["no_parent", "continued"]
                assert records[1].changes == ("override:temperature",)
            async with gateway(tmp_path / "on", url, **ON) as running:
                rollout = await running.begin(overrides={"continue": "off"})
                chat = Chat(rollout)
                await chat.step()
                await chat.step()
                assert outcomes(await rollout.settled(2)) == ["none", "none"]
                assert "continuations" not in metrics_with_values(running.gateway.metrics.text().decode())

    (tmp_path / "off").mkdir()
    (tmp_path / "on").mkdir()
    run(main())


def metrics_with_values(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if "{" in line and not line.startswith("#"))


def test_what_a_harness_must_not_send_is_refused_still(tmp_path: Path) -> None:
    """Prompts as tokens are the gateway's alone."""

    async def main() -> None:
        async with agent().serve() as url, gateway(tmp_path, url, **ON) as running:
            rollout = await running.begin()
            for fields in ({"kv_transfer_params": {"prompt_token_ids": [1]}}, {"input_ids": [1]}):
                answer = await Chat(rollout).call(**fields)
                assert (answer.status, answer.value["error"]["code"]) == (400, "parameter_refused")

    run(main())


def test_what_it_costs_is_counted(tmp_path: Path) -> None:
    """Renderings that are the same in every turn are kept, and each call's share of time is in a metric."""

    async def main() -> None:
        async with agent().serve() as url, gateway(tmp_path, url, **ON) as running:
            rollout = await running.begin()
            chat = Chat(rollout)
            for _ in range(3):
                await chat.step()
            before = running.metric("renders_total", renderer="engine", outcome="rendered")
            assert before > 0
            for name in ("other", "third"):
                other = await running.begin(name)
                chat = Chat(other)
                for _ in range(3):
                    await chat.step()
            await rollout.settled(3)
            assert running.metric("continuation_seconds_count") == 9
            assert running.metric("render_seconds_count", renderer="engine") == running.metric(
                "renders_total", renderer="engine", outcome="rendered"
            )
            assert running.metric("continuations_total", outcome="continued") == 6
            assert running.metric("continuations_total", outcome="no_parent") == 3
            assert running.metric("renders_total", renderer="engine", outcome="failed") == 0

    run(main())


def test_offers_of_tools_do_not_matter(tmp_path: Path) -> None:
    """Whether a tool must be called says nothing to the template, unless tools are hidden by it."""

    async def main() -> None:
        async with agent().serve() as url, gateway(tmp_path, url, **ON) as running:
            rollout = await running.begin()
            chat = Chat(rollout)
            await chat.step(tool_choice="auto")
            await chat.step(tool_choice="required")
            await chat.step()
            await chat.step(tool_choice="none")
            await chat.step(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "shell"}})
            assert outcomes(await rollout.settled(5)) == [
                *("no_parent", "continued", "continued"),
                *("settings_changed", "settings_changed"),
            ]

    run(main())
