"""Asks a gateway's admin API, for programs that open and finish rollouts.

Invariant: the admin key goes to the address that was named and nowhere else: no redirect is followed and no proxy of
the environment is asked. What the gateway refuses is raised with its own code and words.

Not here: the API (api), model calls, which any SDK makes with the rollout's key.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final, cast
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from gristmill.canonical import JsonValue
from gristmill.captures.credit import credit_json
from gristmill.captures.exact import dumps
from gristmill.errors import CaptureError, Code, ConfigError
from gristmill.ledger import AttemptKey
from gristmill.records import CallCredit, Failure, Result

__all__ = ["AdminClient", "GatewayUnreachable", "Opened"]

_PREFIX: Final = "/gristmill/v1"
_TIMEOUT_s: Final = 60.0
_REBUILD_s: Final = 600.0
_BUSY_s: Final = 3.0
_BUSY_PAUSE_s: Final = 0.05
_CODES: Final = frozenset(map(str, Code))


class GatewayUnreachable(CaptureError):
    """Nobody answers at the address of a gateway."""


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout that was opened, with the key that is told only now."""

    rollout_id: str
    attempt: int
    key: str
    base_url: str
    openai_base_url: str
    anthropic_base_url: str
    prefix_base_urls: Mapping[str, str] = {}

    @property
    def attempt_key(self) -> AttemptKey:
        """Which attempt it is."""
        return AttemptKey(self.rollout_id, self.attempt)


