"""Keys: what a request carries, and whom it makes of its sender.

Invariant: keys are compared by digest or in constant time, are never stored, logged or repeated in an error, and a
rollout key never becomes more than its own attempt's.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Final

from gristmill.errors import Code, ConfigError

__all__ = ["ADMIN_PREFIX", "KEY_PREFIX", "AdminKey", "bearer", "key_digest", "mint_key", "read_admin_key"]

KEY_PREFIX: Final = "gm_"
ADMIN_PREFIX: Final = "gma_"


def mint_key() -> str:
    """Make a rollout key: `gm_` and 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def key_digest(key: str) -> str:
    """Return what is stored of a key: 64 hexadecimal digits of SHA-256."""
    return sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def bearer(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the key that a request carries: `Authorization: Bearer`, else `x-api-key`; None without one.

    A request that carries several different keys has none that counts.
    """
    found: set[str] = set()
    for name, value in headers:
        lowered = name.lower()
        if lowered == b"authorization":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer" and token.strip():
                found.add(token.strip().decode("latin-1"))
        elif lowered == b"x-api-key" and value.strip():
            found.add(value.strip().decode("latin-1"))
    return found.pop() if len(found) == 1 else None


class AdminKey:
    """The administrator's key, kept in a file that only its owner can read.

    Args:
        path: the file; made with a new key where there is none.

    Raises:
        ConfigError: `file_unreadable`: it cannot be made or read, or others can read it.
    """

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        try:
            key = _make(path)
        except FileExistsError:
            key = read_admin_key(path)
        except OSError as error:
            raise _unreadable(path, error) from error
        self._key: Final = key.encode()

    def matches(self, key: str | None) -> bool:
        """Compare in constant time."""
        given = b"" if key is None else key.encode("utf-8", "surrogatepass")
        return hmac.compare_digest(sha256(given).digest(), sha256(self._key).digest())

    def __repr__(self) -> str:
        return f"AdminKey({str(self.path)!r})"


def _make(path: Path) -> str:
    key = ADMIN_PREFIX + secrets.token_urlsafe(32)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(key + "\n")
        file.flush()
        os.fsync(file.fileno())
    return key


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"expected a private file for the admin key, got {error.strerror}", code=Code.FILE_UNREADABLE, where=str(path)
    )


def read_admin_key(path: Path) -> str:
    """Read the admin key of a gateway from its file.

    Raises:
        ConfigError: `file_unreadable`: it is not there, others can read it, or it holds no key.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, encoding="ascii", errors="replace") as file:
            about = os.fstat(file.fileno())
            key = file.read(512).strip()
    except OSError as error:
        raise _unreadable(path, error) from error
    hint = f"remove {path}, and a new key is made"
    if not stat.S_ISREG(about.st_mode) or stat.S_IMODE(about.st_mode) & 0o077 or about.st_uid != os.geteuid():
        raise ConfigError(
            "expected an admin key file that only its owner can read, got one that others can",
            code=Code.FILE_UNREADABLE,
            where=str(path),
            hint=hint,
        )
    if not key.startswith(ADMIN_PREFIX) or len(key) < 40:
        raise ConfigError("expected an admin key in the file", code=Code.FILE_UNREADABLE, where=str(path), hint=hint)
    return key
