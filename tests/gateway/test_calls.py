"""What a harness gets and what is stored of it, in every dialect, streamed or not."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from gristmill.errors import Code
from gristmill.records import CallRecord, Dialect, ItemKind, ParentResolution
from gristmill.scripted import Seen
from tests.gateway.running import (
    DIALECTS,
    DONE,
    PATHS,
    Answer,
    Asked,
    HandEngine,
    Rollout,
    Wire,
    body_of,
    engine_of,
    error_of,
    gateway,
    piece,
    run,
    sampled,
    saw_finish,
    spoken,
    usage,
)
from tests.gateway.test_streaming import TOOLS

dialects = pytest.mark.parametrize("dialect", DIALECTS)
streams = pytest.mark.parametrize("stream", [False, True])
passed_on = pytest.mark.parametrize("dialect", [Dialect.CHAT, Dialect.COMPLETIONS])


@streams
@dialects
def test_a_call_is_served_and_stored(tmp_path: Path, dialect: Dialect, stream: bool) -> None:
    # The one thing that everything else stands on.
    async def main() -> None:
        engine = engine_of({"content": "Hello there."})
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            answer = await rollout.ask(dialect, stream=stream)
            assert spoken(dialect, answer) == "Hello there."
            assert saw_finish(dialect, answer)
            [record] = await rollout.settled(1)
            assert record.usable
            assert record.model_call_id == answer.call_id
            assert (record.requested_model, record.model) == ("asked-name", "m")
            rollout.sound()

    run(main())


# ---- tokens ----------------------------------------------------------------------------------------------------------

IDS = [98765401, 98765402, 98765403]
PROMPT = [98765301, 98765302]
LOGPROB = -0.98765
TOKEN_FIELDS = (
    "token_ids",
    "prompt_token_ids",
    "response_token_ids",
    "completion_token_ids",
    "weight_versions",
    "routed_experts",
    "sampling_mask",
    "sglext",
    "meta_info",
    "raw_output",
    "kv_transfer_params",
)


def more_tokens() -> dict[str, Any]:
    """Return what engines and routers say beside a choice's own fields."""
    return {
        "weight_versions": [{"version": "98765", "start": 0, "end": 0}],
        "routed_experts": [[98765]],
        "sampling_mask": [98765],
        "response_token_ids": IDS,
        "meta_info": {"output_token_logprobs": [[LOGPROB, one, None] for one in IDS]},
        "raw_output": {"completion_token_ids": IDS, "prompt_token_ids": PROMPT},
        "provider_specific_fields": {"token_ids": IDS, "prompt_token_ids": PROMPT},
    }


def full_of_tokens(seen: Asked, *, stream: bool) -> list[bytes]:
    """Return an answer with token fields wherever an engine may put them: events, or one body."""
    chat = seen.path.endswith("/chat/completions")
    root = {
        "kv_transfer_params": {"prompt_token_ids": PROMPT},
        "routed_experts": [98765],
        "sglext": {"output_ids": IDS},
    }
    end = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    if stream:
        made: list[bytes] = []
        pieces = [piece(seen, prompt=PROMPT)]
        pieces += [piece(seen, text, [one], logprobs=[LOGPROB]) for text, one in zip("abc", IDS, strict=True)]
        pieces.append(piece(seen, "", [], finish="stop"))
        for event in pieces:
            chunk = json.loads(event[6:])
            chunk |= root
            for choice in chunk["choices"]:
                choice.update(more_tokens())
                if chat:
                    choice["delta"]["provider_specific_fields"] = {"token_ids": IDS}
            made.append(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        return [*made, b"event: sglext\ndata: " + json.dumps(root["sglext"]).encode() + b"\n\n", usage(2, 3), DONE]
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "token_ids": IDS, **more_tokens()}
    if chat:
        message = {"role": "assistant", "content": "abc", "provider_specific_fields": {"token_ids": IDS}}
        logprobs: Any = {"content": [{"token": "x", "logprob": LOGPROB, "top_logprobs": []} for _ in IDS]}
        choice |= {"message": message, "logprobs": logprobs}
        root["prompt_token_ids"] = PROMPT
    else:
        logprobs = {"tokens": ["x"] * 3, "token_logprobs": [LOGPROB] * 3, "top_logprobs": None}
        choice |= {"text": "abc", "logprobs": logprobs, "prompt_token_ids": PROMPT}
    return [json.dumps({"id": "engine-id", "model": "m", "choices": [choice], "usage": end, **root}).encode()]


