"""Where a ledger is: the path of a file, or the URL of a PostgreSQL database.

Invariant: a password that a URL holds is in `conninfo` and nowhere else: not in the address as it is written, shown,
compared with others in a message, or quoted by an error.

    postgresql://user@host:5432/database?schema=gristmill

`schema` names the PostgreSQL schema that holds the ledger's tables, so that one database can hold several ledgers. All
other parameters are libpq's; what a URL leaves out comes from its variables and files (`PGHOST`, `PGPASSWORD`,
`PGSERVICE`, `~/.pgpass`).

Not here: connections (postgres).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, quote, unquote, urlencode

from gristmill.errors import Code, ConfigError

__all__ = ["LedgerAddress", "PostgresAddress", "is_postgres", "parse_address", "path_of", "without_passwords"]

DEFAULT_SCHEMA: Final = "gristmill"

_SCHEMES: Final = ("postgresql://", "postgres://")
_MEANT: Final = re.compile(r"postgres\w*(\+\w+)?:/", re.IGNORECASE)
_SCHEMA: Final = re.compile(r"(?!pg_)[a-z_][a-z0-9_]{0,62}")
_SECRET: Final = frozenset({"password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key"})
# The second way is for those who write a / of their password as it is; a number before a / is a port.
_PASSWORD: Final = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]*:/+[^\s/:@]*):(?:[^\s/]+@|(?!\d{1,5}/)\S+@)")
_EXAMPLE: Final = "postgresql://USER@HOST:5432/DATABASE?schema=gristmill"


class PostgresAddress:
    """A ledger in a PostgreSQL database.

    Args:
        url: `postgresql://…` or `postgres://…`.

    Raises:
        ConfigError: `option_invalid`; the message does not quote the URL, which may hold a password.

    Attributes:
        schema: the PostgreSQL schema that holds the tables.
        conninfo: what libpq is told, the password included if the URL holds one; not to be shown.
    """

    __slots__ = ("_shown", "conninfo", "schema")

    def __init__(self, url: str) -> None:
        scheme = next((each for each in _SCHEMES if url.startswith(each)), None)
        if scheme is None:
            raise _wrong("a URL that begins with postgresql://")
        rest, hash_sign, _ = url[len(scheme) :].partition("#")
        if hash_sign:
            raise _wrong("a URL without #; a # in a password is written %23")
        if re.search(r"[\s\x00-\x1f\x7f]", rest):
            raise _wrong("a URL without blanks")
        place, _, query = rest.partition("?")
        authority, slash, database = place.partition("/")
        login, at, hosts = authority.rpartition("@")
        if "/" in database or "@" in database:
            raise _wrong("a URL with one database; a / or @ in a password is written %2F or %40")
        if re.search(r"%(?![0-9A-Fa-f]{2})", place):
            raise _wrong("a URL in which every % begins an escape; a % in a password is written %25")
        parameters = parse_qsl(query, keep_blank_values=True)
        self.schema: Final = _schema([value for name, value in parameters if name == "schema"])
        passed = [(name, value) for name, value in parameters if name != "schema"]
        user = login.partition(":")[0]
        shown = [(name, value) for name, value in passed if name not in _SECRET]
        if self.schema != DEFAULT_SCHEMA:
            shown.append(("schema", self.schema))
        self.conninfo: Final = f"postgresql://{authority}{slash}{database}" + _query(passed)
        self._shown: Final = f"postgresql://{user}{at if user else ''}{hosts}{slash}{database}" + _query(shown)

    def __str__(self) -> str:
        """Write the address without its password, so that it can be given again."""
        return self._shown

    def __repr__(self) -> str:
        return f"PostgresAddress({self._shown!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PostgresAddress) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(self._shown)

    @property
    def name(self) -> str:
        """The database's name as the URL has it, for people; empty where it has none."""
        return unquote(self._shown.partition("?")[0].partition("://")[2].partition("/")[2])


LedgerAddress = Path | PostgresAddress
"""Where a ledger is."""


def is_postgres(text: str) -> bool:
    """Tell whether a text is meant as the URL of a PostgreSQL database, well written or not."""
    return _MEANT.match(text) is not None


def parse_address(text: str | Path | PostgresAddress) -> LedgerAddress:
    """Read where a ledger is: a `postgresql://` URL, else a path.

    Raises:
        ConfigError: `option_invalid`.
    """
    if isinstance(text, Path | PostgresAddress):
        return text
    return PostgresAddress(text) if is_postgres(text) else Path(text)


def path_of(address: LedgerAddress) -> Path | None:
    """Return the path of a ledger that is a file."""
    return address if isinstance(address, Path) else None


def without_passwords(text: str) -> str:
    """Take the passwords out of all URLs in a text, whatever they address: `ftp://user:password@host/x` and others."""
    return _PASSWORD.sub(r"\1@", text) if ":/" in text else text


def _query(parameters: list[tuple[str, str]]) -> str:
    return "?" + urlencode(parameters, safe="/:,", quote_via=quote) if parameters else ""


def _schema(named: list[str]) -> str:
    if not named:
        return DEFAULT_SCHEMA
    if len(named) > 1 or not _SCHEMA.fullmatch(named[0]):
        raise _wrong("one schema of small letters, digits and _, at most 63, that does not begin with pg_")
    return named[0]


def _wrong(expected: str) -> ConfigError:
    return ConfigError(
        f"the address of a PostgreSQL ledger: expected {expected}", code=Code.OPTION_INVALID, hint=_EXAMPLE
    )
