"""Processes of the stack: started, told apart by what they print, measured from outside, ended.

CPU is that of the whole process, threads included, as the kernel counts it; only Linux tells it of another process, and
elsewhere every figure of that kind is None.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Final, Self

from gristmill.ledger import AttemptKey
from gristmill.service.client import AdminClient

__all__ = ["LINUX", "Gateway", "LiteLLM", "Process", "Server", "raise_file_limit"]

LINUX: Final = sys.platform == "linux"
_READY_s: Final = 120.0
_END_s: Final = 60.0


def raise_file_limit(wanted: int) -> int:
    """Let this process and those it starts open files as far as the system allows; return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(soft, limit)


class Process:
    """One process, and what it uses.

    Args:
        command: of the program, whose first line on standard output is kept.
        environment: over that of this process.
        silent: what it says on standard error is nobody's business.
    """

    def __init__(self, *command: str, environment: dict[str, str] | None = None, silent: bool = False) -> None:
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if silent else None,
            text=True,
            # Settings of somebody's gateway are not the benchmark's.
            env={key: said for key, said in os.environ.items() if not key.startswith("GRISTMILL_")}
            | (environment or {}),
        )

    def line(self) -> str:
        """Return the next line that it prints."""
        assert self._process.stdout is not None
        said = self._process.stdout.readline().strip()
        if not said:
            raise RuntimeError(f"{self._process.args!r} ended, status {self._process.wait()}")
        return said

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        """Return the seconds of CPU it has used, NaN where the system does not tell."""
        # The clock of a process as `clock_getcpuclockid` names it.
        return time.clock_gettime((~self.pid << 3) | 2) if LINUX else float("nan")

    def status(self, name: str) -> int:
        """Return a figure of memory, in bytes: `VmRSS` now, `VmHWM` at most."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        return int(text.partition(f"{name}:")[2].split()[0]) * 1024

    def files(self) -> int:
        """Return how many files it has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def end(self) -> None:
        """Ask it to end, and wait until it has."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_END_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class Server(Process):
    """One of the modules beside this, which print their port."""

    def __init__(self, module: str, *arguments: str) -> None:
        super().__init__(sys.executable, "-m", f"bench.gateway_stack.{module}", *arguments)
        self.port = int(self.line())
        self.url = f"http://127.0.0.1:{self.port}"


class Gateway(Process):
    """`gristmill serve` in front of an engine, with a ledger of its own.

    Args:
        engine: its address.
        ledger: where calls are kept.
        options: of the command; without any, settings are as they are by default.
    """

    def __init__(self, engine: str, ledger: Path, *options: str) -> None:
        where = ["--upstream", engine, "--ledger", str(ledger), "--port", "0", *options]
        run = "from gristmill.cli import main; main()"
        super().__init__(sys.executable, "-c", run, "serve", "--json", *where, silent=True)
        said = json.loads(self.line())
        if "address" not in said:
            self.end()
            raise RuntimeError(f"the gateway did not start: {said}")
        self.ledger = ledger
        self.port = int(said["address"].rpartition(":")[2])
        self.admin_key = Path(said["admin_key_file"]).read_text().strip()
        self.admin = AdminClient(said["address"], self.admin_key)

    def open(self, rollouts: int, name: str = "bench") -> dict[AttemptKey, str]:
        """Open rollouts; return their keys."""
        opened = [self.admin.open(rollout_id=f"{name}-{number}") for number in range(rollouts)]
        return {one.attempt_key: one.key for one in opened}


class LiteLLM(Process):
    """LiteLLM's proxy in front of an engine.

    Args:
        python: an interpreter that has `litellm[proxy]`.
        engine: address of the engine.
        model: the engine's name of its model.
        folder: for its settings.
    """

    def __init__(self, python: str, engine: str, model: str, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        settings = folder / "litellm.json"
        to = {"model": f"openai/{model}", "api_base": f"{engine}/v1", "api_key": "none"}
        settings.write_text(json.dumps({"model_list": [{"model_name": model, "litellm_params": to}]}))
        self.key = f"sk-{secrets.token_hex(16)}"
        arguments = ["--config", str(settings), "--host", "127.0.0.1", "--port", str(self.port), "--telemetry", "False"]
        super().__init__(
            python,
            "-c",
            "from litellm import run_server; run_server()",
            *arguments,
            # Without the first it would ask a server on the internet for prices.
            environment={
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "LITELLM_LOG": "ERROR",
                "LITELLM_MASTER_KEY": self.key,
                "PYTHONPATH": "",
            },
            silent=True,
        )
        self._wait()

    def _wait(self) -> None:
        until = time.monotonic() + _READY_s
        while self._process.poll() is None and time.monotonic() < until:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health/liveliness", timeout=5):
                    return
            except OSError:
                time.sleep(0.2)
        self.end()
        raise RuntimeError("LiteLLM's proxy did not start")
