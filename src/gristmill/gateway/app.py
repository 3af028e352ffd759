"""The gateway: who asks, what for, and where it goes.

Invariant: a request is answered here or becomes a call; nothing else is forwarded, and no path of a client's reaches an
engine. A request that holds no key of an attempt learns nothing but that. Whatever goes wrong is an answer in the
dialect's own shape.

Not here: the path of a call (call), rollouts (service).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from time import monotonic
from typing import Any, Final, TypeVar, cast
from urllib.parse import urlsplit

from gristmill.errors import CaptureError, Code, ConfigError, LedgerError
from gristmill.gateway.attempts import LiveAttempts
from gristmill.gateway.body import ClientClosed, Receive
from gristmill.gateway.client import Client, HeaderList, Message, Scope
from gristmill.gateway.config import GatewayConfig
from gristmill.gateway.continuation.local import LocalRenderer
from gristmill.gateway.continuation.plan import Planner
from gristmill.gateway.desk import Desk
from gristmill.gateway.engines import open_replicas
from gristmill.gateway.front import JsonObject, RequestRefused
from gristmill.gateway.fronts import FRONTS
from gristmill.gateway.json_text import dump
from gristmill.gateway.keys import KEY_PREFIX, AdminKey, bearer
from gristmill.gateway.log import Log
from gristmill.gateway.metrics import Metrics
from gristmill.gateway.request import Request
from gristmill.gateway.routes import Purpose, find_route, messages_shaped
from gristmill.gateway.sampling import Sampler
from gristmill.gateway.side_routes import answer_count, answer_metrics, answer_models
from gristmill.gateway.upstream.replicas import Replica
from gristmill.ledger import AttemptElsewhere, AttemptKey, LedgerWriter
from gristmill.records import Dialect

__all__ = ["Gateway"]

ValueT = TypeVar("ValueT")

_HOST: Final = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]*[A-Za-z0-9_-])\.?(?::\d{0,5})?", re.ASCII)
_WATCH_EVERY_s: Final = 0.5
_LOOPBACK: Final = frozenset({"127.0.0.1", "[::1]", "localhost"})
_LEDGER_STATUS: Final = {Code.ATTEMPT_CLOSED: 409, Code.ROLLOUT_UNKNOWN: 401}


class Gateway:
    """Serves the model routes over a ledger.

    Args:
        config: settings.
        ledger: where calls go; open, and closed by whoever opened it after `close`.

    Raises:
        ConfigError: an engine's address or the admin key file cannot be used.

    Attributes:
        attempts: those that take calls.
        metrics: counters.
        log: the log.
    """

    def __init__(self, config: GatewayConfig, ledger: LedgerWriter) -> None:
        self.config: Final = config
        self.ledger: Final = ledger
        self.metrics: Final = Metrics()
        self.log: Final = Log(config.log_level)
        self.admin_key: Final = AdminKey(config.admin_key_path)
        self._desk: Final = Desk(config, ledger, self.metrics, self.log)
        self.attempts: Final[LiveAttempts] = self._desk.attempts
        self._replicas: Final = open_replicas(config)
        self._watching: asyncio.Future[None] | None = None
        self._hosts: Final = frozenset(_hosts(config))
        self._tokenizer: Final = (
            None if config.tokenizer is None else LocalRenderer(config.tokenizer, config.render_timeout_s)
        )
        planner = Planner(self.metrics, self.log, config.render_timeout_s, self._tokenizer)
        self._sampler: Final = Sampler(self._desk, self._replicas, planner)

    # ---- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Look for the engines; calls are taken from now on.

        Raises:
            ConfigError: the tokenizer cannot be used.
        """
        if self._tokenizer is not None:
            await self._tokenizer.open()
        await self._replicas.start()
        self._watching = asyncio.ensure_future(self._watch_engines())
        self.log.info(
            "started",
            engines=[replica.label for replica in self._replicas],
            lost_on_open=self.ledger.lost_on_open,
            instance=self.ledger.instance,
        )

    def stop_admitting(self) -> None:
        """Answer every new call 503; calls in flight go on."""
        self._sampler.admitting = False

    async def drained(self, timeout_s: float) -> bool:
        """Wait until no call is in flight; False where some still are."""
        until = monotonic() + timeout_s
        while self._sampler.running and monotonic() < until:
            await asyncio.sleep(0.02)
        return not self._sampler.running

    async def close(self, *, drain_s: float | None = None, aborted: int = 0) -> None:
        """Stop admitting, let calls end, abort the rest with what they sampled, write everything down.

        Args:
            drain_s: how long calls in flight may go on; as the settings say by default.
            aborted: calls that were aborted before, for the log.
        """
        self.stop_admitting()
        aborted += await self.attempts.close_all(drain_s=self.config.drain_s if drain_s is None else drain_s)
        await self.drained(5.0)
        await self._desk.settle()
        if self._watching is not None:
            self._watching.cancel()
        await self._replicas.close()
        if self._tokenizer is not None:
            await self._tokenizer.close()
        self.log.info("stopped", aborted=aborted)

    async def _watch_engines(self) -> None:
        """Write down when an engine comes or goes."""
        was: dict[str, tuple[bool, int]] = {}
        while True:
            for replica in self._replicas:
                now = replica.up, replica.epoch
                if was.setdefault(replica.label, now) != now:
                    say = self.log.info if replica.up else self.log.warning
                    say("engine up" if replica.up else "engine down", engine=replica.label, epoch=replica.epoch)
                    was[replica.label] = now
            await asyncio.sleep(_WATCH_EVERY_s)

    # ---- for the service ---------------------------------------------------------------------------------------------

    def admin(self, headers: Mapping[str, str]) -> bool:
        """Tell whether a request carries the admin key; names of headers in lower case."""
        return self.admin_key.matches(bearer(_pairs(headers)))

    def check_host(self, scope: Scope) -> None:
        """Refuse what a browser page sends, and what was sent to another name.

        Raises:
            RequestRefused: 403 `host_refused`.
        """
        hosts: list[bytes] = []
        for name, value in cast("Iterable[tuple[bytes, bytes]]", scope["headers"]):
            if name == b"origin":
                raise RequestRefused(403, Code.HOST_REFUSED, "requests of web pages are refused", "Origin")
            if name == b"host":
                hosts.append(value)
        if len(hosts) != 1 or _host_name(hosts[0].decode("latin-1")) not in self._hosts:
            raise RequestRefused(
                403, Code.HOST_REFUSED, "this gateway does not answer to that host name (setting allowed_hosts)", "Host"
            )

    def announce_weights(self, version: str, upstream: str | None = None) -> None:
        """Note which weights an engine samples with from now on; without an engine, all of them.

        Raises:
            CaptureError: `option_invalid`, there is no such engine.
        """
        if upstream is not None and upstream not in {replica.label for replica in self._replicas}:
            raise CaptureError(
                "expected the address of an engine of this gateway", code=Code.OPTION_INVALID, where="$.upstream"
            )
        self._desk.announce_weights(version, upstream)

    def engines(self) -> list[JsonObject]:
        """Describe the engines."""
        return [
            {
                "engine": replica.label,
                "kind": str(replica.engine.kind) if _is_known(replica) else "unknown",
                "up": replica.up,
                "measuring": replica.measuring,
                "epoch": replica.epoch,
                "version": replica.capabilities.version,
                "models": list(replica.capabilities.models),
                "max_model_len": replica.max_model_len,
                "token_ids": str(replica.capabilities.token_ids),
                "token_ids_streamed": str(replica.capabilities.token_ids_streamed),
                "logprobs_mode": str(replica.capabilities.logprobs_mode),
                "weights": self._desk.weights(replica.label),
                "notes": list(replica.capabilities.notes),
            }
            for replica in self._replicas
        ]

    async def ledger_call(self, work: Callable[..., ValueT], *arguments: Any) -> ValueT:
        """Run a method of the ledger off the event loop."""
        return await self._desk.blocking(work, *arguments)

    # ---- requests ----------------------------------------------------------------------------------------------------

    async def app(
        self, scope: Scope, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        """Answer one request, as an ASGI application."""
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            raise NotImplementedError(scope["type"])
        client = Client(receive, send)
        path = cast(str, scope["path"])
        try:
            await self._answer(scope, receive, client)
        except ClientClosed:
            self.metrics.refused.labels(str(Code.CLIENT_GONE)).inc()
        except RequestRefused as refused:
            await self._refuse(client, path, refused)
        except AttemptElsewhere as elsewhere:
            await self._send_on(client, scope, elsewhere)
        except (LedgerError, CaptureError) as error:
            refused = RequestRefused(_LEDGER_STATUS.get(error.code, 503), error.code, error.message)
            await self._refuse(client, path, refused)
        except Exception as bug:
            self.log.error("bug", bug=bug)
            self.metrics.refused.labels(str(Code.INTERNAL)).inc()
            if client.started:
                raise
            await self._refuse(client, path, RequestRefused(500, Code.INTERNAL, "an error of the gateway's own"))

    async def _send_on(self, client: Client, scope: Scope, elsewhere: AttemptElsewhere) -> None:
        """Name the gateway whose attempt it is; the client asks there with the same request."""
        path = cast(str, scope["path"])
        if elsewhere.address is None:
            refused = RequestRefused(503, elsewhere.code, elsewhere.message)
            await self._refuse(client, path, refused)
            return
        # Only paths of our own routes, which need no escape, come this far.
        query = cast(bytes, scope.get("query_string") or b"")
        place = f"{elsewhere.address.rstrip('/')}{path}".encode() + (b"?" + query if query else b"")
        refused = RequestRefused(307, elsewhere.code, elsewhere.message)
        await self._refuse(client, path, refused, [(b"location", place)])

    async def _refuse(self, client: Client, path: str, refused: RequestRefused, more: HeaderList | None = None) -> None:
        self.metrics.refused.labels(str(refused.code)).inc()
        self.log.info("refused", status=refused.status, code=str(refused.code))
        found = find_route(path)
        if found is not None and found.route.purpose is Purpose.SAMPLE:
            front = FRONTS[found.route.dialect]
        else:
            front = FRONTS[Dialect.MESSAGES if messages_shaped(path) else Dialect.CHAT]
        place = "" if refused.where == "$" else f" (at {refused.where})"
        body = front.error(refused.status, str(refused.code), f"{refused.message}{place}")
        headers: HeaderList = [(b"retry-after", b"1")] if refused.status == 503 else list(more or ())
        if refused.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if refused.status in {413, 415}:
            # The rest of the body is not read.
            headers.append((b"connection", b"close"))
        await client.answer(refused.status, dump(body), headers)

    async def _answer(self, scope: Scope, receive: Receive, client: Client) -> None:
        self.check_host(scope)
        raw_path = cast(bytes, scope.get("raw_path") or b"")
        # An encoded path is no path of ours, whatever it decodes to.
        found = None if b"%" in raw_path else find_route(cast(str, scope["path"]))
        if found is None:
            raise RequestRefused(404, Code.ROUTE_UNKNOWN, "this gateway has no such route")
        method = cast(str, scope["method"])
        if method not in found.route.methods:
            allowed = ", ".join(sorted(found.route.methods))
            raise RequestRefused(405, Code.ROUTE_UNKNOWN, f"expected {allowed} here, got another method")
        pairs = cast("Sequence[tuple[bytes, bytes]]", scope["headers"])
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in pairs}
        request = Request(found, method, headers, pairs, receive, client)
        if "upgrade" in headers and method == "POST":
            # The server stops reading at the upgrade, so that there is no body to understand.
            raise RequestRefused(
                400, Code.REQUEST_MALFORMED, "expected HTTP/1.1 without an upgrade, got the header Upgrade", "Upgrade"
            )
        match found.route.purpose:
            case Purpose.ALIVE:
                await client.answer(200, b'{"name":"gristmill"}')
            case Purpose.HEALTH:
                ready = self._sampler.admitting
                up = sum(replica.up for replica in self._replicas)
                state = {
                    "status": "ok" if ready else "stopping",
                    "engines_up": up,
                    "engines": len(self.config.upstreams),
                }
                await client.answer(200 if ready else 503, dump(state))
            case Purpose.METRICS:
                await self._check_admin(request)
                await answer_metrics(self._desk, self._replicas, request)
            case Purpose.MODELS:
                await self._holder(request)
                await answer_models(self._desk, self._replicas, request)
            case Purpose.COUNT | Purpose.TOKENIZE:
                await answer_count(self._desk, self._replicas, request, await self._holder(request))
            case Purpose.SAMPLE:
                await self._sampler.serve(request, await self._holder(request))

    async def _holder(self, request: Request) -> AttemptKey:
        """Return the attempt of the key that a request carries.

        Raises:
            RequestRefused: 401 `key_missing`, `key_unknown`; 403 `key_forbidden`.
        """
        key = bearer(request.pairs)
        if key is None:
            raise RequestRefused(401, Code.KEY_MISSING, "expected a rollout key as bearer token or x-api-key")
        holder = await self.attempts.holder(key)
        if holder is None:
            if not key.startswith(KEY_PREFIX) and self.admin_key.matches(key):
                raise RequestRefused(403, Code.KEY_FORBIDDEN, "the admin key makes no model calls")
            raise RequestRefused(401, Code.KEY_UNKNOWN, "the key is not one of a running rollout")
        named, attempt = request.found.rollout_id, request.found.attempt
        if (named is not None and named != holder.rollout_id) or (attempt is not None and attempt != holder.attempt):
            raise RequestRefused(403, Code.KEY_FORBIDDEN, "the key belongs to another rollout than the address")
        return holder

    async def _check_admin(self, request: Request) -> None:
        key = bearer(request.pairs)
        if self.admin_key.matches(key):
            return
        if key is not None and await self.attempts.holder(key) is not None:
            raise RequestRefused(403, Code.KEY_FORBIDDEN, "this is the administrator's")
        code = Code.KEY_MISSING if key is None else Code.KEY_UNKNOWN
        raise RequestRefused(401, code, "expected the admin key as bearer token")


def _is_known(replica: Replica) -> bool:
    """Tell whether an engine's kind was configured or found out."""
    found = replica.capabilities
    return replica.up or replica.spec.kind is not None or found.version is not None or bool(found.models)


def _pairs(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]


def _host_name(host: str) -> str | None:
    """Return the name or address of a `Host` value in lower case, None where it is no such value."""
    found = _HOST.fullmatch(host.strip())
    return None if found is None else found["name"].lower()


def _hosts(config: GatewayConfig) -> Iterable[str]:
    named = [config.host if ":" not in config.host else f"[{config.host}]", *config.allowed_hosts]
    named += [urlsplit(url).netloc for url in (config.public_url, config.advertise_url) if url is not None]
    yield from _LOOPBACK
    for host in named:
        name = _host_name(host)
        if name is None:
            raise ConfigError(
                f"expected a host name or address, got {host!r}", code=Code.OPTION_INVALID, where="allowed_hosts"
            )
        yield name
