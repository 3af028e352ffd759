"""The processes of a load run: the engine, and the gateways that are killed and started again.

Invariant: every process that was started here has ended when its context has. A gateway keeps its port and its ledger
from one start to the next, and nothing else; several have one ledger and one administrator's key.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic, time
from typing import Any, Final

import orjson

from gristmill.ledger import PostgresAddress
from tests.gateway.load.script import script

__all__ = ["Fleet", "GatewayProcess", "engine"]

_COMMAND: Final = (sys.executable, "-c", "import sys; from gristmill.cli import main; sys.exit(main())")
_FEW: Final = 8
_MANY: Final = 4096
_STARTS_s: Final = 60.0
_STOPS_s: Final = 60.0
_LEASE_s: Final = 3.0


def _environment() -> dict[str, str]:
    """Return this process's environment without settings of a gateway."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GRISTMILL_")}


@asynccontextmanager
async def engine(folder: Path, *, gap_s: float, slow_gap_s: float, seed: int) -> AsyncGenerator[str]:
    """Run the engine and give its address; what it saw is in `engine.jsonl` of the folder afterwards."""
    written = folder / "script.json"
    written.write_bytes(orjson.dumps(script(gap_s=gap_s, slow_gap_s=slow_gap_s, seed=seed)))
    arguments = ("-m", "tests.gateway.load.engine", str(written), str(folder / "engine.jsonl"))
    with (folder / "engine.log").open("ab") as log:
        running = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
        )
        try:
            yield await _said(running, folder / "engine.log")
        finally:
            await _end(running)


async def _said(running: Process, log: Path) -> str:
    assert running.stdout is not None
    async with asyncio.timeout(_STARTS_s):
        line = await running.stdout.readline()
    if not line:
        raise RuntimeError(f"a process of the run ended with status {await running.wait()}:\n{_tail(log)}")
    return line.decode().strip()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


async def _end(running: Process) -> None:
    if running.returncode is None:
        running.terminate()
        try:
            async with asyncio.timeout(_STOPS_s):
                await running.wait()
        except TimeoutError:
            running.kill()
            await running.wait()