@streams
@dialects
def test_no_token_reaches_who_did_not_ask(tmp_path: Path, dialect: Dialect, stream: bool) -> None:
    # An agent that sees token ids sees that it is recorded; some clients refuse fields that they do not know.
    async def main() -> None:
        async def play(seen: Asked, wire: Wire) -> None:
            if not stream:
                await wire.text(full_of_tokens(seen, stream=False)[0].decode(), content_type="application/json")
                return
            await wire.stream()
            for event in full_of_tokens(seen, stream=True):
                await wire.piece(event)
            await wire.end()

        async with HandEngine(play) as engine, gateway(tmp_path, engine.url, measured=False) as running:
            rollout = await running.begin()
            answer = await rollout.ask(dialect, stream=stream)
            assert spoken(dialect, answer) == "abc"
            assert b"98765" not in answer.raw, answer.raw
            for name in TOKEN_FIELDS:
                assert f'"{name}"'.encode() not in answer.raw, (name, answer.raw)
            [record] = await rollout.settled(1)
            assert record.usable, record.unusable_detail
            assert tokens_of(rollout, record) == (PROMPT, IDS)
            assert rollout.exchange(record.model_call_id).reply is not None
            assert "98765" not in json.dumps(rollout.exchange(record.model_call_id).reply, default=str)

    run(main())


def tokens_of(rollout: Rollout, record: CallRecord) -> tuple[list[int], list[int]]:
    """Return prompt and sampled ids of a record that was stored whole."""
    assert record.base_call_id is None
    ids_T = rollout.capture().tokens[record.model_call_id].ids_T
    return ids_T[: record.prompt_len].tolist(), ids_T[record.prompt_len :].tolist()


