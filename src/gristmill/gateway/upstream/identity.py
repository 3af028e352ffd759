"""What an engine says of itself without sampling: kind, version, models, when it started, what stands in front of it.

Invariant: nothing is taken from an answer but what its route is known to say; an answer of another shape says nothing.

Not here: what it returns when it samples (probe).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, cast

import msgspec

from gristmill.gateway.upstream.client import Answer, Client
from gristmill.gateway.upstream.protocol import Ask, EngineKind, UpstreamError, UpstreamFault
from gristmill.gateway.upstream.routes import HEALTH, METRICS, MODELS, VERSION
from gristmill.gateway.upstream.sglang import SERVER_INFO
from gristmill.gateway.upstream.spec import UpstreamSpec

__all__ = ["Identity", "ListedModel", "Started", "identify", "is_up", "is_working", "started"]

JsonObject = dict[str, Any]

_UP: Final[Mapping[EngineKind, str]] = {EngineKind.VLLM: HEALTH, EngineKind.SGLANG: MODELS, EngineKind.GENERIC: MODELS}
"""Routes that cost next to nothing; SGLang's `/health` samples a token."""
_WORKING: Final[Mapping[EngineKind, str]] = {**_UP, EngineKind.SGLANG: SERVER_INFO[0]}
"""Routes that say whether the engine behind the server lives, while it is paused too."""
_BROKEN: Final = 500
_start_time = re.compile(r"^process_start_time_seconds(?:\{[^}]*\})? ([0-9.eE+]+)$", re.MULTILINE)


class ListedModel(NamedTuple):
    """A model that an engine lists."""

    name: str
    owner: str | None
    max_model_len: int | None


class Started(NamedTuple):
    """What changes when an engine restarts, as far as it says: version, start of its process (Unix time, seconds)."""

    version: str | None = None
    start_s: float | None = None


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself; `server` and `via` are the header fields of its answers, `wants_key` a refusal."""

    kind: EngineKind
    version: str | None = None
    listed: tuple[ListedModel, ...] = ()
    wants_key: bool = False
    server: str | None = None
    via: str | None = None

    @property
    def models(self) -> tuple[str, ...]:
        """The names of its models."""
        return tuple(model.name for model in self.listed)

    def max_model_len(self, model: str | None) -> int | None:
        """Return how many tokens prompt and reply of a model have together, None where that is not said."""
        lengths = {one.name: one.max_model_len for one in self.listed}
        return lengths.get(model) if model is not None else next(iter(lengths.values()), None)


async def is_up(client: Client, spec: UpstreamSpec, kind: EngineKind, timeout_s: float) -> bool:
    """Say whether the server answers.

    Raises:
        UpstreamError: it does not; the fault says how.
    """
    return await _answers(client, spec, _UP[kind], timeout_s)


async def is_working(client: Client, spec: UpstreamSpec, kind: EngineKind, timeout_s: float) -> bool:
    """Say whether the engine behind the server lives, however long it has been silent."""
    try:
        return await _answers(client, spec, _WORKING[kind], timeout_s)
    except UpstreamError:
        return False


async def _answers(client: Client, spec: UpstreamSpec, path: str, timeout_s: float) -> bool:
    # A proxy that lacks the route, or wants a key, still shows that somebody serves.
    return (await client.answer(spec, Ask(path, method="GET"), timeout_s)).status < _BROKEN


async def started(client: Client, spec: UpstreamSpec, kind: EngineKind, timeout_s: float) -> Started:
    """Read what changes when an engine restarts; nothing that cannot be read counts as changed."""
    version = await _version(client, spec, kind, timeout_s)
    metrics = await _ask(client, spec, METRICS, timeout_s)
    found = None
    if metrics is not None and metrics.status == 200:
        found = _start_time.search(metrics.body.decode("utf-8", "replace"))
    return Started(version, None if found is None else _float(found.group(1)))


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


async def identify(client: Client, spec: UpstreamSpec, timeout_s: float) -> Identity:
    """Ask an engine what it is.

    Args:
        client: asks.
        spec: where; its kind, if it is configured, is believed.
        timeout_s: of each request.

    Raises:
        UpstreamError: it cannot be asked at all.
    """
    answer = await client.answer(spec, Ask(MODELS, method="GET"), timeout_s)
    if answer.status >= _BROKEN:
        message = f"GET {MODELS} was answered with {answer.status}"
        raise UpstreamError(UpstreamFault.UNREACHABLE, message)
    listed = _listed(answer)
    kind = spec.kind or await _kind(client, spec, listed, timeout_s)
    return Identity(
        kind=kind,
        version=await _version(client, spec, kind, timeout_s),
        listed=listed,
        wants_key=answer.status in {401, 403},
        server=answer.headers.get("server"),
        via=answer.headers.get("via"),
    )


async def _kind(client: Client, spec: UpstreamSpec, listed: tuple[ListedModel, ...], timeout_s: float) -> EngineKind:
    """Tell the kind from the owner of the models, which proxies pass on, else from routes that only one kind has."""
    owners = {model.owner for model in listed}
    for kind in (EngineKind.VLLM, EngineKind.SGLANG):
        if owners == {kind.value}:
            return kind
    for path in SERVER_INFO:
        # Before /version, which others have too.
        if "version" in await _object(client, spec, path, timeout_s):
            return EngineKind.SGLANG
    if isinstance((await _object(client, spec, VERSION, timeout_s)).get("version"), str):
        return EngineKind.VLLM
    return EngineKind.GENERIC


async def _version(client: Client, spec: UpstreamSpec, kind: EngineKind, timeout_s: float) -> str | None:
    for path in {EngineKind.VLLM: (VERSION,), EngineKind.SGLANG: SERVER_INFO}.get(kind, ()):
        version = (await _object(client, spec, path, timeout_s)).get("version")
        if isinstance(version, str):
            return version
    return None


def _listed(answer: Answer) -> tuple[ListedModel, ...]:
    data = _decoded(answer).get("data")
    made = list[ListedModel]()
    for one in cast("list[Any]", data) if isinstance(data, list) else []:
        if isinstance(one, dict):
            card = cast(JsonObject, one)
            name, owner, length = card.get("id"), card.get("owned_by"), card.get("max_model_len")
            if isinstance(name, str):
                known = type(length) is int and length > 0
                made.append(ListedModel(name, owner if isinstance(owner, str) else None, length if known else None))
    return tuple(made)


async def _object(client: Client, spec: UpstreamSpec, path: str, timeout_s: float) -> JsonObject:
    answer = await _ask(client, spec, path, timeout_s)
    return {} if answer is None else _decoded(answer)


async def _ask(client: Client, spec: UpstreamSpec, path: str, timeout_s: float) -> Answer | None:
    try:
        return await client.answer(spec, Ask(path, method="GET"), timeout_s)
    except UpstreamError:
        # Whoever asks has another question to tell whether the engine is there.
        return None


def _decoded(answer: Answer) -> JsonObject:
    """Decode the object of a good answer, an empty one where it is none."""
    if answer.status != 200:
        return {}
    try:
        value: Any = msgspec.json.decode(answer.body)
    except msgspec.DecodeError:
        return {}
    return cast(JsonObject, value) if isinstance(value, dict) else {}
