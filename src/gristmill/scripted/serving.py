"""Runs a scripted engine on a loopback port, in a thread with an event loop of its own.

Invariant: it listens on loopback only, answers once it has started, and is gone when it was left.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final

import uvicorn

from gristmill.errors import Code, ConfigError, GristmillError

if TYPE_CHECKING:
    from gristmill.scripted.engine import ScriptedEngine

__all__ = ["Serving", "check_loopback"]

_STARTS_S: Final = 30.0
_STOPS_S: Final = 10.0


def check_loopback(host: str) -> None:
    """Refuse a host that is not this machine.

    Raises:
        ConfigError: `option_invalid`.
    """
    try:
        good = ipaddress.ip_address(host).is_loopback
    except ValueError:
        good = host == "localhost"
    if not good:
        raise ConfigError(
            f"expected a loopback address, got {host!r}",
            where="--host",
            hint="the scripted engine answers anybody who reaches it; keep it on 127.0.0.1",
        )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes event loops: uvloop where it is installed."""
    try:
        from uvloop import new_event_loop  # noqa: PLC0415  not on every system
    except ModuleNotFoundError:
        return None
    return new_event_loop


class Serving:
    """A context manager: serves an engine while it is entered and gives its address.

    Args:
        engine: the engine.
        host: a loopback address.
        port: 0 takes a free one.

    Raises:
        ConfigError: `option_invalid`, the host is not this machine.
    """

    def __init__(self, engine: ScriptedEngine, host: str = "127.0.0.1", port: int = 0) -> None:
        check_loopback(host)
        self._engine = engine
        self._host = host
        self._port = port
        self._socket: socket.socket | None = None
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()

    @property
    def url(self) -> str:
        """Its address, while it serves."""
        assert self._socket is not None
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def start(self) -> str:
        """Start serving and return the address.

        Raises:
            GristmillError: `file_unreadable`, the port cannot be listened on.
        """
        self._socket = self._listening()
        config = uvicorn.Config(
            self._engine,
            log_config=None,
            log_level="critical",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=75,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="scripted-engine", daemon=True)
        self._thread.start()
        if not self._started.wait(_STARTS_S):
            raise GristmillError("expected the scripted engine to start", where=self.url)
        return self.url

    def stop(self) -> None:
        """Stop serving; answers that wait are broken off."""
        if self._thread is None or self._server is None or self._loop is None:
            return
        self._server.should_exit = True
        self._server.force_exit = True
        self._loop.call_soon_threadsafe(self._engine.interrupt)
        self._thread.join(_STOPS_S)
        self._thread = None

    def _listening(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((self._host, self._port))
            listening.listen(1024)
        except OSError as error:
            listening.close()
            raise GristmillError(
                f"cannot listen on {self._host}:{self._port}: {error.strerror or error}",
                code=Code.FILE_UNREADABLE,
                where="--port",
                hint="name another port, or 0 for a free one",
            ) from error
        return listening

    def _run(self) -> None:
        assert self._server is not None
        server = self._server
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(self._serve(server))

    async def _serve(self, server: uvicorn.Server) -> None:
        assert self._socket is not None
        self._loop = asyncio.get_running_loop()
        serving = self._loop.create_task(server.serve(sockets=[self._socket]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        self._started.set()
        await serving

    def __enter__(self) -> str:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> str:
        return await asyncio.to_thread(self.start)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)