async def asked_again(url: str, seen: Seen) -> Any:
    """Ask the engine itself what it was asked through the gateway, for a body."""
    path = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}[seen.route]
    body = {name: value for name, value in seen.body.items() if name not in {"stream", "stream_options"}}
    if "return_meta_info" not in body:
        body |= {"return_meta_info": True, "return_prompt_token_ids": True}
    async with aiohttp.ClientSession() as client, client.post(url + path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


@pytest.mark.parametrize("profile", ["vllm", "sglang"])
@dialects
def test_what_is_stored_is_what_the_engine_sampled(tmp_path: Path, dialect: Dialect, profile: str) -> None:
    # One wrong id or log-probability, and the policy is trained on what it did not do.
    async def main() -> None:
        engine = engine_of({"content": "One, two; mühle → {{choice}}."}, profile=profile, split=0.3)
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            several = dialect in {Dialect.CHAT, Dialect.COMPLETIONS}
            for number, (stream, n) in enumerate(product((False, True), (1, 3) if several else (1,))):
                rollout = await running.begin(f"r{number}")
                answer = await rollout.ask(dialect, stream=stream, **({"n": n} if n > 1 else {}))
                assert saw_finish(dialect, answer)
                records = await rollout.settled(n)
                seen = sampled(engine)[-1]
                own = await asked_again(url, seen)
                capture = rollout.capture()
                for record, choice in zip(records, own["choices"], strict=True):
                    assert record.usable, (stream, n, record.unusable_detail)
                    delta = capture.tokens[record.model_call_id]
                    ids, logprobs = said_tokens(choice)
                    new = record.cum_len - record.prompt_len
                    assert delta.ids_T[-new:].tolist() == ids
                    assert np.array_equal(delta.logprobs_T[-new:], np.array(logprobs, np.float32))
                    assert delta.mask_T.tolist() == [0] * (len(delta.ids_T) - new) + [1] * new
                    assert record.prompt_len == own["usage"]["prompt_tokens"]
                rollout.sound()

    run(main())


def said_tokens(choice: Any) -> tuple[list[int], list[float]]:
    """Return ids and log-probabilities of a choice in an engine's body."""
    if "meta_info" in choice and choice["meta_info"].get("output_token_logprobs"):
        pairs = choice["meta_info"]["output_token_logprobs"]
        return [one[1] for one in pairs], [one[0] for one in pairs]
    logprobs = choice["logprobs"]
    values = logprobs.get("token_logprobs") or [one["logprob"] for one in logprobs["content"]]
    return choice.get("token_ids") or choice["response_token_ids"], values


@streams
@passed_on
def test_token_ids_for_who_asks(tmp_path: Path, dialect: Dialect, stream: bool) -> None:
    # A trainer's own harness reads them off the reply.
    async def main() -> None:
        engine = engine_of({"content": "Hello there."})
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            answer = await rollout.ask(dialect, stream=stream, return_token_ids=True)
            replies = answer.events if stream else [answer.value]
            choices = [choice for reply in replies for choice in reply["choices"]]
            ids = [one for choice in choices for one in choice.get("token_ids") or ()]
            prompts = [found for found in (prompt_ids(reply) for reply in replies) if found]
            [record] = await rollout.settled(1)
            assert (prompts[0], ids) == tokens_of(rollout, record)
            assert all(choice.get("logprobs") is None for choice in choices)

    run(main())


def prompt_ids(reply: Any) -> list[int] | None:
    """Return the ids of the prompt in a body or a chunk."""
    if reply.get("prompt_token_ids"):
        return reply["prompt_token_ids"]
    return next((choice["prompt_token_ids"] for choice in reply["choices"] if choice.get("prompt_token_ids")), None)


@streams
@pytest.mark.parametrize("dialect", [Dialect.CHAT, Dialect.COMPLETIONS, Dialect.RESPONSES])
def test_logprobs_for_who_asks(tmp_path: Path, dialect: Dialect, stream: bool) -> None:
    # A harness that chooses by confidence needs its own, and no ids with them.
    asks: dict[Dialect, dict[str, Any]] = {
        Dialect.CHAT: {"logprobs": True, "top_logprobs": 2},
        Dialect.COMPLETIONS: {"logprobs": 2},
        Dialect.RESPONSES: {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    }

    async def main() -> None:
        engine = engine_of({"content": "Hello there."})
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            answer = await rollout.ask(dialect, stream=stream, **asks[dialect])
            [record] = await rollout.settled(1)
            new = record.cum_len - record.prompt_len
            values = rollout.capture().tokens[record.model_call_id].logprobs_T[-new:]
            told = said_logprobs(dialect, answer)
            # Responses says them of the text, and the end of turn has none.
            shown = len(told) if dialect is Dialect.RESPONSES else new
            assert new - 1 <= shown <= new
            assert np.array_equal(np.array(told, np.float32), values[:shown])
            assert b"token_ids" not in answer.raw
            # In Completions the names are the same with and without.
            assert (await rollout.ask(dialect, stream=stream)).raw.count(b'"logprob"') == 0

    run(main())


def said_logprobs(dialect: Dialect, answer: Answer) -> list[float]:
    """Return the log-probabilities that a client was told."""
    if dialect is Dialect.RESPONSES:
        found: list[Any] = []
        if answer.streamed:
            done = [event for event in answer.events if event["type"] == "response.output_text.done"]
            found = [one for event in done for one in event["logprobs"]]
        else:
            found = [
                one
                for item in answer.value["output"]
                if item["type"] == "message"
                for part in item["content"]
                for one in part["logprobs"]
            ]
        return [one["logprob"] for one in found]
    replies = answer.events if answer.streamed else [answer.value]
    told = [choice["logprobs"] for reply in replies for choice in reply["choices"] if choice.get("logprobs")]
    if dialect is Dialect.COMPLETIONS:
        return [value for one in told for value in one["token_logprobs"]]
    return [value["logprob"] for one in told for value in one["content"]]


@passed_on
def test_usage_for_who_asks(tmp_path: Path, dialect: Dialect) -> None:
    # A chunk without choices breaks clients that index the first one; one that is missing breaks those that count.
    async def main() -> None:
        engine = engine_of({"content": "Hello there."})
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            plain = await rollout.ask(dialect, stream=True)
            asked = await rollout.ask(dialect, stream=True, stream_options={"include_usage": True})
            refused = await rollout.ask(dialect, stream=True, stream_options={"include_usage": False})
            await rollout.settled(3)
            for answer in (plain, refused):
                assert all(event["choices"] for event in answer.events)
                assert b'"usage":{' not in answer.raw
            last = asked.events[-1]
            assert last["choices"] == []
            record = rollout.record(asked.call_id)
            assert last["usage"]["prompt_tokens"] == record.prompt_len
            assert last["usage"]["completion_tokens"] == record.cum_len - record.prompt_len

    run(main())


@streams
def test_reasoning_that_was_not_wanted(tmp_path: Path, stream: bool) -> None:
    # It is sampled all the same: the record has it, the reply has not.
    async def main() -> None:
        engine = engine_of({"reasoning": "The wheel turns.", "content": "Hello there."}, thinking=True)
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            without = await rollout.ask(Dialect.CHAT, stream=stream, include_reasoning=False)
            assert b"wheel" not in without.raw
            assert spoken(Dialect.CHAT, without).strip() == "Hello there."
            with_it = await rollout.ask(Dialect.CHAT, "Say more.", stream=stream)
            assert "The wheel turns." in thought(with_it)
            assert thought(without) == ""
            records = await rollout.settled(2)
            assert all(record.usable for record in records)
            assert sampled(engine)[0].body["include_reasoning"] is True
            new = [record.cum_len - record.prompt_len for record in records]
            assert new[0] == new[1]

    run(main())


def thought(answer: Answer) -> str:
    """Return the reasoning that a Chat client was told."""
    replies = answer.events if answer.streamed else [answer.value]
    said = [choice.get("delta") or choice.get("message") or {} for reply in replies for choice in reply["choices"]]
    return "".join(one.get("reasoning") or one.get("reasoning_content") or "" for one in said)


# ---- conversations ---------------------------------------------------------------------------------------------------


def turns_of(dialect: Dialect, answer: Answer, result: str) -> list[Any]:
    """Return what a harness adds to its conversation: the reply as it came, and the results of its tools."""
    value = answer.value
    if dialect is Dialect.RESPONSES:
        calls = [item for item in value["output"] if item["type"] == "function_call"]
        outputs = [{"type": "function_call_output", "call_id": call["call_id"], "output": result} for call in calls]
        return [*value["output"], *(outputs or [{"role": "user", "content": result}])]
    if dialect is Dialect.MESSAGES:
        used = [block for block in value["content"] if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": block["id"], "content": result} for block in used]
        said = {"role": "assistant", "content": value["content"]}
        return [said, {"role": "user", "content": results or result}]
    message = value["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": result} for call in message.get("tool_calls") or ()
    ]
    return [message, *(results or [{"role": "user", "content": result}])]


def talk(dialect: Dialect, said: list[Any]) -> dict[str, Any]:
    return body_of(dialect, tools=TOOLS[dialect], **{"input" if dialect is Dialect.RESPONSES else "messages": said})


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("dialect", TOOLS)
def test_a_conversation_with_tools(tmp_path: Path, dialect: Dialect, thinking: bool) -> None:
    # A call whose parent is not found is a rollout of its own, and the reward reaches only the last turn.
    async def main() -> None:
        said = {"reasoning": "I look."} if thinking else {}
        steps = [
            {**said, "content": "First.", "tool_calls": [{"name": "read", "arguments": {"path": "a"}}]},
            {**said, "tool_calls": [{"name": "read", "arguments": {"path": p}} for p in ("b", "ü")]},
            {**said, "content": "Done."},
            {**said, "content": "Once more."},
        ]
        engine = engine_of({"turns": steps}, thinking=thinking)
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            said_so_far: list[Any] = [{"role": "user", "content": "Read two files."}]
            ids: list[str] = []
            for number in range(4):
                answer = await rollout.post(PATHS[dialect], talk(dialect, said_so_far))
                assert saw_finish(dialect, answer), answer
                ids.append(answer.call_id)
                said_so_far += turns_of(dialect, answer, f"contents {number}")
            records = await rollout.settled(4)
            assert [record.model_call_id for record in records] == ids
            assert [record.parent_call_id for record in records] == [None, *ids[:-1]]
            resolved = [record.parent_resolution for record in records]
            assert resolved == [ParentResolution.ROOT, *[ParentResolution.RESOLVED] * 3]
            assert all(record.usable for record in records)
            kinds = [[item.kind for item in record.output_items] for record in records]
            assert [found.count(ItemKind.TOOL_CALL) for found in kinds] == [1, 2, 0, 0]
            if not thinking:
                # Text is rendered as it was sampled; calls are not, and their tokens are stored anew.
                assert records[3].base_call_id == ids[2]
                assert records[3].prev_len == records[2].cum_len
            rollout.sound()

    run(main())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", [Dialect.CHAT, Dialect.RESPONSES, Dialect.MESSAGES])
def test_branches_of_a_conversation(tmp_path: Path, dialect: Dialect, stream: bool) -> None:
    # A harness that goes back and tries another way must not have its two ways mixed up.
    async def main() -> None:
        engine = engine_of({"content": "Reply to {{user}}."})
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()

            async def ask(*said: str) -> Answer:
                roles = ("user", "assistant")
                messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(said)]
                name = "input" if dialect is Dialect.RESPONSES else "messages"
                return await rollout.ask(dialect, stream=stream, **{name: messages})

            root = await ask("a")
            left = await ask("a", "Reply to a.", "left")
            right = await ask("a", "Reply to a.", "right")
            deeper = await ask("a", "Reply to a.", "left", "Reply to left.", "on")
            edited = await ask("a", "Reply to A.", "left")
            stranger = await ask("b", "Reply to a.", "left")
            await rollout.settled(6)
            expected = [
                (root, None, ParentResolution.ROOT),
                (left, root, ParentResolution.RESOLVED),
                (right, root, ParentResolution.RESOLVED),
                (deeper, left, ParentResolution.RESOLVED),
                (edited, None, ParentResolution.ROOT),
                (stranger, None, ParentResolution.ROOT),
            ]
            for answer, parent, resolution in expected:
                record = rollout.record(answer.call_id)
                assert record.parent_call_id == (None if parent is None else parent.call_id)
                assert record.parent_resolution is resolution
            assert rollout.record(left.call_id).base_call_id == root.call_id
            rollout.sound()

    run(main())


@streams
def test_previous_response_id(tmp_path: Path, stream: bool) -> None:
    # The harness sends only what is new; engine, lineage and evidence need all of it.
    async def main() -> None:
        engine = engine_of({"content": "Reply to {{user}}."})
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            dialect, previous, ids = Dialect.RESPONSES, None, list[str]()
            for text in ("a", "b", "c"):
                more = {} if previous is None else {"previous_response_id": previous}
                answer = await rollout.ask(dialect, text, stream=stream, **more)
                assert spoken(dialect, answer) == f"Reply to {text}."
                whole = answer.events[-1]["response"] if stream else answer.value
                previous = whole["id"]
                ids.append(answer.call_id)
            records = await rollout.settled(3)
            assert [record.parent_call_id for record in records] == [None, *ids[:-1]]
            assert [message["content"] for message in sampled(engine)[-1].body["messages"] if message["role"] == "user"]
            assert len(sampled(engine)[-1].body["messages"]) == 5
            unknown = await rollout.ask(dialect, "d", stream=stream, previous_response_id="resp_unheard_of")
            assert unknown.status == 400
            assert b"previous_response_id" in unknown.raw

    run(main())


@streams
@passed_on
def test_choices_have_records_of_their_own(tmp_path: Path, dialect: Dialect, stream: bool) -> None:
    # Of two samples one may be continued; the other must not get its reward.
    async def main() -> None:
        engine = engine_of({"content": "Choice {{choice}} here."})
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            answer = await rollout.ask(dialect, stream=stream, n=2)
            records = await rollout.settled(2)
            assert [record.choice_index for record in records] == [0, 1]
            assert [record.model_call_id for record in records] == [answer.call_id, f"{answer.call_id}#1"]
            assert records[0].response_id == records[1].response_id
            texts = [[atom.text for item in record.output_items for atom in item.atoms] for record in records]
            assert texts[0] != texts[1]
            assert all(record.usable for record in records)
            assert records[1].prompt_len == records[0].prompt_len
            if dialect is Dialect.CHAT:
                said = [
                    {"role": "user", "content": "Say hello."},
                    {"role": "assistant", "content": "Choice 1 here."},
                    {"role": "user", "content": "Go on."},
                ]
                after = await rollout.ask(dialect, messages=said)
                await rollout.settled(3)
                assert rollout.record(after.call_id).parent_call_id == records[1].model_call_id
            rollout.sound()

    run(main())


@streams
def test_an_echoed_prompt_is_not_sampled(tmp_path: Path, stream: bool) -> None:
    # The prompt comes back as text; trained on, the model would learn to repeat its user.
    async def main() -> None:
        engine = engine_of({"content": " and more."})
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            plain = await rollout.ask(Dialect.COMPLETIONS, "Once upon a time", stream=stream)
            echoed = await rollout.ask(Dialect.COMPLETIONS, "Once upon a time", stream=stream, echo=True)
            assert spoken(Dialect.COMPLETIONS, echoed) == "Once upon a time" + spoken(Dialect.COMPLETIONS, plain)
            records = await rollout.settled(2)
            assert all(record.usable for record in records), [record.unusable_detail for record in records]
            assert tokens_of(rollout, records[0])[0] == tokens_of(rollout, records[1])[0]
            assert records[0].cum_len - records[0].prompt_len == records[1].cum_len - records[1].prompt_len

    run(main())


# ---- settings --------------------------------------------------------------------------------------------------------


@dialects
def test_settings_over_what_a_harness_asks(tmp_path: Path, dialect: Dialect) -> None:
    # Harnesses hard-wire temperature 0; a group of equal rollouts teaches nothing.
    async def main() -> None:
        engine = engine_of({"content": "Hello there."})
        overrides = {"temperature": 0.9, "top_k": 5, "seed": 3}
        async with engine.serve() as url, gateway(tmp_path, url, overrides=overrides) as running:
            general = await running.begin("general")
            special = await running.begin("special", overrides={"temperature": 1.1, "max_tokens": 7})
            one = await general.ask(dialect, temperature=0, top_p=0.5)
            body = sampled(engine)[-1].body
            assert [body[name] for name in ("temperature", "top_p", "top_k", "seed")] == [0.9, 0.5, 5, 3]
            two = await special.ask(dialect, temperature=0)
            body = sampled(engine)[-1].body
            assert [body[name] for name in ("temperature", "top_k", "seed", "max_tokens")] == [1.1, 5, 3, 7]
            assert "override:temperature" in one.headers["x-gristmill-notes"]
            assert "override:max_tokens" in two.headers["x-gristmill-notes"]
            [first], [second] = await general.settled(1), special.records()
            assert (first.sampling.temperature, first.sampling.top_p, first.sampling.top_k) == (0.9, 0.5, 5)
            assert second.sampling.temperature == 1.1
            assert set(second.changes) >= {"override:temperature", "override:max_tokens"}
            # Evidence is what the harness asked.
            asked: Any = special.exchange(two.call_id).request
            assert float(asked["temperature"]) == 0

    run(main())


def test_settings_survive_a_restart(tmp_path: Path) -> None:
    # Half of a rollout at another temperature, and no record would say why.
    async def main() -> None:
        engine = engine_of({"content": "Hello there."})
        async with engine.serve() as url:
            async with gateway(tmp_path, url) as running:
                rollout = await running.begin(overrides={"temperature": 1.1})
            async with gateway(tmp_path, url) as running:
                rollout = running.again(rollout)
                await rollout.ask(Dialect.CHAT, temperature=0)
                assert sampled(engine)[-1].body["temperature"] == 1.1

    run(main())


@streams
@dialects
def test_names_of_models(tmp_path: Path, dialect: Dialect, stream: bool) -> None:
    # Harnesses check that the reply names the model they asked for; the engine knows another name.
    async def main() -> None:
        engine = engine_of({"content": "Hello there."}, models=["m", "m2"])
        async with engine.serve() as url, gateway(tmp_path, url, models=["gpt-x=m2", "m"]) as running:
            rollout = await running.begin()
            for asked, known in (("gpt-x", "m2"), ("m", "m")):
                answer = await rollout.ask(dialect, stream=stream, model=asked)
                assert sampled(engine)[-1].body["model"] == known
                assert f'"model":"{asked}"'.encode() in answer.raw.replace(b'": "', b'":"')
                await running.idle()
                record = rollout.record(answer.call_id)
                assert (record.requested_model, record.model) == (asked, known)
            unknown = await rollout.ask(dialect, stream=stream, model="m2")
            assert unknown.status == 404
            error = error_of(dialect, unknown)
            assert error is not None
            assert "gpt-x" in error["message"]
            assert str(Code.MODEL_UNKNOWN) in unknown.raw.decode()
            assert len(sampled(engine)) == 2

    run(main())


@dialects
def test_lengths_beyond_the_model(tmp_path: Path, dialect: Dialect) -> None:
    # Harnesses ask for more than a small model has, and the engine would refuse every call.
    async def main() -> None:
        name = "max_output_tokens" if dialect is Dialect.RESPONSES else "max_tokens"
        engine = engine_of({"content": "Hello there."}, max_model_len=500)
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            answer = await rollout.ask(dialect, **{name: 100_000})
            assert sampled(engine)[-1].body["max_tokens"] <= 500
            assert "clamped:max_tokens=100000->500" in answer.headers["x-gristmill-notes"].split(",")

    run(main())


@streams
@dialects
def test_a_prompt_that_is_too_long(tmp_path: Path, dialect: Dialect, stream: bool) -> None:
    # These words and this code are what harnesses compact their history for; without them they give up.
    async def main() -> None:
        engine = engine_of({"content": "Hello there."}, max_model_len=200)
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            answer = await rollout.ask(dialect, "corn " * 400, stream=stream)
            assert answer.status == 400
            error = error_of(dialect, answer)
            assert error is not None
            assert "prompt is too long" in error["message"]
            if dialect is Dialect.MESSAGES:
                assert error["type"] == "invalid_request_error"
            else:
                assert error["code"] == "context_length_exceeded"
            [record] = await rollout.settled(1)
            assert not record.usable

    run(main())


# ---- side routes -----------------------------------------------------------------------------------------------------


def test_counting_tokens(tmp_path: Path) -> None:
    # Claude Code decides by this number when to compact.
    async def main() -> None:
        engine = engine_of({"content": "Hello there."})
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            body = body_of(Dialect.MESSAGES, "Count me.", system="You mill.", tools=TOOLS[Dialect.MESSAGES])
            counting = {name: value for name, value in body.items() if name != "max_tokens"}
            counted = await rollout.post("/v1/messages/count_tokens", counting)
            called = await rollout.post(PATHS[Dialect.MESSAGES], body)
            [record] = await rollout.settled(1)
            assert counted.value == {"input_tokens": record.prompt_len}
            assert called.value["usage"]["input_tokens"] == record.prompt_len
            chat = [{"role": "user", "content": "Count me."}]
            tokens = await rollout.post("/tokenize", {"model": "asked-name", "messages": chat})
            assert tokens.value["count"] == len(tokens.value["tokens"])
            for path, wrong in (("/v1/messages/count_tokens", {"model": "m"}), ("/tokenize", [])):
                answer = await rollout.post(path, wrong)
                assert answer.status == 400, answer
                dialect = Dialect.MESSAGES if "messages" in path else Dialect.CHAT
                assert error_of(dialect, answer) is not None
            # Counting is no call.
            assert len(rollout.records()) == 1

    run(main())


@pytest.mark.parametrize("profile", ["vllm", "sglang"])
def test_counting_tokens_of_a_text(tmp_path: Path, profile: str) -> None:
    # Harnesses that cut files to a budget ask for plain text.
    async def main() -> None:
        engine = engine_of({"content": "Hello there."}, profile=profile)
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            plain = await rollout.post("/tokenize", {"model": "asked-name", "prompt": "Count me."})
            assert plain.status == 200
            assert plain.value["count"] == len(plain.value["tokens"]) > 0

    run(main())


def test_lists_of_models(tmp_path: Path) -> None:
    # Some clients ask first, each in its own shape, and some read the window from it.
    async def main() -> None:
        engine = engine_of({"content": "Hello there."}, max_model_len=1000)
        async with engine.serve() as url:
            for models, names in (([], ["m"]), (["gpt-x=m", "*"], ["gpt-x"])):
                folder = tmp_path / names[0]
                folder.mkdir()
                async with gateway(folder, url, models=models) as running:
                    rollout = await running.begin()
                    listed = (await running.get("/v1/models", rollout.headers())).value
                    assert listed["object"] == "list"
                    assert [model["id"] for model in listed["data"]] == names
                    assert {model["object"] for model in listed["data"]} == {"model"}
                    assert listed["data"][0]["max_model_len"] == 1000
                    own = rollout.headers(anthropic_version="2023-06-01")
                    other = (await running.get("/r/r/v1/models", own)).value
                    assert [model["id"] for model in other["data"]] == names
                    assert {model["type"] for model in other["data"]} == {"model"}
                    assert (other["has_more"], other["first_id"], other["last_id"]) == (False, names[0], names[0])

    run(main())


ODD: dict[str, Any] = {
    "weight_versions": [["w0", 3]],
    "routed_experts": "?",
    "sampling_mask": {"a": 1},
    "meta_info": [1],
    "raw_output": "text",
    "provider_specific_fields": "text",
    "response_token_ids": "text",
    "token_ids": {"a": 1},
}


@pytest.mark.parametrize(("stream", "field"), list(product((False, True), ODD)))
def test_fields_that_nobody_knows(tmp_path: Path, stream: bool, field: str) -> None:
    # A new release of an engine writes a field otherwise, and every call of every harness fails.
    async def main() -> None:
        async def play(seen: Asked, wire: Wire) -> None:
            odd = {field: ODD[field]}
            if stream:
                chunk = json.loads(piece(seen, "hi", [5], finish="stop")[6:])
                chunk["choices"][0] |= odd
                await wire.stream()
                await wire.piece(piece(seen, prompt=[1, 2]))
                await wire.piece(b"data: " + json.dumps(chunk).encode() + b"\n\n" + usage(2, 1) + DONE)
                await wire.end()
                return
            body = json.loads(full_of_tokens(seen, stream=False)[0])
            choice = body["choices"][0]
            for name in more_tokens():
                del choice[name]
            choice["message"] = {"role": "assistant", "content": "hi"}
            body["choices"] = [{**choice, **odd}]
            await wire.json(body)

        async with HandEngine(play) as engine, gateway(tmp_path, engine.url, measured=False) as running:
            rollout = await running.begin()
            answer = await rollout.ask(Dialect.CHAT, stream=stream)
            assert answer.status == 200, answer
            assert spoken(Dialect.CHAT, answer) == "hi"
            assert saw_finish(Dialect.CHAT, answer)
            await rollout.settled(1)
            rollout.sound()

    run(main())
