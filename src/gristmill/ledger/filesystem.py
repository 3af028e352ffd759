"""On which kind of file system a path is.

Invariant: SQLite's write-ahead log needs shared memory and locks that all processes see; a network file system has
neither, so a ledger there is refused before anything is written.

Not here: file systems of other systems than Linux; they are not checked.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from gristmill.errors import Code, LedgerError

__all__ = ["MOUNTS", "file_system_of", "refuse_network"]

MOUNTS: Final = Path("/proc/self/mountinfo")

# fmt: off
_NETWORK: Final = frozenset(
    {
        "9p", "acfs", "afs", "beegfs", "ceph", "cephfs", "cifs", "coda", "davfs", "gfs", "gfs2", "glusterfs", "gpfs",
        "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "pvfs2", "smb2", "smb3", "smbfs", "wekafs",
    }
)
_NETWORK_FUSE: Final = re.compile(
    r"fuse\.(sshfs|s3fs|goofys|gcsfuse|mount-s3|mountpoint-s3|rclone|glusterfs|ceph|ceph-fuse|juicefs|curlftpfs|"
    r"davfs2?|cifs|smbnetfs|nfs|blobfuse2?|hdfs|alluxio.*|beegfs|moosefs|mfs|lizardfs|seaweedfs|s3ql)"
)
# fmt: on
_escaped = re.compile(r"\\(\d{3})")


def file_system_of(path: Path, mounts: Path = MOUNTS) -> str | None:
    """Return the type of the file system that holds a path, None where that cannot be told (not on Linux)."""
    try:
        lines = mounts.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return None
    place = path.resolve()
    found, depth = None, -1
    for line in lines:
        fields, _, rest = line.partition(" - ")
        names = fields.split()
        kind = rest.split()[:1]
        if len(names) < 5 or not kind:
            continue
        point = Path(_escaped.sub(lambda match: chr(int(match[1], 8)), names[4]))
        # Of mounts on one point the last covers the others.
        if len(point.parts) >= depth and place.is_relative_to(point):
            found, depth = kind[0], len(point.parts)
    return found


def refuse_network(path: Path, mounts: Path = MOUNTS) -> str | None:
    """Return the type of the path's file system, None where it was not checked.

    Raises:
        LedgerError: `ledger_network_file_system`.
    """
    kind = file_system_of(path, mounts)
    if kind is not None and (kind in _NETWORK or _NETWORK_FUSE.fullmatch(kind)):
        raise LedgerError(
            f"expected a local file system, {path} is on {kind}",
            code=Code.LEDGER_NETWORK_FILE_SYSTEM,
            where=str(path),
            hint="put the ledger on a local disk, or use a PostgreSQL ledger for several machines",
        )
    return kind
