"""Calls that are not continued: each reason, and that the call is then served as any other."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import Code
from gristmill.gateway.continuation.plan import Planner
from gristmill.gateway.continuation.renderer import Rendering
from gristmill.records import CallRecord, ContinuationReason, Dialect
from gristmill.scripted import ScriptedEngine
from tests.gateway.continuation.talk import ON, TOOLS, Chat, agent, outcomes, sent_prompts
from tests.gateway.running import PROBE, Running, engine_of, gateway, run

Json = dict[str, Any]
Reason = ContinuationReason
Edit = Callable[[Chat], Any]

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}


def talked(
    folder: Path, work: Callable[[Running, Chat], Awaitable[None]], engine: ScriptedEngine, **settings: Any
) -> None:
    """Run a chat with a gateway that continues calls."""

    async def main() -> None:
        async with engine.serve() as url, gateway(folder, url, **{**ON, **settings}) as running:
            await work(running, Chat(await running.begin()))

    run(main())


def edited_user(chat: Chat) -> None:
    chat.messages[1]["content"] += " Now!"


def edited_reply(chat: Chat) -> None:
    chat.messages[2]["content"] = "I looked."


def other_arguments(chat: Chat) -> None:
    chat.messages[2]["tool_calls"][0]["function"]["arguments"] = '{"x":2.0,"command":"ls"}'


def inserted_message(chat: Chat) -> None:
    chat.messages.insert(2, {"role": "user", "content": "And hurry."})


def inserted_turn(chat: Chat) -> None:
    chat.messages[2:2] = [{"role": "assistant", "content": "Well."}, {"role": "user", "content": "Well?"}]


def dropped_turn(chat: Chat) -> None:
    del chat.messages[2:4]


def dropped_result(chat: Chat) -> None:
    del chat.messages[3]


def other_system(chat: Chat) -> None:
    chat.messages[0]["content"] = "Be long."


def other_tools(chat: Chat) -> None:
    tool = {"type": "function", "function": {"name": "new", "parameters": {"type": "object", "properties": {}}}}
    chat.fields["tools"] = [*TOOLS, tool]


def no_tools(chat: Chat) -> None:
    del chat.fields["tools"]


def other_model(chat: Chat) -> None:
    chat.fields["model"] = "other"


def other_settings(chat: Chat) -> None:
    chat.fields["chat_template_kwargs"] = {"enable_thinking": False}


def less_effort(chat: Chat) -> None:
    chat.fields["reasoning_effort"] = "low"


def unanswered(chat: Chat) -> None:
    chat.messages = chat.messages[: max(at for at, one in enumerate(chat.messages) if one["role"] == "assistant") + 1]
    chat.fields["add_generation_prompt"] = True


def too_much(chat: Chat) -> None:
    chat.messages[-1]["content"] = "word " * 900


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (edited_user, Reason.PARENT_UNRESOLVED),
        (edited_reply, Reason.PARENT_UNRESOLVED),
        (other_arguments, Reason.PARENT_UNRESOLVED),
        (inserted_message, Reason.PARENT_UNRESOLVED),
        (inserted_turn, Reason.PARENT_UNRESOLVED),
        (dropped_turn, Reason.NO_PARENT),
        (other_system, Reason.SYSTEM_CHANGED),
        (other_tools, Reason.TOOLS_CHANGED),
        (no_tools, Reason.TOOLS_CHANGED),
        (other_model, Reason.MODEL_CHANGED),
        (other_settings, Reason.SETTINGS_CHANGED),
        (less_effort, Reason.SETTINGS_CHANGED),
    ],
)
def test_what_changed_after_the_first_turn(tmp_path: Path, edit: Edit, reason: ContinuationReason) -> None:
    """What the model saw is not what the harness now says it saw: nothing of it is passed on."""

    async def work(running: Running, chat: Chat) -> None:
        await chat.step()
        edit(chat)
        await refused(running, chat, reason, calls=2)

    talked(tmp_path, work, agent(models=["m", "other"]))


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (edited_user, Reason.PARENT_UNRESOLVED),
        (dropped_turn, Reason.PARENT_UNRESOLVED),
        (dropped_result, Reason.PARENT_UNRESOLVED),
        (inserted_message, Reason.PARENT_UNRESOLVED),
        (lambda chat: chat.messages.insert(4, {"role": "user", "content": "And hurry."}), Reason.PARENT_UNRESOLVED),
        (lambda chat: chat.messages[3].update(content="c d"), Reason.PARENT_UNRESOLVED),
        (lambda chat: chat.messages[4].update(content="Found."), Reason.PARENT_UNRESOLVED),
        (unanswered, Reason.NOTHING_NEW),
    ],
)
def test_what_changed_after_the_second_turn(tmp_path: Path, edit: Edit, reason: ContinuationReason) -> None:
    """With more of a history, more of it can be changed behind what a captured call still explains."""

    async def work(running: Running, chat: Chat) -> None:
        await chat.step()
        await chat.step()
        edit(chat)
        await refused(running, chat, reason, calls=3)

    talked(tmp_path, work, agent())


async def refused(running: Running, chat: Chat, reason: ContinuationReason, *, calls: int) -> CallRecord:
    """Make a call that is not continued, and is served and stored as every other."""
    answer = await chat.call()
    assert answer.status == 200, answer.raw
    records = await chat.rollout.settled(calls)
    assert outcomes(records)[-1] == str(reason)
    assert records[-1].usable
    said = records[-1].continuation
    assert said is not None
    assert (said.parent_call_id, said.suffix_len, said.closed) == (None, 0, False)
    assert running.metric("continuations_total", outcome=str(reason)) >= 1
    return records[-1]


def test_a_turn_in_several_messages(tmp_path: Path) -> None:
    """An empty message beside a reply says nothing, but is rendered as a turn that the model never wrote."""

    async def work(running: Running, chat: Chat) -> None:
        chat.fields["tools"] = None
        await chat.step()
        chat.messages.insert(-1, {"role": "assistant", "content": ""})
        record = await refused(running, chat, Reason.PARENT_UNRESOLVED, calls=2)
        assert record.parent_resolution == "resolved"

    talked(tmp_path, work, engine_of({"content": "one"}))


def test_equal_replies(tmp_path: Path) -> None:
    """Which of two equal replies a harness goes on with is not known, and their tokens may differ."""

    async def work(running: Running, chat: Chat) -> None:
        chat.fields["tools"] = None
        answer = await chat.call(n=2)
        chat.take(answer.value["choices"][0]["message"])
        await refused(running, chat, Reason.PARENT_AMBIGUOUS, calls=3)

    talked(tmp_path, work, engine_of({"content": "one two"}, split=0.5))


@pytest.mark.parametrize("wrong", [{"logprobs": "missing"}, {"token_ids": "short"}, {"prompt_ids": "missing"}])
def test_a_parent_without_tokens_that_can_be_trusted(tmp_path: Path, wrong: Json) -> None:
    """What it sampled is not known, so that nothing can be put behind it."""

    async def work(running: Running, chat: Chat) -> None:
        chat.fields["tools"] = None
        await chat.step()
        await refused(running, chat, Reason.PARENT_UNUSABLE, calls=2)

    talked(tmp_path, work, engine_of({"turns": [{"content": "one", "wrong": wrong}, {"content": "two"}]}))


def test_an_aborted_parent(tmp_path: Path) -> None:
    """A harness that goes on with what it had read of a call that it gave up."""

    async def work(running: Running, chat: Chat) -> None:
        chat.fields["tools"] = None
        rollout = chat.rollout
        stream = await rollout.open_body(
            "/v1/chat/completions", {"model": "m", "messages": chat.messages, "stream": True}
        )
        await stream.has("two")
        await stream.drop()
        [record] = await rollout.settled(1)
        assert record.unusable_reason is Code.ABORTED
        said = record.output_items[0].atoms
        assert said is not None
        chat.take({"content": said[0].text})
        await refused(running, chat, Reason.PARENT_UNUSABLE, calls=2)

    words = {"content": "one two three four five six seven eight", "gap_s": 0.02}
    talked(tmp_path, work, engine_of({"turns": [words, {"content": "done"}]}))


def test_a_parent_of_which_too_little_is_known(tmp_path: Path) -> None:
    """A call from before continuation was asked for does not say what its prompt was rendered with."""

    async def main() -> None:
        async with agent().serve() as url:
            async with gateway(tmp_path, url) as running:
                rollout = await running.begin()
                chat = Chat(rollout)
                await chat.step()
            async with gateway(tmp_path, url, **ON) as running:
                chat.rollout = running.again(rollout)
                await chat.step()
                await chat.step()
                assert outcomes(await chat.rollout.settled(3)) == ["none", "parent_lost", "continued"]

    run(main())


def test_media(tmp_path: Path) -> None:
    """Placeholders of media are no text: in what is new, and in what the parent was asked."""
    engine = engine_of({"turns": [{"content": "one"}, {"content": "two"}, {"content": "three"}]})

    async def work(running: Running, chat: Chat) -> None:
        chat.fields["tools"] = None
        await chat.step()
        chat.messages[-1]["content"] = [{"type": "text", "text": "See."}, PICTURE]
        # The scripted engine takes no pictures; what matters is what is asked of it.
        assert (await chat.call()).status == 400
        records = await chat.rollout.settled(2)
        assert outcomes(records) == ["no_parent", "media"]
        assert sent_prompts(engine) == [None] * len(sent_prompts(engine))
        chat.messages[-1]["content"] = [{"type": "text", "text": "See."}]
        await chat.step()
        assert outcomes(await chat.rollout.settled(3))[-1] == "continued"

    talked(tmp_path, work, engine)


def test_another_route(tmp_path: Path) -> None:
    """A prompt of the Completions route is no conversation."""

    async def work(running: Running, chat: Chat) -> None:
        await chat.rollout.ask(Dialect.COMPLETIONS)
        assert outcomes(await chat.rollout.settled(1)) == ["route"]

    talked(tmp_path, work, agent())


@pytest.mark.parametrize("settings", [{"profile": "plain"}, {"renders": "differ"}, {"renders": "fail"}])
def test_an_engine_that_cannot(tmp_path: Path, settings: Json) -> None:
    """An engine that takes no tokens, or renders otherwise than it samples, is asked as ever."""

    async def main() -> None:
        engine = engine_of({"turns": [{"content": "one"}, {"content": "two"}]}, **settings)
        measured = settings.get("profile") != "plain"
        async with engine.serve() as url, gateway(tmp_path, url, measured=measured, **ON) as running:
            chat = Chat(await running.begin(), tools=None)
            await chat.step()
            await chat.step()
            records = await chat.rollout.settled(2)
            expected = "engine_unable" if measured else "parent_unusable"
            assert outcomes(records) == ["no_parent", expected]
            assert sent_prompts(engine) == [None, None]

    run(main())


@pytest.mark.parametrize("how", ["fail", "hang"])
def test_renderings_that_do_not_come(tmp_path: Path, how: str) -> None:
    """A call waits for renderings as long as it is allowed to, and goes out without them."""

    async def work(running: Running, chat: Chat) -> None:
        await chat.step()
        [url] = [replica.label for replica in running.gateway._replicas]
        async with running.client.post(f"{url}/script/state", json={"renders": how}) as answer:
            assert answer.status == 200
        await chat.step()
        async with running.client.post(f"{url}/script/state", json={"renders": "right"}) as answer:
            assert answer.status == 200
        await chat.step()
        records = await chat.rollout.settled(3)
        assert outcomes(records) == ["no_parent", "render_failed", "continued"]
        # The prompt of the call that was rendered anew is what is continued.
        assert records[2].base_call_id == records[1].model_call_id

    talked(tmp_path, work, agent(), render_timeout_s=0.5)


def test_renderings_that_waver(tmp_path: Path) -> None:
    """Witnesses that contradict each other prove nothing."""

    async def work(running: Running, chat: Chat) -> None:
        await chat.step()
        [url] = [replica.label for replica in running.gateway._replicas]
        async with running.client.post(f"{url}/script/state", json={"renders": "waver"}) as answer:
            assert answer.status == 200
        await chat.step()
        assert outcomes(await chat.rollout.settled(2))[1] == "witnesses_disagree"

    talked(tmp_path, work, agent())


def test_a_parent_that_ended_as_its_template_does_not(tmp_path: Path) -> None:
    """A model may end with another token than its template writes: what belongs behind that is not known."""

    async def work(running: Running, chat: Chat) -> None:
        chat.fields["tools"] = None
        await chat.step()
        await refused(running, chat, Reason.END_OF_TURN_UNKNOWN, calls=2)

    talked(
        tmp_path, work, engine_of({"turns": [{"content": "one", "eos": False, "finish": "stop"}, {"content": "two"}]})
    )


def test_every_reason_has_its_test() -> None:
    """A reason that nothing reaches is none."""
    text = Path(__file__).read_text(encoding="utf-8")
    missing = [reason for reason in Reason if not re.search(rf'Reason\.{reason.name}\b|"{reason}"', text)]
    assert not missing


def test_a_prompt_that_is_too_long(tmp_path: Path) -> None:
    """The template would drop thoughts that the tokens still hold: then it had better."""

    async def work(running: Running, chat: Chat) -> None:
        chat.fields["tools"] = None
        await chat.step()
        await refused(running, chat, Reason.TOO_LONG, calls=2)

    thought = {"reasoning": "hm " * 150, "content": "one"}
    engine = engine_of({"turns": [thought, {"content": "two"}]}, thinking=True, max_model_len=340)
    talked(tmp_path, work, engine)


@pytest.mark.parametrize("settings", [{}, {"profile": "sglang"}])
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_samples_from_another_prompt(tmp_path: Path, settings: Json, stream: bool) -> None:
    """The call is not usable, nobody continues it, and the engine is given no prompt any more."""
    lie = {"reasoning": "hm", "content": "two", "wrong": {"prompt_ids": "differ"}}
    turns = [{"reasoning": "hm", "content": "one"}, lie, {"content": "three"}, {"content": "four"}]
    engine = engine_of({"turns": turns}, thinking=True, **settings)

    async def work(running: Running, chat: Chat) -> None:
        chat.fields["tools"] = None
        await chat.step()
        answer = await chat.call(stream=stream)
        assert answer.status == 200
        records = await chat.rollout.settled(2)
        assert records[1].unusable_reason is Code.PROMPT_IDS_DIFFER
        assert "another one" in (records[1].unusable_detail or "")
        assert running.metric("continuation_alarms_total", engine=records[1].upstream or "") == 1
        chat.take({"content": "\n\ntwo", "reasoning": "\nhm\n"})
        await chat.step()
        other = Chat(await running.begin("other"), tools=None)
        await other.step()
        await other.step()
        assert outcomes(await chat.rollout.settled(3)) == ["no_parent", "continued", "parent_unusable"]
        assert outcomes(await other.rollout.settled(2)) == ["no_parent", "engine_off"]
        # An ordinary call whose prompt ids differ from nothing is as good as ever.
        assert chat.rollout.records()[2].usable

    talked(tmp_path, work, engine)


def test_an_engine_that_restarts_is_given_prompts_again(tmp_path: Path) -> None:
    """What it did before, with other settings or another version, is no longer held against it."""

    async def work(running: Running, chat: Chat) -> None:
        chat.fields["tools"] = None
        await chat.step()
        [replica] = running.gateway._replicas
        replica.stop_continuing()
        await chat.step()
        replica.epoch += 1
        await chat.step()
        assert outcomes(await chat.rollout.settled(3)) == ["no_parent", "engine_off", "continued"]

    talked(tmp_path, work, engine_of({"turns": [{"content": str(turn)} for turn in range(3)]}))


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_refuses_the_prompt(tmp_path: Path, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was sampled: the call goes out again as an ordinary one, and its harness notices nothing."""
    from gristmill.scripted import model
    from gristmill.scripted.asked import Asked, EngineRefused

    token_in = model._token_in

    def refuse(asked: Asked, settings: Any) -> tuple[list[int] | None, str]:
        ids, where = token_in(asked, settings)
        if ids is not None and PROBE not in json.dumps(asked.body):
            raise EngineRefused(400, "prompt_token_ids are not supported with this model")
        return ids, where

    monkeypatch.setattr(model, "_token_in", refuse)
    engine = agent()

    async def work(running: Running, chat: Chat) -> None:
        await chat.step()
        answer = await chat.call(stream=stream)
        assert (answer.status, answer.streamed) == (200, stream)
        records = await chat.rollout.settled(2)
        assert outcomes(records) == ["no_parent", "engine_unable"]
        assert records[1].usable
        assert [given is None for given in sent_prompts(engine)][-1]
        # What an ordinary call is refused for is still told.
        answer = await chat.call(max_tokens=-1, stream=stream)
        assert answer.status == 400

    talked(tmp_path, work, engine)


def test_a_local_tokenizer_has_to_be_the_engines(tmp_path: Path) -> None:
    """A folder that renders otherwise than the engine samples would make good prompts of another model."""

    class Local:
        def __init__(self, ids: list[int]) -> None:
            self.name = "tokenizer"
            self.ids = ids
            self.asked = 0

        async def render(self, asked: Rendering) -> list[int]:
            self.asked += 1
            return self.ids

    async def work(running: Running, chat: Chat) -> None:
        await chat.step()
        [replica] = running.gateway._replicas
        local = Local([1, 2, 3])
        planner = Planner(running.gateway.metrics, running.gateway.log, 5.0, local)
        assert await planner._renderer(replica, "m") is None
        assert await planner._renderer(replica, "m") is None
        assert local.asked == 1
        planner._alike.clear()
        local.ids = list(replica.capabilities.question_ids)
        assert await planner._renderer(replica, "m") is local

    talked(tmp_path, work, agent(renders="fail"))
