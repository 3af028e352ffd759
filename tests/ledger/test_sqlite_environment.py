"""Bad environments: each has its own error, and none costs what was acknowledged."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from gristmill.errors import Code, LedgerError
from gristmill.ledger import AttemptKey, MemoryLedger, SqliteLedger, SqliteReader, migrate, read_holder
from gristmill.ledger.filesystem import file_system_of
from gristmill.ledger.lock import lock_path
from gristmill.ledger.schema import APPLICATION_ID, SCHEMA_VERSION
from gristmill.records import Result
from tests.ledger.attempts import chain, comparable, fill, lone

ROOT = Path(__file__).parents[2]
KEY = AttemptKey("r")


def refused(code: Code, work: object, *args: object, **kwargs: object) -> LedgerError:
    assert callable(work)
    with pytest.raises(LedgerError) as caught:
        work(*args, **kwargs)
    assert caught.value.code == code, caught.value.message
    return caught.value


def python(*arguments: str, prefix: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# One writer


def test_a_second_writer_is_refused_and_told_who_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.ledger"
    with SqliteLedger(path) as ledger:
        fill(ledger, KEY)
        ledger.announce("http://127.0.0.1:8000")
        error = refused(Code.LEDGER_LOCKED, SqliteLedger, path)
        assert str(os.getpid()) in error.message
        assert error.hint is not None
        assert "http://127.0.0.1:8000" in error.hint
        holder = read_holder(path)
        assert holder is not None
        assert (holder.pid, holder.instance) == (os.getpid(), ledger.instance)
        refused(Code.LEDGER_LOCKED, migrate, path)
        script = f"from gristmill.ledger import SqliteLedger\nSqliteLedger({str(path)!r})"
        assert "expected to be the only writer" in python("-c", script).stderr
        fill(ledger, AttemptKey("other"))
    assert read_holder(path) is None
    with SqliteLedger(path) as ledger:
        assert ledger.previous is None
        assert ledger.counts().calls == 10


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "x.ledger"
    script = (
        "import os\nfrom gristmill.ledger import *\n"
        f"ledger = SqliteLedger({str(path)!r})\nledger.admit(AttemptKey('r'), 'c')\nprint(os.getpid())\n"
        "os.sys.stdout.flush()\nos.kill(os.getpid(), 9)"
    )
    pid = int(python("-c", script).stdout)
    with SqliteReader(path) as reader:
        # The writer is dead; its log is still to be read.
        assert len(reader.read(KEY)[0].lost) == 1
    with SqliteLedger(path) as ledger:
        assert ledger.previous is not None
        assert ledger.previous.pid == pid
        assert ledger.lost_on_open == 1
        [lost] = ledger.read(KEY)[0].lost
        assert lost.reason == "the process that made the call ended before its outcome"
        refused(Code.CALL_IDENTITY_REUSED, ledger.commit, KEY, lone("c"))


def test_opening_leaves_a_frozen_attempt_as_its_snapshot_says(tmp_path: Path) -> None:
    path = tmp_path / "x.ledger"
    with SqliteLedger(path) as ledger:
        ledger.admit(KEY, "c")
        digest = ledger.freeze(KEY)
    with SqliteLedger(path) as ledger:
        assert ledger.lost_on_open == 0
        assert ledger.freeze(KEY) == digest
        ledger.retire(KEY, digest)


def test_a_fork_neither_writes_nor_keeps_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "x.ledger"
    script = f"""
import os, sys, time
from gristmill.errors import LedgerError
from gristmill.ledger import *
ledger = SqliteLedger({str(path)!r})
ledger.admit(AttemptKey("r"), "c")
if not os.fork():
    try:
        ledger.admit(AttemptKey("r"), "d")
    except LedgerError as error:
        print(error.code, len(ledger.read(AttemptKey("r"))[0].lost))
    sys.stdout.flush()
    os.close(1), os.close(2)
    time.sleep(20)
    os._exit(0)
