"""A gateway that listens: ledger, gateway and admin API on one socket, from opening to a clean end.

Invariant: whoever reads the address in the ledger's lock file can connect to it; after `stop` every outcome is durable,
the port is free and the ledger is closed. A listener that other machines reach speaks TLS, or somebody said in so many
words that it need not.

Not here: signals and what is printed (the commands), routes (app).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any, Final, NamedTuple

import uvicorn

from gristmill.errors import Code, ConfigError
from gristmill.gateway.app import Gateway
from gristmill.gateway.config import GatewayConfig
from gristmill.ledger import open_ledger
from gristmill.service.app import ServiceApp
from gristmill.service.connection import BoundedConnection
from gristmill.service.sweep import Sweep

__all__ = ["Service", "ServiceThread", "Stopped", "check_listener", "run_loop"]

_KEEP_ALIVE_s: Final = 75
_CONNECTIONS_END_s: Final = 5
_BACKLOG: Final = 2048


class Stopped(NamedTuple):
    """How many calls were still running at the end and were aborted."""

    aborted: int


def check_listener(config: GatewayConfig) -> None:
    """Refuse to send keys and prompts over a network in the clear, unless that was asked for.

    Raises:
        ConfigError: `option_invalid`.
    """
    public = config.public_url or ""
    if config.on_loopback or config.tls_cert is not None or public.startswith("https://") or config.insecure_http:
        return
    raise ConfigError(
        f"expected TLS for a listener on {config.host}, which other machines can reach",
        code=Code.OPTION_INVALID,
        where="host",
        hint="--tls-cert and --tls-key, --public-url https://… where a proxy ends TLS, or --insecure-http where the "
        "network itself is private",
    )


class _Server(uvicorn.Server):
    """A server whose signals are somebody else's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class Service:
    """One gateway; `start` and `stop` once each, on one event loop.

    Args:
        config: what it is told.

    Attributes:
        base_url: where harnesses and administrators reach it: `public_url` if there is one.
        address: where it listens, as a URL.
        gateway, ledger, rollouts: of this service, from `start` on.
    """

    def __init__(self, config: GatewayConfig) -> None:
        check_listener(config)
        self.config: Final = config
        self.address = ""
        self.base_url = ""
        self._stack: Final = contextlib.AsyncExitStack()
        self._server: _Server | None = None
        self._hurry: Final = asyncio.Event()
        self._aborted = 0

    async def start(self) -> None:
        """Open the ledger, listen, and say where: in a file's lock file, in a database for the other gateways.

        Raises:
            LedgerError: another process writes to the ledger (`ledger_locked`, which names its address), or it cannot
                be written.
            ConfigError: `file_unreadable`: the admin key's file, a certificate, or an address that cannot be taken.
        """
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def _start(self) -> None:
        config, stack = self.config, self._stack
        listener = stack.enter_context(contextlib.closing(_bind(config)))
        # Nothing else runs yet; in a thread of its own it would go on where this start is cancelled.
        self.ledger = open_ledger(config.ledger, lease_s=config.lease_s)
        stack.push_async_callback(asyncio.to_thread, self.ledger.close)
        self.gateway = Gateway(config, self.ledger)
        app = ServiceApp(self.gateway, self.ledger, config)
        self.rollouts = app.rollouts
        self._server = _server(app, config)
        stack.push_async_callback(self._close_gateway)
        await self.gateway.start()
        serving = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        stack.push_async_callback(self._end, serving)
        while not self._server.started:
            if serving.done():
                await serving
                raise ConfigError("expected the server to start, it ended", where=self.address)
            await asyncio.sleep(0.005)
        self.address = _address(config, listener)
        self.base_url = self.address if config.public_url is None else config.public_url.rstrip("/")
        self.ledger.announce(self.advertised)
        sweep = Sweep(app.rollouts, config.abandon_after_s, config.drain_s)
        sweeping = asyncio.ensure_future(sweep.run())
        stack.callback(sweeping.cancel)

    @property
    def advertised(self) -> str:
        """The address that other processes with this ledger are told."""
        if not self.ledger.shared:
            # Whoever joins is on this machine.
            return self.address
        return (self.config.advertise_url or self.base_url).rstrip("/")

    async def _end(self, serving: asyncio.Future[None]) -> None:
        assert self._server is not None
        self._server.should_exit = True
        await serving

    async def _close_gateway(self) -> None:
        await self.gateway.close(aborted=self._aborted)

    def running(self) -> int:
        """Return how many calls are in flight."""
        return self.gateway.attempts.running()

    def hurry(self) -> None:
        """Do not wait for calls in flight any longer."""
        self._hurry.set()
        if self._server is not None:
            self._server.force_exit = True

    async def stop(self) -> Stopped:
        """Refuse new calls (503), let those in flight end, abort the rest, make all durable, close everything."""
        self.rollouts.opening = False
        self.gateway.stop_admitting()
        try:
            draining = asyncio.ensure_future(self.gateway.attempts.close_all(drain_s=self.config.drain_s))
            hurried = asyncio.ensure_future(self._hurry.wait())
            await asyncio.wait({draining, hurried}, return_when=asyncio.FIRST_COMPLETED)
            hurried.cancel()
            at_once = 0 if draining.done() else await self.gateway.attempts.close_all(drain_s=0.0)
            # The same calls where both came to it.
            self._aborted = max(at_once, await draining)
        finally:
            await self._stack.aclose()
        return Stopped(self._aborted)