class GatewayProcess:
    """`gristmill serve`, as its users start it.

    Args:
        folder: of the ledger, the key and the log.
        upstream: address of the engine.
        ledger: of several gateways; None: a file in the folder.
        name: of the log.

    Attributes:
        url: where it listens while it runs.
        ledger: where its calls go.
        up: set while it is known to listen.
        killed_at: when it was killed, in unix seconds.
        down_s: how long it did not listen, all in all.
        peak_rss_bytes: the most that one of its processes had in memory.
    """

    def __init__(self, folder: Path, upstream: str, ledger: str | None = None, name: str = "gateway") -> None:
        self._port: Final = _steady_port()
        self._starts = 0
        self._upstream: Final = upstream
        self._running: Process | None = None
        self._down_at = 0.0
        self.log: Final = folder / f"{name}.log"
        self.ledger: Final = folder / "load.gristmill" if ledger is None else PostgresAddress(ledger)
        self._key: Final = folder / "load.admin-key"
        self.url: Final = f"http://127.0.0.1:{self._port}"
        self.up: Final = asyncio.Event()
        self.killed_at: list[float] = []
        self.down_s = 0.0
        self.peak_rss_bytes = 0

    @property
    def admin_key(self) -> str:
        """The administrator's key, which stays the same."""
        return self._key.read_text().strip()

    async def launch(self) -> None:
        """Start the process; it need not listen yet."""
        # Every second one forgets attempts between their calls, and has to read them again.
        remembers = str(_MANY if self._starts % 2 else _FEW)
        self._starts += 1
        settings = ("--upstream", self._upstream, "--ledger", str(self.ledger), "--port", str(self._port))
        settings += ("--admin-key-file", str(self._key), "--lease-s", str(_LEASE_s))
        with self.log.open("ab") as log:
            self._running = await asyncio.create_subprocess_exec(
                *_COMMAND,
                "serve",
                *settings,
                *("--max-attempts-in-memory", remembers, "--min-free-bytes", "0", "--json"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(),
            )

    async def listens(self) -> None:
        """Wait until it says that it listens."""
        assert self._running is not None
        told = orjson.loads(await _said(self._running, self.log))
        assert told["address"] == self.url, told
        if self._down_at:
            self.down_s += monotonic() - self._down_at
        self.up.set()

    async def kill(self) -> None:
        """Kill it where it stands, as the kernel does when memory is short."""
        assert self._running is not None
        if self.up.is_set():
            self._down_at = monotonic()
        self.up.clear()
        self._measure()
        self.killed_at.append(time())
        self._running.send_signal(signal.SIGKILL)
        await self._running.wait()

    async def stop(self) -> int:
        """Let it end in good order and return its status."""
        assert self._running is not None
        self._measure()
        await _end(self._running)
        assert self._running.returncode is not None
        return self._running.returncode

    async def ended(self) -> None:
        """See to it that no process is left."""
        if self._running is not None and self._running.returncode is None:
            self._running.kill()
            await self._running.wait()

    def _measure(self) -> None:
        assert self._running is not None
        try:
            lines = Path(f"/proc/{self._running.pid}/status").read_text().splitlines()
        except OSError:
            # Not this system, or the process has ended by itself, which the next wait tells.
            return
        peak = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
        self.peak_rss_bytes = max(self.peak_rss_bytes, peak)

    def lost_on_open(self) -> list[int]:
        """Return, for each start, how many calls it found that nobody would finish."""
        return [said["lost_on_open"] for said in self._logged() if said["event"] == "started"]

    def complaints(self) -> list[str]:
        """Return what it logged that it should have had no reason to log."""
        return [str(said) for said in self._logged() if said["level"] not in {"debug", "info"}]

    def _logged(self) -> Iterator[dict[str, Any]]:
        *lines, last = self.log.read_bytes().split(b"\n")
        assert not last, last
        for line in lines:
            if line.startswith(b"note: "):
                continue
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError:
                # A line that a kill cut off, or one that is none of the gateway's own.
                yield {"level": "unknown", "event": line.decode(errors="replace")}


class Fleet:
    """The gateways of one ledger.

    Args:
        folder, upstream, ledger: as `GatewayProcess`.
        size: how many.

    Attributes:
        gateways: all of them.
    """

    def __init__(self, folder: Path, upstream: str, ledger: str | None, size: int) -> None:
        names = ["gateway"] if size == 1 else [f"gateway-{n}" for n in range(size)]
        self.gateways: Final = [GatewayProcess(folder, upstream, ledger, name) for name in names]

    @property
    def admin_key(self) -> str:
        """The administrator's key, which all of them have."""
        return self.gateways[0].admin_key

    def any_url(self, draw: random.Random) -> str:
        """Return where one of them listens, or will again."""
        return draw.choice(self.gateways).url

    def through(self, url: str, draw: random.Random) -> str:
        """Send a request to any of several, whichever it was meant for."""
        if len(self.gateways) == 1:
            return url
        return self.any_url(draw) + "/" + url.split("/", 3)[3]

    async def start(self) -> None:
        """Start all of them, and wait until they listen."""
        for gateway in self.gateways:
            await gateway.launch()
            await gateway.listens()

    async def stop(self) -> list[int]:
        """Let them end in good order and return their statuses."""
        return [await gateway.stop() for gateway in self.gateways]

    async def ended(self) -> None:
        """See to it that no process is left."""
        for gateway in self.gateways:
            await gateway.ended()


def _steady_port() -> int:
    """Find a free port that no connection is ever given as its own.

    While the gateway is down its clients go on connecting. To a port of the range that the kernel takes their own ports
    from, one of them would sooner or later be connected to itself, and keep the gateway from its port.
    """
    try:
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        lowest = 32768
    for _ in range(200):
        port = random.randrange(max(1024, lowest - 16384), lowest)
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port was found")
