"""A PostgreSQL server of one's own, from the installed package, in a folder that is removed again.

    server = shared_server()                 # one for all tests; a crash of the machine may lose what it holds
    url = server.url("schema_of_this_test")

It listens on a socket in its folder and on no port, lets everybody in, and runs as a user of its own where the tests
run as root, because the server refuses to be root.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psycopg

__all__ = ["NO_SERVER", "PostgresServer", "binaries", "fresh_url", "shared_server", "wanted_server"]

NO_SERVER = "no PostgreSQL server is installed (expected /usr/lib/postgresql/*/bin/postgres, or postgres on the PATH)"
_REQUIRED = "REQUIRE_POSTGRES"
_USERS = ("postgres", "nobody")
_STARTS_s = 30.0
_FAST = ("fsync=off", "full_page_writes=off")


def binaries() -> Path | None:
    """Return the folder of the newest server's programs, None where none is installed."""
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/postgres"),
        key=lambda path: int(path.parts[-3]) if path.parts[-3].isdecimal() else 0,
    )
    if found:
        return found[-1].parent
    on_path = shutil.which("postgres")
    return None if on_path is None else Path(os.path.realpath(on_path)).parent


class PostgresServer:
    """A server in a temporary folder, until `close`.

    Args:
        durable: sync to the disk, as servers do; without it the tests are faster.
    """

    def __init__(self, *, durable: bool = False) -> None:
        found = binaries()
        assert found is not None, NO_SERVER
        self._binaries = found
        self._durable = durable
        self._folder = Path(tempfile.mkdtemp(prefix="gristmill-pg-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            user = next(pwd.getpwnam(name) for name in _USERS if name in {each.pw_name for each in pwd.getpwall()})
            self._user = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            os.chown(self._folder, user.pw_uid, user.pw_gid)
        self._folder.chmod(0o755)
        options = ["-U", "postgres", "--auth=trust", "--no-sync", "-E", "UTF8", "--locale=C"]
        subprocess.run(
            [found / "initdb", "-D", self._data, *options],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=self._folder,
            **self._user,
        )
        self.start()

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def url(self, schema: str | None = None, *, user: str = "postgres", database: str = "postgres") -> str:
        """Return the URL of a ledger; of the default schema where none is named."""
        more = "" if schema is None else f"&schema={schema}"
        return f"postgresql://{user}@/{database}?host={self._folder}{more}"

    def connect(self) -> psycopg.Connection[Any]:
        """Connect to it as its administrator, past the ledger."""
        return psycopg.connect(f"host={self._folder} user=postgres dbname=postgres", autocommit=True)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        options = ["listen_addresses=", f"unix_socket_directories={self._folder}", "max_connections=100"]
        options += ["shared_buffers=64MB", "wal_level=minimal", "max_wal_senders=0", *(() if self._durable else _FAST)]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._binaries / "postgres", "-D", self._data, *(part for each in options for part in ("-c", each))],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self._folder,
                **self._user,
            )
        until = monotonic() + _STARTS_s
        while True:
            try:
                self.connect().close()
            except psycopg.OperationalError:
                if self._process.poll() is not None or monotonic() > until:
                    raise AssertionError((self._folder / "log").read_text("utf-8", "replace")[-4000:]) from None
                # Nothing tells when it is ready but an answer.
                sleep(0.02)
            else:
                return

    def kill(self) -> None:
        """Kill it and all its backends at once, as a crash does."""
        assert self._process is not None
        pid = self._process.pid
        backends = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(pid, signal.SIGKILL)
        for each in map(int, backends):
            with _GoneAlready():
                os.kill(each, signal.SIGKILL)
        self._process.wait()
        self._process = None
        until = monotonic() + _STARTS_s
        while any(_runs(int(each)) for each in backends) and monotonic() < until:
            sleep(0.01)

    def stop(self) -> None:
        """End it in order, without waiting for its clients."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """Stop it and remove its folder."""
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


class _GoneAlready:
    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        return kind is ProcessLookupError


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


_schemas = itertools.count()


def fresh_url() -> str:
    """Return the URL of a ledger that is not there yet, in a schema of its own; skips or fails as `wanted_server`."""
    return wanted_server().url(f"t{next(_schemas)}")


@functools.cache
def shared_server() -> PostgresServer:
    """Start the one server of this process, which ends with it."""
    server = PostgresServer()
    atexit.register(server.close)
    return server


def wanted_server() -> PostgresServer:
    """Return the shared server; skip the test where none is installed, or fail it where one has to be."""
    import pytest

    if binaries() is None:
        (pytest.fail if os.environ.get(_REQUIRED) else pytest.skip)(NO_SERVER)
    return shared_server()