def _bind(config: GatewayConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {_reason(error)}",
            code=Code.FILE_UNREADABLE,
            where="port",
            hint="choose another with --port; --port 0 takes a free one",
        ) from error
    listener.setblocking(False)
    return listener


def _reason(error: OSError) -> str:
    """Say what the system said, without the address that it repeats."""
    return os.strerror(error.errno) if error.errno else str(error)


def _address(config: GatewayConfig, listener: socket.socket) -> str:
    scheme = "http" if config.tls_cert is None else "https"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    port: int = listener.getsockname()[1]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _server(app: Any, config: GatewayConfig) -> _Server:
    try:
        settings = uvicorn.Config(
            app,
            http=BoundedConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            # What a client claims about itself is not believed.
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_s,
            timeout_graceful_shutdown=_CONNECTIONS_END_s,
            ssl_certfile=config.tls_cert,
            ssl_keyfile=config.tls_key,
        )
        settings.load()
    except OSError as error:
        raise ConfigError(
            f"expected a certificate and its key, got {error.strerror or error}",
            code=Code.FILE_UNREADABLE,
            where="tls_cert",
        ) from error
    return _Server(settings)


def run_loop(main: Any) -> Any:
    """Run a coroutine on a fresh event loop, uvloop's where it is installed."""
    try:
        from uvloop import new_event_loop  # noqa: PLC0415  not on every system
    except ImportError:
        new_event_loop = asyncio.new_event_loop
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


class ServiceThread:
    """A gateway in a thread of its own, for programs that run something else beside it.

    Args:
        config: what it is told.

    Raises:
        LedgerError, ConfigError: as `Service.start`.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self._ready: Final[Future[Service]] = Future()
        self._stopped: Final[Future[Stopped]] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: Final = threading.Thread(target=self._run, args=(config,), name="gristmill-gateway", daemon=True)
        self._thread.start()
        self.service: Final = self._ready.result()

    def _run(self, config: GatewayConfig) -> None:
        try:
            run_loop(self._main(config))
        except BaseException as error:  # noqa: BLE001  handed to whoever waits for this thread
            for future in (self._ready, self._stopped):
                if not future.done():
                    future.set_exception(error)

    async def _main(self, config: GatewayConfig) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        service = Service(config)
        await service.start()
        self._ready.set_result(service)
        await self._stop.wait()
        self._stopped.set_result(await service.stop())

    def stop(self) -> Stopped:
        """End the gateway as `Service.stop` does; again, it says the same."""
        assert self._loop is not None
        assert self._stop is not None
        with contextlib.suppress(RuntimeError):
            # The loop is closed where the thread has ended already.
            self._loop.call_soon_threadsafe(self._stop.set)
        stopped = self._stopped.result()
        self._thread.join()
        return stopped

    def __enter__(self) -> ServiceThread:
        return self

    def __exit__(self, *failure: object) -> None:
        self.stop()