time.sleep(1)
os._exit(0)
"""
    done = python("-W", "ignore", "-c", script)
    assert done.stdout == "ledger_closed 1\n", done.stderr
    with SqliteLedger(path) as ledger:
        assert ledger.lost_on_open == 1


def test_a_closed_ledger_says_so(tmp_path: Path) -> None:
    ledger = SqliteLedger(tmp_path / "x.ledger")
    ledger.close()
    ledger.close()
    refused(Code.LEDGER_CLOSED, ledger.admit, KEY, "c")
    refused(Code.LEDGER_CLOSED, ledger.counts)


def test_a_full_queue_refuses_at_once(tmp_path: Path) -> None:
    with SqliteLedger(tmp_path / "x.ledger", most_waiting=0) as ledger:
        refused(Code.LEDGER_BUSY, ledger.admit, KEY, "c")
        assert ledger.waiting() == 0


# Files that are something else


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_bytes(b"not a database, but longer than its header would be " * 5)
    short = tmp_path / "short"
    short.write_bytes(b"SQLite format 3\0")
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE t (x)")
        connection.execute("PRAGMA user_version = 1")
    connection.close()
    for path in (text, short, other):
        before = path.read_bytes()
        for kind in (SqliteLedger, SqliteReader, migrate):
            error = refused(Code.LEDGER_FOREIGN, kind, path)
            assert error.hint
        assert path.read_bytes() == before
        assert not lock_path(path).exists()
    refused(Code.LEDGER_FOREIGN, SqliteLedger, tmp_path)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    refused(Code.FILE_UNREADABLE, SqliteReader, tmp_path / "none")
    refused(Code.FILE_UNREADABLE, migrate, tmp_path / "none")
    refused(Code.FILE_UNREADABLE, SqliteLedger, tmp_path / "no" / "folder")
    assert list(tmp_path.iterdir()) == []


def with_version(path: Path, version: int) -> None:
    with SqliteLedger(path) as ledger:
        fill(ledger, KEY)
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    connection.close()


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.ledger"
    with_version(path, SCHEMA_VERSION + 1)
    for kind in (SqliteLedger, SqliteReader, migrate):
        assert "newer" in str(refused(Code.SCHEMA_UNSUPPORTED, kind, path).hint)


def test_a_file_that_was_only_begun_is_made_whole(tmp_path: Path) -> None:
    # A kill between making the file and making the tables.
    path = tmp_path / "x.ledger"
    path.touch()
    with SqliteLedger(path) as ledger:
        fill(ledger, KEY)
    begun = tmp_path / "y.ledger"
    connection = sqlite3.connect(begun)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.close()
    refused(Code.LEDGER_FOREIGN, SqliteReader, begun)
    with SqliteLedger(begun) as ledger:
        assert ledger.counts().calls == 0
    connection = sqlite3.connect(begun)
    assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    connection.close()


# File systems


MOUNTINFO = """22 1 254:0 / / rw - ext4 /dev/vda rw
30 22 0:41 / /srv/nfs rw,relatime shared:9 - nfs4 host:/export rw
31 30 254:1 / /srv/nfs/local rw - xfs /dev/vdb rw
32 22 0:50 / /mnt/with\\040space rw - fuse.sshfs me@host: rw
33 22 0:51 / /twice rw - ext4 /dev/vdc rw
34 22 0:52 / /twice rw - cifs //host/x rw
35 22 0:53 / /overlay rw - overlay overlay rw
broken line
"""


def test_network_file_systems_are_refused(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTINFO)
    kinds = {
        "/srv/nfs/x": "nfs4",
        "/srv/nfs/local/x": "xfs",
        "/srv/nfs2/x": "ext4",
        "/mnt/with space/x": "fuse.sshfs",
        "/twice/x": "cifs",
        "/overlay/x": "overlay",
    }
    for path, kind in kinds.items():
        assert file_system_of(Path(path), mounts) == kind
    assert file_system_of(tmp_path, tmp_path / "none") is None
    for kind in ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "lustre", "ceph"):
        mounts.write_text(f"22 1 0:1 / / rw - {kind} x rw\n")
        error = refused(Code.LEDGER_NETWORK_FILE_SYSTEM, SqliteLedger, tmp_path / "x.ledger", mounts=mounts)
        assert "PostgreSQL" in str(error.hint)
    assert not (tmp_path / "x.ledger").exists()


def can_mount() -> bool:
    if sys.platform != "linux" or os.geteuid() or shutil.which("unshare") is None:
        return False
    return not subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False
    ).returncode


mounting = pytest.mark.skipif(not can_mount(), reason="needs root and the right to mount")

READ_ONLY = """
import sys
from gristmill.errors import LedgerError
from gristmill.ledger import *
path = sys.argv[1]
try:
    SqliteLedger(path)
except LedgerError as error:
    print(error.code)
with SqliteReader(path) as reader:
    print(reader.counts().calls)
