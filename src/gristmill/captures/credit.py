"""What a result says beside its history, reward and group: advantage, credits of calls, a failure. Read and written.

Invariant: a result that is written reads back equal; what says nothing is not written, so that a result without credit
is written as it was before there was any. Reading is strict: another type, an unknown key, a number that is not finite
or spans that overlap are refused with their path.

Not here: lines (lines, writer), and whether the calls are captured (reconstruction).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Final, NamedTuple, cast

import msgspec

from gristmill.canonical import JsonValue, RepeatedKeys
from gristmill.captures.fields import JsonObject, count_at, kind_of, list_at, name_at, number, object_at
from gristmill.captures.reply import Unexpected
from gristmill.errors import ReconstructionError
from gristmill.records import Attribution, CallCredit, Failure, Result
from gristmill.result import check_credits

__all__ = ["CREDIT_KEYS", "Credit", "credit_json", "finite_at", "read_credit", "with_credit"]

CREDIT_KEYS: Final = frozenset({"advantage", "credits", "failure"})
"""Keys of a result that hold its credit."""

_CREDIT: Final = CallCredit.__struct_fields__
_FAILURE: Final = Failure.__struct_fields__


class Credit(NamedTuple):
    """The credit of a result, in its fields."""

    advantage: float | None = None
    credits: tuple[CallCredit, ...] = ()
    failure: Failure | None = None


def with_credit(result: Result, credit: Credit) -> Result:
    """Return a result with this credit."""
    return msgspec.structs.replace(result, **credit._asdict())


def credit_json(result: Result) -> JsonObject:
    """Write the credit of a result; empty where it has none."""
    told: JsonObject = {}
    if result.advantage is not None:
        told["advantage"] = float(result.advantage)
    if result.credits:
        told["credits"] = [_credit_json(credit) for credit in result.credits]
    if result.failure is not None:
        told["failure"] = {"reason": result.failure.reason, "attribution": str(result.failure.attribution)}
    return told


def _credit_json(credit: CallCredit) -> JsonObject:
    told: JsonObject = {"model_call_id": credit.model_call_id}
    if credit.start or credit.end is not None:
        told |= {"start": credit.start, "end": credit.end}
    for name in ("reward", "advantage"):
        value: float | None = getattr(credit, name)
        if value is not None:
            told[name] = float(value)
    return told


def read_credit(holder: Mapping[str, JsonValue]) -> Credit:
    """Read the credit of a result; absent and null are none.

    Args:
        holder: the object whose keys are those of the result.

    Raises:
        Unexpected: it is none; `where` is the JSON path.
    """
    given = tuple(_call_credit(value, f"$.credits[{index}]") for index, value in enumerate(_list(holder)))
    try:
        check_credits(given)
    except ReconstructionError as error:
        expected, _, got = error.message.removeprefix("expected ").partition(", got ")
        raise Unexpected(expected, got, error.where) from error
    return Credit(finite_at(holder, "advantage", "$"), given, _failure(holder.get("failure")))


def _list(holder: Mapping[str, JsonValue]) -> list[JsonValue]:
    return list_at(holder, "credits", "$") or []


def finite_at(holder: Mapping[str, JsonValue], key: str, where: str) -> float | None:
    """Return a field that is a finite number, None where it is absent or null.

    Raises:
        Unexpected: it is something else.
    """
    value = holder.get(key)
    if value is None:
        return None
    read = number(value)
    if not isfinite(read):
        raise Unexpected("a finite number or null", kind_of(value), f"{where}.{key}")
    return read


def _call_credit(value: JsonValue, where: str) -> CallCredit:
    members = _known(value, where, _CREDIT)
    call_id = name_at(members, "model_call_id", where)
    if not call_id:
        raise Unexpected("a call id", "none", f"{where}.model_call_id")
    return CallCredit(
        model_call_id=call_id,
        start=count_at(members, "start", where) or 0,
        end=count_at(members, "end", where),
        reward=finite_at(members, "reward", where),
        advantage=finite_at(members, "advantage", where),
    )


def _failure(value: JsonValue) -> Failure | None:
    if value is None:
        return None
    members = _known(value, "$.failure", _FAILURE)
    reason = name_at(members, "reason", "$.failure")
    if not reason:
        raise Unexpected("a reason", "none", "$.failure.reason")
    attribution = members.get("attribution")
    if attribution not in list(Attribution):
        got = repr(attribution) if isinstance(attribution, str) else kind_of(attribution)
        raise Unexpected(" or ".join(Attribution), got, "$.failure.attribution")
    return Failure(reason, Attribution(cast(str, attribution)))


def _known(value: JsonValue, where: str, names: tuple[str, ...]) -> JsonObject:
    members = object_at(value, where)
    if isinstance(value, RepeatedKeys):
        raise Unexpected("each key once", "one repeated", where)
    for name in members:
        if name not in names:
            raise Unexpected(f"one of {', '.join(names)}", repr(name), f"{where}.{name}")
    return members