class AdminClient:
    """One gateway, seen by its administrator; any thread may use it.

    Args:
        base_url: http(s) address, perhaps with a path.
        admin_key: from the gateway's key file.
        key_file: which one that is, for errors.

    Raises:
        ConfigError: `option_invalid`, the address is none.
    """

    def __init__(self, base_url: str, admin_key: str, key_file: Path | None = None) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError("expected http(s)://host[:port]", code=Code.OPTION_INVALID, where="--gateway")
        self.base_url: Final = base_url.rstrip("/")
        self._parts: Final = parts
        self._path: Final = parts.path.rstrip("/")
        self._key: Final = admin_key
        self._key_file: Final = key_file

    def __repr__(self) -> str:
        return f"AdminClient({self.base_url!r})"

    def open(
        self,
        *,
        rollout_id: str | None = None,
        attempt: int | None = None,
        group_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> Opened:
        """Open an attempt and get its key.

        Raises:
            CaptureError: the gateway refused, with its code.
            GatewayUnreachable: nobody answers.
        """
        asked = {
            "rollout_id": rollout_id,
            "attempt": attempt,
            "group_id": group_id,
            "metadata": None if metadata is None else dict(metadata),
            "overrides": None if overrides is None else dict(overrides),
        }
        said = {name: value for name, value in asked.items() if value is not None}
        until = monotonic() + _BUSY_s
        while True:
            try:
                return msgspec.convert(self._ask("POST", "/rollouts", said), Opened)
            except msgspec.ValidationError as error:
                raise self._stranger("something else") from error
            except CaptureError as error:
                # A gateway that looks whether it may end goes on in a moment, or is gone.
                if error.code is not Code.GATEWAY_BUSY or monotonic() > until:
                    raise
            sleep(_BUSY_PAUSE_s)

    def finish(  # noqa: PLR0913  each of them is a choice of its own
        self,
        key: AttemptKey,
        result: JsonValue,
        reward: float | None,
        *,
        advantage: float | None = None,
        credits: Sequence[CallCredit] = (),
        failure: Failure | None = None,
        metadata: Mapping[str, Any] | None = None,
        drain_s: float | None = None,
        policy: str | None = None,
    ) -> dict[str, Any]:
        """Store an attempt's result and return what it comes to; raises as `open`."""
        asked: dict[str, JsonValue] = {"result": result, "reward": reward, "metadata": dict(metadata or {})}
        asked |= credit_json(Result(advantage=advantage, credits=tuple(credits), failure=failure))
        if drain_s is not None:
            asked["drain_s"] = drain_s
        if policy is not None:
            asked["policy"] = policy
        return self._ask("POST", f"{_below(key)}/finish", asked, timeout_s=_REBUILD_s + (drain_s or 0.0))

    def revoke(self, key: AttemptKey, *, drain_s: float | None = None) -> dict[str, Any]:
        """Make an attempt's key worthless; raises as `open`."""
        asked: dict[str, JsonValue] = {} if drain_s is None else {"drain_s": drain_s}
        return self._ask("POST", f"{_below(key)}/revoke", asked, timeout_s=_REBUILD_s)

    def calls(self, key: AttemptKey) -> list[dict[str, Any]]:
        """Return an attempt's calls without what they said; raises as `open`."""
        return self._ask("GET", f"{_below(key)}/calls")["calls"]

    def rollouts(self, **query: str) -> list[dict[str, Any]]:
        """Return a page of attempts; raises as `open`."""
        return self._ask("GET", f"/rollouts?{urlencode(query)}")["rollouts"]

    def models(self, rollout_key: str) -> list[dict[str, Any]]:
        """Return the models that a rollout is offered; raises as `open`."""
        return self._request("GET", "/v1/models", None, rollout_key, _TIMEOUT_s)["data"]

    def _ask(
        self, method: str, path: str, body: Mapping[str, JsonValue] | None = None, timeout_s: float = _TIMEOUT_s
    ) -> dict[str, Any]:
        try:
            return self._request(method, f"{_PREFIX}{path}", body, self._key, timeout_s)
        except CaptureError as error:
            if error.code not in {Code.KEY_UNKNOWN, Code.KEY_FORBIDDEN} or self._key_file is None:
                raise
            raise CaptureError(
                f"expected the admin key of the gateway at {self.base_url}, the one in {self._key_file} is another's",
                code=error.code,
                where="--admin-key-file",
                hint="it is beside the gateway's ledger, LEDGER.admin-key",
            ) from error

    def _request(
        self, method: str, path: str, body: Mapping[str, JsonValue] | None, key: str, timeout_s: float
    ) -> dict[str, Any]:
        parts = self._parts
        assert parts.hostname is not None
        make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = make(parts.hostname, parts.port, timeout=timeout_s)
        data = None if body is None else dumps(body)
        headers = {"Authorization": f"Bearer {key}", "Accept": "application/json"}
        if data is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.request(method, self._path + path, data, headers)
            answer = connection.getresponse()
            return self._read(answer.status, answer.read())
        except (OSError, http.client.HTTPException) as error:
            raise GatewayUnreachable(
                f"expected a gateway at {self.base_url}, got {error or type(error).__name__}",
                code=Code.OPTION_INVALID,
                where="--gateway",
                hint="gristmill serve starts one",
            ) from error
        finally:
            connection.close()

    def _read(self, status: int, data: bytes) -> dict[str, Any]:
        try:
            answer: Any = json.loads(data)
        except ValueError:
            answer = None
        told = cast("dict[str, Any]", answer) if isinstance(answer, dict) else {}
        if told and 200 <= status < 300:
            return told
        error: Any = told.get("error")
        problem = cast("dict[str, Any]", error) if isinstance(error, dict) else {}
        code = str(problem.get("code") or problem.get("type") or "")
        if code not in _CODES:
            raise self._stranger(f"status {status}")
        raise CaptureError(
            str(problem.get("message") or f"the gateway answered {status}"),
            code=Code(code),
            where=_text(problem.get("where")),
            hint=_text(problem.get("hint")),
        )

    def _stranger(self, got: str) -> CaptureError:
        return CaptureError(
            f"no gateway of ours answers at {self.base_url}: got {got} and not its JSON",
            code=Code.OPTION_INVALID,
            where="--gateway",
            hint="give the address that gristmill serve prints; an engine's is for --upstream",
        )


def _below(key: AttemptKey) -> str:
    return f"/rollouts/{quote(key.rollout_id, safe='')}/{key.attempt}"


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
