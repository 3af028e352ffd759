"""What an engine returns when it samples, found out by asking it.

Invariant: everything is measured on this engine, now; what could not be measured is `unknown`, and whatever went wrong
is a finding. Nothing is changed: requests sample a few tokens, and none but a probe's own could be aborted.

Not here: what an engine says of itself (identity), how a reply is read (captures).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, Final, cast
from uuid import uuid4

import msgspec

from gristmill.gateway.upstream.adapters import engine_for
from gristmill.gateway.upstream.between import between
from gristmill.gateway.upstream.client import Client
from gristmill.gateway.upstream.identity import Identity, identify
from gristmill.gateway.upstream.logprobs_mode import measure_mode
from gristmill.gateway.upstream.protocol import Capabilities, Engine, EngineKind, Support
from gristmill.gateway.upstream.rendered import rendered_ids
from gristmill.gateway.upstream.routes import TOKENIZE
from gristmill.gateway.upstream.sample import QUESTION, Sample, Sampler
from gristmill.gateway.upstream.sglang import ABORT as SGLANG_ABORT
from gristmill.gateway.upstream.spec import UpstreamSpec
from gristmill.gateway.upstream.vllm import ABORT as VLLM_ABORT
from gristmill.gateway.upstream.vllm import RENDER

__all__ = ["capabilities_of", "measure", "probe"]

_VLLM, _SGLANG = EngineKind.VLLM, EngineKind.SGLANG
_SCALE_OUT: Final = "start vLLM with --enable-scale-out"
_ANNOUNCE: Final = "announce each with POST /gristmill/v1/weights"
_TOOL: Final = {
    "type": "function",
    "function": {"name": "count", "parameters": {"type": "object", "properties": {"to": {"type": "integer"}}}},
}
_NOT_IN_STREAMS: Final = {
    _SGLANG: "Log-probabilities of tokens without text, such as the stop token, are missing in streams: start SGLang"
    " with --reasoning-parser or --tool-call-parser, under which it sends them all.",
}


def capabilities_of(identity: Identity, spec: UpstreamSpec) -> Capabilities:
    """Return what is known of an engine that was only asked what it is."""
    return Capabilities(
        kind=identity.kind,
        version=identity.version,
        models=identity.models,
        max_model_len=identity.max_model_len(spec.models[0] if spec.models else None),
    )


async def probe(client: Client, spec: UpstreamSpec, timeout_s: float) -> Capabilities:
    """Find out what an engine is and what it returns.

    Args:
        client: asks.
        spec: the engine; the first of its models is sampled, else the first that it lists.
        timeout_s: of each request.

    Raises:
        UpstreamError: it cannot be reached; every later failure is a note.
    """
    identity = await identify(client, spec, timeout_s)
    return await measure(client, spec, identity, timeout_s)


async def measure(client: Client, spec: UpstreamSpec, identity: Identity, timeout_s: float) -> Capabilities:
    """Find out what an engine returns when it samples; as `probe`, of an engine that said what it is."""
    found = capabilities_of(identity, spec)
    notes = list(await between(client, spec, identity, timeout_s))
    model = spec.models[0] if spec.models else next(iter(identity.models), None)
    if model is None:
        notes.append("The engine lists no model, so that nothing was sampled: name one with --model.")
        return msgspec.structs.replace(found, notes=tuple(notes))
    if identity.models and model not in identity.models:
        notes.append(
            f"The model {model!r} was asked for, which it does not list: it lists {', '.join(identity.models)}."
        )
    measured = _Measurement(Sampler(client, spec, model, timeout_s), found, notes)
    await measured.all()
    return msgspec.structs.replace(measured.found, notes=tuple(notes))


class _Measurement:
    """One run of questions; `found` and `notes` grow with the answers."""

    def __init__(self, sampler: Sampler, found: Capabilities, notes: list[str]) -> None:
        self.found = found
        self._sampler = sampler
        self._notes = notes
        # An adapter that asks for everything, as of an engine that was seen to have it.
        everything = dict.fromkeys(("token_ids", "logprobs", "weight_versions", "token_in"), Support.YES)
        self._asking: Engine = engine_for(msgspec.structs.replace(found, **everything))

    def _learn(self, **support: Any) -> None:
        self.found = msgspec.structs.replace(self.found, **support)

    async def all(self) -> None:
        """Ask everything that the answers before give reason to ask."""
        sample = await self._sampler.body(self._asking)
        if sample.reply is None or sample.error is not None:
            await self._nothing_sampled(sample)
            return
        self._whole_reply(sample)
        if self.found.token_ids is Support.YES:
            await self._streamed(sample)
            self._learn(logprobs_mode=await measure_mode(self._sampler, self._asking, self.found.kind, self._notes))
            await self._token_in(sample)
        elif self.found.kind is _VLLM:
            await self._ids_as_text()
        await self._abort()
        await self._render(sample)
        await self._tools()

    async def _nothing_sampled(self, sample: Sample) -> None:
        """Tell an engine that takes no unknown fields from one that does not sample at all."""
        if sample.refused:
            plain = await self._sampler.body(engine_for(Capabilities(kind=EngineKind.GENERIC)))
            if plain.error is None and plain.reply is not None:
                self._learn(prompt_ids=Support.NO, token_ids=Support.NO, token_ids_streamed=Support.NO)
                self._notes.append(f"It refuses to be asked for token ids: {sample.error}.")
                return
        self._notes.append(f"Nothing was sampled, so that nothing is known: {sample.error}.")

    def _whole_reply(self, sample: Sample) -> None:
        choice, kind = sample.first, self.found.kind
        self._learn(
            prompt_ids=_given(choice.prompt_ids),
            token_ids=_given(choice.token_ids),
            logprobs=_yes(bool(choice.logprobs) and all(map(isfinite, choice.logprobs or ()))),
            weight_versions=_given(_weights(sample)),
            routed_experts=_given(_experts(sample)),
        )
        if choice.reason is not None and choice.token_ids:
            self._notes.append(f"A whole reply is not usable: {choice.reason}: {choice.detail}.")
        if choice.logprobs and max(choice.logprobs) > 0.001:
            self._learn(logprobs=Support.NO)
            self._notes.append(
                "Its log-probabilities are above zero, so that they are none: start vLLM with --logprobs-mode"
                " processed_logprobs."
            )
        if choice.token_ids is None and kind in {_VLLM, _SGLANG}:
            self._notes.append(
                f"No token ids came, which {kind} returns when asked: something between strips them, or the engine is"
                " older than they are."
            )
        if self.found.weight_versions is Support.NO and kind is _VLLM:
            self._notes.append(f"Replies name no weight version: {_ANNOUNCE}.")
        if self.found.weight_versions is Support.YES and kind is _SGLANG:
            self._notes.append(f"Whole replies name their weight version, streams do not: {_ANNOUNCE}.")

    async def _streamed(self, whole: Sample) -> None:
        """Sample the same as a stream that a stop token ends: ids, their log-probabilities, and the stop token."""
        ids = list(whole.first.token_ids or ())
        at = next((place for place in range(1, len(ids)) if ids[place] not in ids[:place]), 0)
        sample = await self._sampler.stream(self._asking, stop_token_ids=[ids[at]])
        choice = sample.first
        got = list(choice.token_ids or ())
        if sample.error is not None:
            self._notes.append(f"A stream could not be read: {sample.error}.")
            return
        complete = bool(got) and bool(choice.prompt_ids)
        if complete and choice.logprobs is not None and len(choice.logprobs) < len(got):
            complete = False
            self._notes.append(_NOT_IN_STREAMS.get(self.found.kind, f"In streams: {choice.detail}."))
        elif choice.reason is not None:
            complete = False
            self._notes.append(f"A stream is not usable: {choice.reason}: {choice.detail}.")
        self._learn(token_ids_streamed=_yes(complete))
        if got == ids[: at + 1] and choice.finish_reason == "stop":
            self._learn(stop_token_included=Support.YES)
        elif got == ids[:at] and choice.finish_reason == "stop":
            self._learn(stop_token_included=Support.NO)
            self._notes.append("The stop token is not among the sampled ids: rows will lack the end of every turn.")

    async def _ids_as_text(self) -> None:
        """Find out which half of the way loses the ids: a type that drops fields passes ids that look like text."""
        sample = await self._sampler.body(self._asking, return_tokens_as_token_ids=True)
        if sample.first.token_ids:
            self._notes.append(
                "With return_tokens_as_token_ids the ids come through: what stands between passes the request on and"
                " drops the fields of the reply that it does not know. Connect to the engine itself."
            )

    async def _token_in(self, whole: Sample) -> None:
        """Send a prompt as ids, other than the messages would give, and see whether it was the one sampled from."""
        choice = whole.first
        prompt = [*(choice.prompt_ids or ()), *(choice.token_ids or ())[:1]]
        asked = self._asking.given({}, prompt)
        if asked is None or not choice.prompt_ids:
            return
        sample = await self._sampler.body(self._asking, max_tokens=1, **asked)
        if sample.reply is not None:
            self._learn(token_in=_yes(list(sample.first.prompt_ids or ()) == prompt))

    async def _abort(self) -> None:
        match self.found.kind:
            case EngineKind.VLLM:
                answer = await self._sampler.post(VLLM_ABORT, {"request_ids": []})
                remedy = f"A call that is given up is cut off without its tokens: {_SCALE_OUT} to get them."
            case EngineKind.SGLANG:
                answer = await self._sampler.post(SGLANG_ABORT, {"rid": f"probe-{uuid4().hex}"})
                remedy = "A call that is given up is cut off without its tokens: its key does not permit to abort."
            case EngineKind.GENERIC:
                self._learn(abort_by_id=Support.NO)
                return
        if answer is not None:
            self._learn(abort_by_id=_yes(answer.status == 200))
            if answer.status != 200:
                self._notes.append(remedy)

    async def _render(self, whole: Sample) -> None:
        """See whether the engine renders messages to the very ids that it sampled from."""
        prompt = whole.first.prompt_ids
        if prompt is not None:
            self._learn(question_ids=tuple(prompt))
        if self.found.kind is EngineKind.GENERIC:
            return
        support, status = await self._rendering(TOKENIZE, prompt)
        self._learn(tokenize=support)
        if self.found.kind is _VLLM:
            support, status = await self._rendering(RENDER, prompt)
        self._learn(render=support)
        if support is Support.NO and status == 200:
            self._notes.append("It renders messages to other ids than it samples from.")
        elif status == 403 and self.found.kind is _VLLM and self.found.tokenize is not Support.YES:
            self._notes.append(f"It renders no prompts without sampling: {_SCALE_OUT} for that.")

    async def _rendering(self, path: str, prompt: Sequence[int] | None) -> tuple[Support, int]:
        """Have the question rendered by a route: whether it was to these ids, and the status, 0 for no answer."""
        answer = await self._sampler.post(path, {"model": self._sampler.model, "messages": list(QUESTION)})
        if answer is None:
            return Support.UNKNOWN, 0
        rendered = rendered_ids(answer.status, answer.body)
        if rendered is None:
            return Support.NO, answer.status if answer.status != 200 else 0
        return Support.UNKNOWN if prompt is None else _yes(rendered == list(prompt)), answer.status

    async def _tools(self) -> None:
        """See whether harnesses can give it tools, which vLLM takes only when it was told how to read calls."""
        sample = await self._sampler.body(self._asking, max_tokens=1, tools=[_TOOL], tool_choice="auto")
        if sample.refused:
            remedy = (
                " Start vLLM with --enable-auto-tool-choice and --tool-call-parser." if self.found.kind is _VLLM else ""
            )
            self._notes.append(f"It refuses requests with tools: {sample.error}.{remedy}")


def _yes(is_so: bool) -> Support:
    return Support.YES if is_so else Support.NO


def _given(value: object) -> Support:
    return _yes(bool(value))


def _member(holder: Mapping[str, Any], name: str) -> Any:
    value = holder.get(name)
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def _weights(sample: Sample) -> Any:
    meta = _member(sample.choice, "meta_info")
    return sample.first.weight_versions or meta.get("weight_versions") or meta.get("weight_version")


def _experts(sample: Sample) -> Any:
    return sample.choice.get("routed_experts") or _member(sample.choice, "meta_info").get("routed_experts")