"""


@mounting
def test_a_read_only_folder_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "x.ledger"
    with SqliteLedger(path) as ledger:
        fill(ledger, KEY)
    mount = f"mount --bind {tmp_path} {tmp_path} && mount -o remount,ro,bind {tmp_path} && exec "
    script = tmp_path / "script.py"
    script.write_text(READ_ONLY)
    done = python(str(script), str(path), prefix=("unshare", "-m", "bash", "-c", mount + '"$0" "$@"'))
    assert done.stdout == "ledger_read_only\n5\n", done.stderr


@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="needs a user that is not root")
def test_a_read_only_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.ledger"
    with SqliteLedger(path) as ledger:
        fill(ledger, KEY)
    path.chmod(0o444)
    for parent in [tmp_path, *tmp_path.parents[:3]]:
        if "pytest" in str(parent):
            parent.chmod(0o777)
    lock_path(path).chmod(0o666)
    script = tmp_path / "script.py"
    script.write_text(READ_ONLY)
    prefix = ("setpriv", "--reuid", "65534", "--clear-groups") if os.geteuid() == 0 else ()
    # The interpreter may stand where that user cannot go.
    done = python("-c", "import gristmill.ledger", prefix=prefix)
    if done.returncode:
        pytest.skip("the other user cannot run this interpreter")
    done = python(str(script), str(path), prefix=prefix)
    assert done.stdout == "ledger_read_only\n5\n", done.stderr


FULL = """
import os, sys
from gristmill.errors import LedgerError
from gristmill.ledger import *
from tests.ledger.attempts import chain
folder, filler = sys.argv[1], sys.argv[1] + "/filler"
with open(filler, "wb") as file:
    file.write(bytes(5_000_000))
ledger = SqliteLedger(folder + "/x.ledger")
told, codes = [], []
def write(attempts):
    for n in attempts:
        key = AttemptKey(f"r{n}")
        for call in chain(20, n, long_chars=4000):
            try:
                ledger.commit(key, call)
            except LedgerError as error:
                codes.append(str(error.code))
                break
            told.append((key, call.record.model_call_id))
def missing():
    found = {(key, record.model_call_id) for key in ledger.attempts() for record in ledger.read(key)[0].records}
    return set(told) - found, found - set(told)
write(range(60))
print(sorted(set(codes)), len(told) > 20, missing())
os.remove(filler)
resource_freed = len(told)
codes.clear()
write(range(100, 102))
print(codes, len(told) - resource_freed, missing())
ledger.close()
ledger = SqliteLedger(folder + "/x.ledger")
print(missing())
ledger.close()
"""
NOTHING = "(set(), set())"


@mounting
def test_a_full_disk_costs_only_what_it_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FULL)
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=9m tmpfs {disk} && exec "
    done = python(str(script), str(disk), prefix=("unshare", "-m", "bash", "-c", mount + '"$0" "$@"'))
    assert done.stdout.splitlines() == [f"['ledger_full'] True {NOTHING}", f"[] 40 {NOTHING}", NOTHING], done.stderr


LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from gristmill.errors import LedgerError
from gristmill.ledger import *
from tests.ledger.attempts import chain
ledger = SqliteLedger(sys.argv[1])
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, hard))
told, codes = 0, []
for n in range(60):
    for call in chain(20, n, long_chars=4000):
        try:
            ledger.commit(AttemptKey(f"r{n}"), call)
            told += 1
        except LedgerError as error:
            codes.append(str(error.code))
            break
print(sorted(set(codes)), told > 20, ledger.counts().calls == told)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
for call in chain(20, 1, long_chars=4000):
    ledger.commit(AttemptKey("after"), call)
print(ledger.counts().calls == told + 20)
ledger.close()
"""


def test_a_file_that_may_not_grow_costs_only_what_it_refused(tmp_path: Path) -> None:
    done = python("-c", LIMITED, str(tmp_path / "x.ledger"))
    assert done.stdout.splitlines() == ["['ledger_write_failed'] True True", "True"], done.stdout + done.stderr


# Readers


def _read_all(path: str, until: int, results: multiprocessing.Queue[object]) -> None:
    try:
        most = reads = 0
        with SqliteReader(path) as reader:
            while most < until:
                for key in reader.attempts():
                    capture, _ = reader.read(key, exchanges=True)
                    records = capture.records
                    assert [record.ordinal for record in records] == list(range(len(records)))
                    assert set(capture.tokens) == {record.model_call_id for record in records}
                    assert len(dict(capture.exchanges)) == len(records)
                    reads += 1
                most = reader.counts().calls
        results.put(reads)
    except BaseException as error:  # noqa: BLE001 - reported to the test
        results.put(repr(error))


def test_many_processes_read_while_one_writes(tmp_path: Path) -> None:
    # Whoever watches a run must see whole calls, and must not slow it down.
    path = tmp_path / "x.ledger"
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[object] = context.Queue()
    with SqliteLedger(path) as ledger:
        readers = [context.Process(target=_read_all, args=(str(path), 200, results)) for _ in range(3)]
        for reader in readers:
            reader.start()
        for n in range(20):
            fill(ledger, AttemptKey(f"r{n}"), 10, n)
        found = [results.get(timeout=60) for _ in readers]
        for reader in readers:
            reader.join()
    assert all(isinstance(reads, int) and reads > 0 for reads in found), found


