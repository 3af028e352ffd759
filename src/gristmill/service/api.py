"""The admin API: rollouts, their results and what they come to, weights and engines; JSON below `/gristmill/v1/`.

Invariant: nothing is answered before the admin key was seen, not even that a route is not there; a rollout's own key
gets 403 for everything. Bodies are limited and read strictly. What goes wrong has a code, and one bug never takes the
gateway with it.

Not here: what the acts do (rollouts), model routes (gateway), docs/reference/gateway.md for callers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from gristmill.captures.exact import dumps
from gristmill.errors import Code, GristmillError
from gristmill.gateway.body import ClientClosed, read_body
from gristmill.gateway.config import GatewayConfig
from gristmill.gateway.front import RequestRefused
from gristmill.gateway.keys import KEY_PREFIX, bearer
from gristmill.ledger import AttemptElsewhere, AttemptKey
from gristmill.selection import Rejected
from gristmill.service.asked import (
    drain_asked,
    finish_asked,
    list_asked,
    mint_asked,
    named_attempt,
    policy_asked,
    rollout_id_of,
    weights_asked,
)
from gristmill.service.outcome import call_json, rows_of, summary_json, verdicts_json
from gristmill.service.problem import Problem, problem_of
from gristmill.service.rollouts import Rollouts

__all__ = ["PREFIX", "AdminApi", "base_addresses"]

PREFIX: Final = "/gristmill/v1"

_PRIVATE: Final = {"cache-control": "no-store"}
_CLIENT_CLOSED: Final = 499

Act = Callable[[Request], Awaitable[Response]]


def base_addresses(base_url: str, key: AttemptKey) -> dict[str, Any]:
    """Return the addresses that a harness may be given, with and without its rollout in the path."""
    below = f"{base_url}/r/{key.rollout_id}/{key.attempt}"
    return {
        "base_url": base_url,
        "openai_base_url": f"{base_url}/v1",
        "anthropic_base_url": base_url,
        "prefix_base_urls": {"openai": f"{below}/v1", "anthropic": below},
    }


def _answer(data: bytes, status: int = 200) -> Response:
    return Response(data, status, _PRIVATE, "application/json")


def _json(value: Any, status: int = 200) -> Response:
    return _answer(dumps(value), status)


def _refusal(problem: Problem) -> Response:
    return _answer(problem.body(), problem.status)


class AdminApi:
    """An ASGI application for paths below `PREFIX`.

    Args:
        rollouts: what is administrated.
        config: the gateway's.
    """

    def __init__(self, rollouts: Rollouts, config: GatewayConfig) -> None:
        self._rollouts: Final = rollouts
        self._gateway: Final = rollouts.gateway
        self._config: Final = config
        attempt = f"{PREFIX}/rollouts/{{rollout}}/{{attempt}}"
        table: Mapping[tuple[str, str], Act] = {
            ("POST", f"{PREFIX}/rollouts"): self._mint,
            ("GET", f"{PREFIX}/rollouts"): self._list,
            ("GET", f"{PREFIX}/rollouts/{{rollout}}"): self._attempts,
            ("GET", attempt): self._here(self._show),
            ("POST", f"{attempt}/finish"): self._here(self._finish),
            ("POST", f"{attempt}/freeze"): self._here(self._freeze),
            ("POST", f"{attempt}/abandon"): self._here(self._abandon),
            ("POST", f"{attempt}/revoke"): self._here(self._revoke),
            ("GET", f"{attempt}/calls"): self._here(self._calls),
            ("GET", f"{attempt}/verdicts"): self._here(self._verdicts),
            ("GET", f"{attempt}/rows"): self._here(self._rows),
            ("POST", f"{PREFIX}/weights"): self._weights,
            ("GET", f"{PREFIX}/engines"): self._engines,
        }
        self._app: Final = Starlette(
            routes=[Route(path, act, methods=[method]) for (method, path), act in table.items()],
            exception_handlers={
                GristmillError: _answer_error,
                RequestRefused: _answer_error,
                ClientClosed: _answer_closed,
                HTTPException: _answer_http,
            },
        )
        self._app.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        refused = self._refused(scope)
        if refused is not None:
            await _refusal(refused)(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:  # noqa: BLE001  the named boundary: a bug in one act is one answer and one line
            self._gateway.log.error("admin_act_failed", bug=error)
            if not started:
                problem = Problem(500, Code.INTERNAL, "the gateway failed to do this; its log says where")
                await _refusal(problem)(scope, receive, send)

    def _refused(self, scope: Scope) -> Problem | None:
        try:
            self._gateway.check_host(scope)
        except RequestRefused as error:
            return problem_of(error)
        if self._gateway.admin(Headers(scope=scope)):
            return None
        key = bearer(scope["headers"])
        if key is None:
            return Problem(
                401,
                Code.KEY_MISSING,
                "expected the admin key, got none",
                hint=f"send it as Authorization: Bearer; it is in {self._config.admin_key_path.name}",
            )
        if key.startswith(KEY_PREFIX):
            return Problem(403, Code.KEY_FORBIDDEN, "expected the admin key, got a rollout's")
        return Problem(401, Code.KEY_UNKNOWN, "expected the admin key, got another")

    async def _body(self, request: Request) -> bytes:
        length = request.headers.get("content-length", "")
        return await read_body(
            request.receive,
            request.headers.get("content-encoding", "").strip().lower(),
            int(length) if length.isdecimal() else None,
            self._config.max_body_bytes,
        )

    def _base_url(self, request: Request) -> str:
        if self._config.public_url is not None:
            return self._config.public_url.rstrip("/")
        return f"{request.url.scheme}://{request.url.netloc}"

    def _here(self, act: Act) -> Act:
        """Do an act on an attempt, unless it is another gateway's, which is then named."""

        async def run(request: Request) -> Response:
            elsewhere = await self._rollouts.elsewhere(_attempt(request))
            if elsewhere is not None:
                raise elsewhere
            return await act(request)

        return run

    # Acts

    async def _mint(self, request: Request) -> Response:
        minted = await self._rollouts.mint(mint_asked(await self._body(request)))
        key = minted.key
        names = {"rollout_id": key.rollout_id, "attempt": key.attempt, "key": minted.secret}
        return _json({**names, **base_addresses(self._base_url(request), key)}, 201)

    async def _list(self, request: Request) -> Response:
        asked = list_asked(request.query_params)
        found = await self._rollouts.list(asked)
        told = [summary_json(each, self._gateway.attempts.in_flight(each.key)) for each in found]
        after = None
        if len(found) == asked.limit:
            after = f"{found[-1].key.rollout_id}/{found[-1].key.attempt}"
        return _json({"rollouts": told, "after": after})

    async def _attempts(self, request: Request) -> Response:
        rollout_id = rollout_id_of(request.path_params["rollout"], "rollout_id")
        found = await self._rollouts.attempts(rollout_id)
        return _json({"rollouts": [summary_json(each, self._gateway.attempts.in_flight(each.key)) for each in found]})

    async def _show(self, request: Request) -> Response:
        key = _attempt(request)
        summary = await self._rollouts.summary(key)
        return _json(summary_json(summary, self._gateway.attempts.in_flight(key)))

    async def _finish(self, request: Request) -> Response:
        key = _attempt(request)
        # A history may be long, and everybody's calls go through this loop.
        asked = await self._gateway.ledger_call(finish_asked, await self._body(request))
        finished = await self._rollouts.finish(key, asked, self._config.drain_s)
        return _json(
            {
                "rollout_id": key.rollout_id,
                "attempt": key.attempt,
                "state": str((await self._rollouts.summary(key)).state),
                "aborted": finished.aborted,
                **finished.outcome.json(),
            }
        )

    async def _freeze(self, request: Request) -> Response:
        key = _attempt(request)
        drain_s = drain_asked(await self._body(request))
        snapshot_id = await self._rollouts.freeze(key, self._config.drain_s if drain_s is None else drain_s)
        return _json({"rollout_id": key.rollout_id, "attempt": key.attempt, "snapshot_id": snapshot_id})

    async def _abandon(self, request: Request) -> Response:
        key = _attempt(request)
        drain_s = drain_asked(await self._body(request))
        snapshot_id = await self._rollouts.abandon(key, 0.0 if drain_s is None else drain_s)
        return _json({"rollout_id": key.rollout_id, "attempt": key.attempt, "snapshot_id": snapshot_id})

    async def _revoke(self, request: Request) -> Response:
        key = _attempt(request)
        drain_s = drain_asked(await self._body(request))
        aborted = await self._rollouts.revoke(key, self._config.drain_s if drain_s is None else drain_s)
        return _json({"rollout_id": key.rollout_id, "attempt": key.attempt, "aborted": aborted})

    async def _calls(self, request: Request) -> Response:
        key = _attempt(request)
        ledger = self._rollouts.ledger

        def read() -> bytes:
            capture, _ = ledger.read(key, tokens=False)
            lost = [
                {"model_call_id": call.model_call_id, "parent_call_id": call.parent_call_id, "reason": call.reason}
                for call in capture.lost
            ]
            return dumps({"calls": [call_json(record) for record in capture.records], "lost": lost})

        return _answer(await self._gateway.ledger_call(read))

    async def _verdicts(self, request: Request) -> Response:
        key, policy = _attempt(request), _policy(request)
        ledger = self._rollouts.ledger
        return _answer(await self._gateway.ledger_call(lambda: dumps(verdicts_json(ledger, key, policy))))

    async def _rows(self, request: Request) -> Response:
        key, policy = _attempt(request), _policy(request)
        rows = await self._gateway.ledger_call(rows_of, self._rollouts.ledger, key, policy)
        if isinstance(rows, Rejected):
            return _refusal(Problem(422, rows.code, rows.message, rows.where))
        return StreamingResponse(iter(rows), headers=_PRIVATE, media_type="application/x-ndjson")

    async def _weights(self, request: Request) -> Response:
        asked = weights_asked(await self._body(request))
        self._gateway.announce_weights(asked.version, asked.upstream)
        return _json({"version": asked.version, "upstream": asked.upstream})

    async def _engines(self, request: Request) -> Response:
        return _json({"engines": self._gateway.engines()})


