"""What an administrator asks: bodies and names of the admin API, read strictly.

Invariant: a member that is not known, of another type, repeated or out of range is refused with its path; a rollout id
is letters, digits and `._-`, or it is refused as it is. A result keeps its numbers as they were written.

Not here: doing it (rollouts).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Final, NamedTuple, TypeVar, cast

from gristmill.canonical import JsonNumber, JsonValue, RepeatedKeys, json_kind, loads
from gristmill.captures.credit import CREDIT_KEYS, Credit, read_credit, with_credit
from gristmill.captures.exact import plain_numbers
from gristmill.captures.reply import Unexpected
from gristmill.errors import Code, ConfigError, DecodeError
from gristmill.gateway.config import check_overrides
from gristmill.gateway.routes import is_rollout_id
from gristmill.ledger import AttemptKey, AttemptState
from gristmill.records import Result
from gristmill.selection import DEFAULT_POLICY, SELECTION_POLICIES

__all__ = [
    "FinishAsked",
    "ListAsked",
    "MAX_DRAIN_s",
    "MintAsked",
    "WeightsAsked",
    "check_result",
    "drain_asked",
    "finish_asked",
    "list_asked",
    "mint_asked",
    "named_attempt",
    "policy_asked",
    "rollout_id_of",
    "weights_asked",
]

ValueT = TypeVar("ValueT")

MAX_DRAIN_s: Final = 3600.0
_MAX_NAME: Final = 1024
_MAX_ATTEMPT: Final = 10**9
_ATTEMPT: Final = re.compile(r"0|[1-9][0-9]{0,8}")


class MintAsked(NamedTuple):
    """A rollout to open."""

    rollout_id: str | None = None
    attempt: int | None = None
    group_id: str | None = None
    metadata: Mapping[str, JsonValue] = {}
    overrides: Mapping[str, JsonValue] = {}


class FinishAsked(NamedTuple):
    """A rollout to finish, and by which policy its funnel is counted."""

    value: JsonValue = None
    reward: float | None = None
    metadata: Mapping[str, JsonValue] = {}
    drain_s: float | None = None
    policy: str = DEFAULT_POLICY
    credit: Credit = Credit()

    def result(self, group_id: str | None) -> Result:
        """Return the result as it is stored."""
        result = Result(value=self.value, reward=self.reward, group_id=group_id, metadata=self.metadata)
        return with_credit(result, self.credit)


class ListAsked(NamedTuple):
    """Which attempts to list, and how many."""

    state: AttemptState | None = None
    group_id: str | None = None
    limit: int = 100
    after: AttemptKey | None = None


class WeightsAsked(NamedTuple):
    """A version of the weights, and the engine that has it; None: all of them."""

    version: str
    upstream: str | None = None


def _refused(message: str, where: str) -> ConfigError:
    return ConfigError(message, code=Code.REQUEST_MALFORMED, where=where)


def _expected(what: str, value: object, where: str) -> ConfigError:
    return _refused(f"expected {what}, got {json_kind(value)}", where)


class _Members:
    """The members of a body; `done` refuses those that nobody took."""

    def __init__(self, data: bytes) -> None:
        try:
            value: JsonValue = loads(data) if data.strip() else {}
        except DecodeError as error:
            raise _refused(error.message, "$") from error
        if isinstance(value, RepeatedKeys) or not isinstance(value, dict):
            raise _expected("an object with unique keys", value, "$")
        self._members = dict(cast("Mapping[str, JsonValue]", value))

    def take(self, name: str, read: Callable[[JsonValue, str], ValueT]) -> ValueT | None:
        """Read a member; absent and null are None."""
        value = self._members.pop(name, None)
        return None if value is None else read(value, f"$.{name}")

    def done(self, *known: str) -> None:
        """Refuse what is left."""
        for name in self._members:
            raise _refused(f"expected one of {', '.join(known) or 'no members'}, got {name[:100]!r}", f"$.{name[:100]}")


def _text(value: JsonValue, where: str) -> str:
    if not isinstance(value, str):
        raise _expected("a string", value, where)
    if not value or len(value) > _MAX_NAME:
        raise _refused(f"expected 1 to {_MAX_NAME} characters, got {len(value)}", where)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _refused("expected valid Unicode, got a lone surrogate", where) from error
    return value


def _integer(value: JsonValue, where: str) -> int:
    if type(value) is not int or not 0 <= value < _MAX_ATTEMPT:
        raise _expected(f"an integer from 0 to {_MAX_ATTEMPT - 1}", value, where)
    return value


def _number(value: JsonValue, where: str) -> float:
    read = float(value.text) if isinstance(value, JsonNumber) else value
    if isinstance(read, bool) or not isinstance(read, int | float):
        raise _expected("a number", value, where)
    try:
        number = float(read)
    except OverflowError as error:
        raise _refused("expected a number that a float can hold", where) from error
    if not isfinite(number):
        raise _refused("expected a finite number", where)
    return number


def _seconds(value: JsonValue, where: str) -> float:
    seconds = _number(value, where)
    if not 0 <= seconds <= MAX_DRAIN_s:
        raise _refused(f"expected 0 to {MAX_DRAIN_s:.0f} seconds, got {seconds:g}", where)
    return seconds


def _object(value: JsonValue, where: str) -> Mapping[str, JsonValue]:
    if isinstance(value, RepeatedKeys) or not isinstance(value, dict):
        raise _expected("an object with unique keys", value, where)
    return cast("Mapping[str, JsonValue]", value)


def _overrides(value: JsonValue, where: str) -> Mapping[str, JsonValue]:
    try:
        members = plain_numbers(_object(value, where), where)
    except Unexpected as error:
        raise _refused(str(error), where) from error
    plain = cast("Mapping[str, JsonValue]", members)
    check_overrides(plain, where)
    return plain


def rollout_id_of(text: str, where: str) -> str:
    """Check a rollout id.

    Raises:
        ConfigError: `option_invalid`.
    """
    if not is_rollout_id(text):
        raise ConfigError(
            "expected a rollout id of 1 to 128 letters, digits, '.', '_' or '-', not dots alone",
            code=Code.OPTION_INVALID,
            where=where,
        )
    return text


def named_attempt(rollout_id: str, attempt: str) -> AttemptKey:
    """Read the attempt that a path names.

    Raises:
        ConfigError: `option_invalid`.
    """
    if _ATTEMPT.fullmatch(attempt) is None:
        raise ConfigError("expected an attempt number", code=Code.OPTION_INVALID, where="attempt")
    return AttemptKey(rollout_id_of(rollout_id, "rollout_id"), int(attempt))


def mint_asked(data: bytes) -> MintAsked:
    """Read the body that opens a rollout.

    Raises:
        ConfigError: `request_malformed`, `option_invalid`.
    """
    members = _Members(data)
    rollout_id = members.take("rollout_id", _text)
    asked = MintAsked(
        rollout_id=None if rollout_id is None else rollout_id_of(rollout_id, "$.rollout_id"),
        attempt=members.take("attempt", _integer),
        group_id=members.take("group_id", _text),
        metadata=members.take("metadata", _object) or {},
        overrides=members.take("overrides", _overrides) or {},
    )
    members.done(*MintAsked._fields)
    if asked.attempt is not None and asked.rollout_id is None:
        raise _refused("expected a rollout_id beside attempt", "$.attempt")
    return asked


def check_result(value: JsonValue, where: str) -> JsonValue:
    """Refuse a returned history that no format has; null is none.

    Raises:
        ConfigError: `option_invalid`.
    """
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(
            f"expected an object or null as the result, got {json_kind(value)}",
            code=Code.OPTION_INVALID,
            where=where,
            hint='a result is {"messages": […]}, {"response": …} or {"responses": […]}',
        )
    return cast("JsonValue", value)


def finish_asked(data: bytes) -> FinishAsked:
    """Read the body that finishes a rollout.

    Raises:
        ConfigError: `request_malformed`, `option_invalid` (the result), `policy_option_invalid`, `policy_unknown`.
    """
    members = _Members(data)
    asked = FinishAsked(
        value=members.take("result", check_result),
        reward=members.take("reward", _number),
        metadata=members.take("metadata", _object) or {},
        drain_s=members.take("drain_s", _seconds),
        policy=policy_asked(members.take("policy", _text), "$.policy"),
        credit=_credit({name: members.take(name, _as_it_is) for name in CREDIT_KEYS}),
    )
    members.done("result", "reward", *sorted(CREDIT_KEYS), "metadata", "drain_s", "policy")
    return asked


def _as_it_is(value: JsonValue, where: str) -> JsonValue:
    return value


def _credit(members: Mapping[str, JsonValue]) -> Credit:
    try:
        return read_credit(members)
    except Unexpected as error:
        raise _refused(error.message, error.where) from error


def drain_asked(data: bytes) -> float | None:
    """Read a body that may say how long calls in flight may go on, in seconds.

    Raises:
        ConfigError: `request_malformed`.
    """
    members = _Members(data)
    drain_s = members.take("drain_s", _seconds)
    members.done("drain_s")
    return drain_s


def weights_asked(data: bytes) -> WeightsAsked:
    """Read the body that announces weights.

    Raises:
        ConfigError: `request_malformed`.
    """
    members = _Members(data)
    version, upstream = members.take("version", _text), members.take("upstream", _text)
    members.done(*WeightsAsked._fields)
    if version is None:
        raise _refused("expected a version, got none", "$.version")
    return WeightsAsked(version, upstream)


def policy_asked(name: str | None, where: str) -> str:
    """Check the name of a policy; one that is code of somebody's is never taken from the network.

    Raises:
        ConfigError: `policy_option_invalid`, `policy_unknown`.
    """
    if name is None:
        return DEFAULT_POLICY
    if ":" in name:
        raise ConfigError(
            "expected a built-in policy: one of module:function is not taken over HTTP",
            code=Code.POLICY_OPTION_INVALID,
            where=where,
            hint="name it on the command line: gristmill rows LEDGER --policy module:function",
        )
    if name not in SELECTION_POLICIES:
        raise ConfigError(f"expected one of {', '.join(SELECTION_POLICIES)}", code=Code.POLICY_UNKNOWN, where=where)
    return name


def list_asked(query: Mapping[str, str]) -> ListAsked:
    """Read the query of a list: `state`, `group`, `limit` (1 to 1000), `after` (`ROLLOUT/ATTEMPT`).

    Raises:
        ConfigError: `request_malformed`, `option_invalid`.
    """
    for name in query:
        if name not in {"state", "group", "limit", "after"}:
            raise _refused(f"expected state, group, limit or after, got {name[:100]!r}", "query")
    state, limit, after = query.get("state"), query.get("limit", "100"), query.get("after")
    if state is not None and state not in list(AttemptState):
        raise _refused(f"expected one of {', '.join(AttemptState)}", "query.state")
    if re.fullmatch(r"[1-9][0-9]{0,3}", limit) is None or int(limit) > 1000:
        raise _refused("expected 1 to 1000", "query.limit")
    behind = None
    if after is not None:
        rollout_id, _, attempt = after.rpartition("/")
        behind = named_attempt(rollout_id, attempt)
    group = query.get("group")
    return ListAsked(
        state=None if state is None else AttemptState(state),
        group_id=None if group is None else _text(group, "query.group"),
        limit=int(limit),
        after=behind,
    )
