"""The gateway as a user runs it, in a process of its own, and what its administrator asks of it.

Invariant: every process that was started here has ended when its context has.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from gristmill.ledger import AttemptKey, SqliteReader, read_holder
from gristmill.records import Capture

__all__ = ["COMMAND", "Gateway", "Rollout", "captured", "gateway", "gristmill", "process", "until", "until_healthy"]

Json = dict[str, Any]

COMMAND = (sys.executable, "-c", "import sys; from gristmill.cli import main; sys.exit(main())")
"""The command of this interpreter's gristmill, wherever its script was put."""


def until(what: str, holds: Any, timeout_s: float = 60.0) -> Any:
    """Wait until `holds()` is true and return what it returned."""
    deadline = monotonic() + timeout_s
    while not (value := holds()):
        if monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s} s for {what}")
        sleep(0.02)
    return value


def until_healthy(what: str, url: str, running: subprocess.Popen[bytes], log: Path, timeout_s: float) -> None:
    """Wait until a server's `/health` answers, or tell how its process ended."""

    def healthy() -> bool:
        if running.poll() is not None:
            raise RuntimeError(f"{what} ended with status {running.returncode}:\n{log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return True
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    until(what, healthy, timeout_s)


@contextmanager
def process(argv: Sequence[str], log: Path, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process and all it starts until the block ends; what it says goes to a file."""
    with log.open("ab") as output:
        running = subprocess.Popen(
            list(argv), stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=env, start_new_session=True
        )
        try:
            yield running
        finally:
            running.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                running.wait(40)
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)  # what it started may have outlived it
            running.wait()


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what would configure the gateway or a harness."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("GRISTMILL_", "E2E_"))}


def gristmill(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command of gristmill to its end."""
    done = subprocess.run(
        [*COMMAND, *words],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )
    if check and done.returncode != 0:
        raise RuntimeError(f"gristmill {' '.join(words)}: status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def captured(ledger: Path, key: AttemptKey) -> Capture:
    """Read an attempt out of a ledger's file."""
    reader = SqliteReader(ledger)
    try:
        return reader.read(key, exchanges=True)[0]
    finally:
        reader.close()


@dataclass(frozen=True)
class Rollout:
    """An open attempt, its key, and the addresses a harness may be given."""

    name: str
    attempt: int
    key: str
    base: str
    prefixed: str

    @property
    def attempt_key(self) -> AttemptKey:
        return AttemptKey(self.name, self.attempt)


class Gateway:
    """A running gateway."""

    def __init__(self, address: str, ledger: Path, running: subprocess.Popen[bytes]) -> None:
        self.address = address
        self.ledger = ledger
        self.running = running
        self._admin_key = ledger.with_name(ledger.name + ".admin-key").read_text().strip()

    def admin(self, method: str, path: str, body: Json | None = None, timeout_s: float = 60.0) -> Any:
        """Ask the admin API.

        Raises:
            RuntimeError: with status and body, where it refuses.
        """
        request = urllib.request.Request(
            f"{self.address}/gristmill/v1{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"authorization": f"Bearer {self._admin_key}", "content-type": "application/json"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{method} {path}: status {error.code}: {error.read().decode()}") from error

    def begin(self, name: str, **asked: Any) -> Rollout:
        """Open an attempt."""
        told = self.admin("POST", "/rollouts", {"rollout_id": name, **asked})
        prefixed = f"{told['base_url']}/r/{told['rollout_id']}/{told['attempt']}"
        return Rollout(told["rollout_id"], told["attempt"], told["key"], told["base_url"], prefixed)

    def finish(self, rollout: Rollout, result: Any = None, *, reward: float = 1.0, drain_s: float = 20.0) -> Json:
        """Finish an attempt with what its harness handed back."""
        path = f"/rollouts/{rollout.name}/{rollout.attempt}/finish"
        return self.admin("POST", path, {"result": result, "reward": reward, "drain_s": drain_s})

    def captured(self, rollout: Rollout) -> Capture:
        """Read an attempt out of the ledger's file."""
        return captured(self.ledger, rollout.attempt_key)

    def settled(self, rollout: Rollout, calls: int) -> Capture:
        """Wait until so many calls have an outcome and none is running, and read them."""
        path = f"/rollouts/{rollout.name}/{rollout.attempt}"

        def ready() -> bool:
            told = self.admin("GET", path)
            return told["in_flight"] == 0 and told["calls"] >= calls

        until(f"{calls} calls of {rollout.name}", ready, 30)
        return self.captured(rollout)


@contextmanager
def gateway(upstream: str, folder: Path, *settings: str, port: int = 0) -> Iterator[Gateway]:
    """Run `gristmill serve` before an engine, with its ledger in a folder."""
    ledger = folder / "run.gristmill"
    argv = [*COMMAND, "serve", "--upstream", upstream, "--ledger", str(ledger), "--port", str(port)]
    log = folder / "gateway.log"
    with process([*argv, *settings], log, clean_environment()) as running:

        def address() -> str | None:
            if running.poll() is not None:
                raise RuntimeError(f"the gateway ended with status {running.returncode}:\n{log.read_text()[-3000:]}")
            holder = read_holder(ledger)
            return holder.address if holder is not None and holder.pid == running.pid else None

        yield Gateway(until("the gateway", address, 60), ledger, running)