def _attempt(request: Request) -> AttemptKey:
    return named_attempt(request.path_params["rollout"], request.path_params["attempt"])


def _policy(request: Request) -> str:
    for name in request.query_params:
        if name != "policy":
            raise RequestRefused(400, Code.REQUEST_MALFORMED, f"expected policy, got {name[:100]!r}", "query")
    return policy_asked(request.query_params.get("policy"), "query.policy")


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GristmillError | RequestRefused)
    problem = problem_of(error)
    if isinstance(error, AttemptElsewhere) and "attempt" in request.path_params:
        if error.address is None:
            return _refusal(problem._replace(status=503))
        answer = _refusal(problem._replace(status=307))
        query = f"?{request.url.query}" if request.url.query else ""
        answer.headers["location"] = f"{error.address.rstrip('/')}{request.url.path}{query}"
        return answer
    return _refusal(problem)


async def _answer_closed(request: Request, error: Exception) -> Response:
    # Nobody reads it; the server wants an answer.
    return Response(b"", _CLIENT_CLOSED)


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        message = "expected another method for this route"
    else:
        message = "expected a route of the admin API"
    hint = None
    if request.url.path.startswith(f"{PREFIX}/rollouts/"):
        hint = f"acts on a rollout name its attempt: {PREFIX}/rollouts/ID/ATTEMPT/…"
    return _refusal(Problem(error.status_code, Code.ROUTE_UNKNOWN, message, hint=hint))
