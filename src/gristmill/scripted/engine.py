"""The scripted engine as an ASGI application.

Invariant: it serves the routes of its profile and its own control routes below `/script`; every other path is a 404. A
request that cannot be answered gets the error that the engine of the profile gives, never a traceback.

Not here: the model behind it (model), starting a server (serving).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast, get_args

import orjson

from gristmill.scripted.answer import Answer
from gristmill.scripted.asked import Asked, EngineRefused, read_chat, read_completions
from gristmill.scripted.chat_wire import PlainChat, VllmChat
from gristmill.scripted.choice import choose
from gristmill.scripted.completions_wire import Completions
from gristmill.scripted.connection import Connection, Interruption, Receive, Send
from gristmill.scripted.control import metrics, requests_json, state_json
from gristmill.scripted.delivery import Outcome, deliver, failed
from gristmill.scripted.log import Log, Seen
from gristmill.scripted.model import make_answer, response_id_of, shortened
from gristmill.scripted.reading import read_script, script_from
from gristmill.scripted.routes import detokenized, error_body, models_json, rendered, tokenized
from gristmill.scripted.script import HttpStatus, Redirect, Renders, Script
from gristmill.scripted.sglang_wire import SglangChat, refuse_streamed_ids
from gristmill.scripted.wire import Wire, dumps

if TYPE_CHECKING:
    from gristmill.scripted.serving import Serving

__all__ = ["ScriptedEngine"]

JsonObject = dict[str, Any]
Scope = MutableMapping[str, Any]
Routes = dict[tuple[str, str], Callable[[Connection], Awaitable[None]]]

_CHAT: Final = "/v1/chat/completions"
_COMPLETIONS: Final = "/v1/completions"
_ABORTS: Final = {"/inference/v1/abort_requests", "/abort_request", "/abort_requests"}
_RENDERS: Final = {f"{_CHAT}/render": _CHAT, f"{_COMPLETIONS}/render": _COMPLETIONS}


class ScriptedEngine:
    """An engine whose replies come from a script; an ASGI application.

    Args:
        script: a script, a decoded one, the path of its file, or the name of one that ships.

    Raises:
        DecodeError: the script is refused.
    """

    def __init__(self, script: Script | Mapping[str, Any] | str | Path) -> None:
        if isinstance(script, Script):
            self.script = script
        else:
            self.script = read_script(script) if isinstance(script, str | Path) else script_from(script)
        settings = self.script.settings
        self.log = Log()
        self.weights = settings.weights
        self.healthy = True
        self.renders: Renders = settings.renders
        self.models = list(settings.models)
        chat = {"vllm": VllmChat, "sglang": SglangChat, "plain": PlainChat}[settings.profile]
        self._wires: dict[str, Wire] = {"chat": chat(), "completions": Completions(settings.profile)}
        self._running: dict[str, Interruption] = {}
        self._wavered = False
        self._open: set[Interruption] = set()
        self._closing = False

    def serve(self, host: str = "127.0.0.1", port: int = 0) -> Serving:
        """Return a context manager, synchronous and not, that serves it and gives its address."""
        from gristmill.scripted.serving import Serving  # noqa: PLC0415  the engine itself needs no server

        return Serving(self, host, port)

    @property
    def requests(self) -> list[Seen]:
        """The last requests that sampled, in the order in which they came."""
        return list(self.log.seen)

    def interrupt(self) -> None:
        """End every answer that waits, because the engine stops."""
        self._closing = True
        for waiting in list(self._open):
            waiting.happen("stopped")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"expected an HTTP request, got {scope['type']}")
        interruption = Interruption()
        if self._closing:
            interruption.happen("stopped")
        self._open.add(interruption)
        connection = Connection(receive, send, interruption)
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            await self._route(scope["method"], scope["path"], headers, connection, interruption)
        except EngineRefused as refused:
            await self._refuse(connection, refused)
        finally:
            self._open.discard(interruption)
            await connection.close()

    async def _route(
        self, method: str, path: str, headers: Mapping[str, str], connection: Connection, interruption: Interruption
    ) -> None:
        if path in (_CHAT, _COMPLETIONS) and method == "POST":
            await self._sample(path, headers, connection, interruption)
            return
        found = self._control_routes().get((method, path))
        if found is None and self.script.settings.profile != "plain":
            found = self._engine_routes().get((method, path))
        if found is None:
            raise EngineRefused(404, "Not Found")
        await found(connection)

    def _control_routes(self) -> Routes:
        return {
            ("GET", "/health"): self._health,
            ("GET", "/v1/models"): self._models,
            ("GET", "/script"): self._state,
            ("POST", "/script/state"): self._set_state,
            ("POST", "/script/reset"): self._reset,
            ("GET", "/script/requests"): self._requests,
        }

    def _engine_routes(self) -> Routes:
        routes: Routes = {
            ("GET", "/version"): self._version,
            ("GET", "/metrics"): self._metrics,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
            **{("POST", path): self._abort for path in _ABORTS},
        }
        for path, target in _RENDERS.items():
            routes["POST", path] = lambda connection, target=target: self._render(connection, target)
        return routes

    async def _sample(
        self, path: str, headers: Mapping[str, str], connection: Connection, interruption: Interruption
    ) -> None:
        route = "chat" if path == _CHAT else "completions"
        body = _json_object(await connection.read())
        seen = self.log.begin(route, headers, body)
        try:
            asked = read_chat(body, headers) if path == _CHAT else read_completions(body, headers)
            outcome = await self._answer(asked, seen, connection, interruption)
        except EngineRefused as refused:
            self.log.end(seen, refused.status, "refused")
            raise
        self.log.end(seen, *outcome)

    async def _answer(self, asked: Asked, seen: Seen, connection: Connection, interruption: Interruption) -> Outcome:
        settings = self.script.settings
        if settings.profile == "sglang":
            refuse_streamed_ids(asked)
        self._check_model(asked.model)
        seen.turn = asked.turn
        session = "" if settings.session_header is None else asked.headers.get(settings.session_header.lower(), "")
        seen.attempt = self.log.attempt(f"{session}\x00{asked.digest}") if self.script.counts_tries else 0
        chosen = choose(self.script, asked, seen.attempt)
        seen.rule = chosen.rule.name
        self.log.by_rule[chosen.rule.name] += 1
        answer = make_answer(chosen, asked, settings, self.weights, response_id_of(asked, settings))
        seen.id = answer.response_id
        self.log.prompt_tokens += answer.prompt_tokens
        fault = answer.behaviour.fault
        self._running[answer.response_id] = interruption
        try:
            if isinstance(fault, HttpStatus | Redirect):
                await interruption.pause(answer.behaviour.delay_s or 0)
                return await failed(connection, fault)
            outcome = await deliver(connection, self._wires[asked.route], answer, interruption, shortened)
        finally:
            if self._running.get(answer.response_id) is interruption:
                del self._running[answer.response_id]
        self._change_weights(answer, outcome)
        return outcome

    def _check_model(self, name: str) -> None:
        known = "*" in self.models or name in self.models
        if not known and (name or self.script.settings.profile != "sglang"):
            names = ", ".join(self.models)
            raise EngineRefused(404, f"The model `{name}` does not exist. Valid aliases: {names}.", param="model")

    def _change_weights(self, answer: Answer, outcome: Outcome) -> None:
        change = answer.behaviour.weights
        if change is not None and any(count > change.after for count in outcome.ids):
            self.weights = change.to

    async def _abort(self, connection: Connection) -> None:
        body = _json_object(await connection.read())
        if self.script.settings.profile == "vllm" and not self.script.settings.scale_out:
            raise _scale_out_disabled()
        for name in (*cast("list[Any]", body.get("request_ids") or ()), body.get("rid")):
            # vLLM numbers the prompts of a Completions request, of which a call has one.
            running = self._running.get(str(name)) or self._running.get(str(name).removesuffix("-0"))
            if running is not None:
                running.happen("aborted")
        if body.get("abort_all"):
            for running in list(self._running.values()):
                running.happen("aborted")
        await _answer_json(connection, {})

    async def _render(self, connection: Connection, target: str) -> None:
        if not self.script.settings.scale_out or self.script.settings.profile != "vllm":
            raise _scale_out_disabled()
        body = _json_object(await connection.read())
        asked = read_chat(body, {}) if target == _CHAT else read_completions(body, {})
        self._check_model(asked.model)
        said = rendered(asked, self.script.settings)
        await self._answer_rendered(connection, said, said if isinstance(said, list) else [said], "token_ids")

    async def _health(self, connection: Connection) -> None:
        await _answer_bytes(connection, 200 if self.healthy else 503, b"", "text/plain")

    async def _models(self, connection: Connection) -> None:
        await _answer_json(connection, models_json(self.models, self.script.settings, int(self.log.started_s)))

    async def _version(self, connection: Connection) -> None:
        await _answer_json(connection, {"version": self.script.settings.version})

    async def _metrics(self, connection: Connection) -> None:
        text = metrics(self.log, len(self._running))
        await _answer_bytes(connection, 200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")

    async def _tokenize(self, connection: Connection) -> None:
        body = _json_object(await connection.read())
        said = tokenized(body, self.script.settings)
        if "messages" in body:
            await self._answer_rendered(connection, said, [said], "tokens")
        else:
            await _answer_json(connection, said)

    async def _answer_rendered(
        self, connection: Connection, said: JsonObject | list[JsonObject], prompts: list[JsonObject], ids: str
    ) -> None:
        """Answer with renderings, in the manner that the script asks for."""
        match self.renders:
            case "fail":
                raise EngineRefused(500, "The chat template could not be rendered.", kind="InternalServerError")
            case "hang":
                await connection.hold()
                return
            case "waver" if not self._wavered:
                self._wavered = True
            case "differ" | "waver":
                self._wavered = False
                for prompt in prompts:
                    prompt[ids] = [*prompt[ids][:-1], (prompt[ids][-1] + 1) % 256]
            case "right":
                pass
        await _answer_json(connection, said)

    async def _detokenize(self, connection: Connection) -> None:
        await _answer_json(connection, detokenized(_json_object(await connection.read()), self.script.settings))

    async def _state(self, connection: Connection) -> None:
        await _answer_json(connection, state_json(self, len(self._running)))

    async def _requests(self, connection: Connection) -> None:
        await _answer_json(connection, requests_json(self.log))

    async def _set_state(self, connection: Connection) -> None:
        body = _json_object(await connection.read())
        if body.get("renders", "right") not in get_args(Renders):
            raise EngineRefused(400, f"expected one of {', '.join(get_args(Renders))} at $.renders", param="renders")
        for name, kind in (("weights", str), ("healthy", bool), ("models", list), ("renders", str)):
            if name in body:
                value = body.pop(name)
                if not isinstance(value, kind):
                    raise EngineRefused(400, f"expected a {kind.__name__} at $.{name}", param=name)
                setattr(self, name, value)
        if body:
            raise EngineRefused(400, f"expected no key {next(iter(body))!r}", param=next(iter(body)))
        await _answer_json(connection, state_json(self, len(self._running)))

    async def _reset(self, connection: Connection) -> None:
        self.log.reset()
        self.weights = self.script.settings.weights
        self.healthy = True
        self.renders = self.script.settings.renders
        await _answer_json(connection, state_json(self, len(self._running)))

    async def _refuse(self, connection: Connection, refused: EngineRefused) -> None:
        if not connection.begun:
            body = error_body(refused, self.script.settings.profile)
            await _answer_bytes(connection, refused.status, dumps(body), "application/json")


def _scale_out_disabled() -> EngineRefused:
    return EngineRefused(
        403, "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
    )


def _json_object(data: bytes) -> JsonObject:
    try:
        value: Any = orjson.loads(data or b"{}")
    except orjson.JSONDecodeError as error:
        raise EngineRefused(400, f"1 validation error:\n  JSON decode error: {error}", kind="Bad Request") from error
    if not isinstance(value, dict):
        raise EngineRefused(400, "1 validation error:\n  Input should be a valid dictionary", kind="Bad Request")
    return cast(JsonObject, value)


async def _answer_json(connection: Connection, value: Any) -> None:
    await _answer_bytes(connection, 200, dumps(value), "application/json")


async def _answer_bytes(connection: Connection, status: int, data: bytes, kind: str) -> None:
    await connection.head(status, {"content-type": kind, "content-length": str(len(data))})
    await connection.piece(data, more=False)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            await asyncio.sleep(0)
            return