def test_a_reader_that_stays_does_not_hold_the_writer(tmp_path: Path) -> None:
    path = tmp_path / "x.ledger"
    with SqliteLedger(path) as ledger:
        for n in range(3):
            fill(ledger, AttemptKey(f"r{n}"), 2, n)
        with SqliteReader(path) as reader:
            lines = reader.summaries()
            next(lines)
            fill(ledger, AttemptKey("more"), 2)
            assert len(list(lines)) >= 2
            assert reader.counts().calls == 8
            # Rows come with the state that they had when their call asked for them.
            assert len(reader.read(AttemptKey("more"))[0].records) == 2


# Damage


def survives(path: Path, key: AttemptKey) -> None:
    """Use everything; only a LedgerError may come out."""
    codes: list[Code] = []
    for attempt in (key, AttemptKey("s")):
        try:
            with SqliteReader(path) as reader:
                list(reader.summaries())
                reader.counts()
                capture, _ = reader.read(attempt, exchanges=True)
                dict(capture.exchanges)
                reader.late(attempt)
        except LedgerError as error:
            codes.append(error.code)
    with suppress(LedgerError), SqliteLedger(path) as ledger:
        with suppress(LedgerError):
            fill(ledger, AttemptKey("new"), 2)
        ledger.commit(key, lone("another"))
        ledger.freeze(key)
    expected = {Code.LEDGER_DAMAGED, Code.LEDGER_FOREIGN, Code.ROLLOUT_UNKNOWN, Code.SCHEMA_UNSUPPORTED}
    assert expected.issuperset(codes), codes


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_file_gives_only_our_errors(tmp_path: Path, seed: int) -> None:
    import random

    chance = random.Random(seed)
    whole = tmp_path / "whole.ledger"
    with SqliteLedger(whole) as ledger:
        for n, name in enumerate("rs"):
            fill(ledger, AttemptKey(name), 6, n)
            ledger.finish(AttemptKey(name), Result(value={"a": list(range(50))}, reward=1.0))
    good = whole.read_bytes()
    for turn in range(25):
        path = tmp_path / f"{turn}.ledger"
        data = bytearray(good)
        kind = chance.randrange(4)
        if kind == 0:
            data = data[: chance.randrange(len(data))]
        elif kind == 1:
            for _ in range(chance.randrange(1, 40)):
                data[chance.randrange(len(data))] = chance.randrange(256)
        elif kind == 2:
            page = chance.randrange(len(data) // 4096) * 4096
            data[page : page + 4096] = chance.randbytes(4096)
        else:
            at = chance.randrange(len(data) - 600)
            data[at : at + 512] = bytes(512)
        path.write_bytes(data)
        survives(path, AttemptKey("r"))


def test_a_changed_byte_is_never_read_as_data(tmp_path: Path) -> None:
    # SQLite does not notice a changed byte inside a blob; a training row would.
    path = tmp_path / "x.ledger"
    memory = MemoryLedger()
    fill(memory, KEY, 4)
    wanted = comparable(*memory.read(KEY, exchanges=True))
    with SqliteLedger(path) as ledger:
        fill(ledger, KEY, 4)
    good = path.read_bytes()
    call = next(chain(1))
    assert call.tokens is not None
    pieces = [
        call.tokens.ids_T.tobytes(),
        call.tokens.logprobs_T[12:].tobytes(),
        b"answer 2 of",
        b'"r1"',
        b"sequence_d",
    ]
    for piece in pieces:
        noticed = 0
        for place in (match.start() for match in re.finditer(re.escape(piece), good)):
            data = bytearray(good)
            data[place] ^= 1
            path.write_bytes(data)
            try:
                with SqliteReader(path) as reader:
                    # What a page split left behind belongs to no row.
                    assert comparable(*reader.read(KEY, exchanges=True)) == wanted
            except LedgerError as error:
                noticed += error.code == Code.LEDGER_DAMAGED
        assert noticed, piece


def test_a_killed_reader_does_not_hold_the_log(tmp_path: Path) -> None:
    path = tmp_path / "x.ledger"
    with SqliteLedger(path) as ledger:
        fill(ledger, KEY)
        script = (
            f"import os, signal\nfrom gristmill.ledger import *\nr = SqliteReader({str(path)!r})\n"
            "with r._reading() as c:\n    c.execute('SELECT * FROM calls').fetchone()\n    os.kill(os.getpid(), 9)"
        )
        assert python("-c", script).returncode == -signal.SIGKILL
        fill(ledger, AttemptKey("s"))
    assert not path.with_name("x.ledger-wal").exists()
