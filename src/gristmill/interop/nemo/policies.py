"""The built-in policies under NeMo RL's signature: `(records, result) -> (selected records, terminal response id)`.

Invariant: what comes back are the very objects that were given; a refusal is a `SelectionError`, which is the
`ValueError` that NeMo RL masks a rollout for, and a wrong option is a `ConfigError`, which ends its run. An option is
what the caller binds by keyword (`functools.partial`), else what `GRISTMILL_POLICY_OPTIONS` says, else the default.

Not here: what the policies decide (selection), and how its records are read (calls).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gristmill.canonical import JsonValue
from gristmill.errors import Code, ConfigError, SelectionError
from gristmill.interop.nemo.calls import NemoCall, plain, views_of
from gristmill.interop.nemo.fingerprints import NEMO_FINGERPRINT, Fingerprint, fingerprint_named
from gristmill.records import CallRecord
from gristmill.selection import AllCaptured, FinalContext, ReturnedHistory, SelectionPolicy

__all__ = ["OPTIONS_VARIABLE", "all_captured", "final_context", "returned_history"]

OPTIONS_VARIABLE: Final = "GRISTMILL_POLICY_OPTIONS"
"""Options for a process whose configuration can only name a function: `reasoning=optional,unmatched=context`."""

_CONTENT: Final = ("response", "responses", "messages")


def returned_history(
    records: Sequence[Any],
    result: Any,
    *,
    reasoning: str | None = None,
    whitespace: str | None = None,
    tool_call_ids: str | None = None,
    unmatched: str | None = None,
    fingerprint: str | Fingerprint | None = None,
) -> tuple[list[Any], str | None]:
    """Select the calls whose replies stand in the returned history.

    Args:
        records: NeMo's records of one rollout, or ours, in commit order.
        result: what the agent handed back, as JSON values or a model of theirs.
        reasoning, whitespace, tool_call_ids, unmatched: options of `ReturnedHistory`.
        fingerprint: how fingerprints of items were made, a function or `package.module:function`; NeMo Gym's own
            function by default.

    Returns:
        The selected records, the objects that were given, and the scored call's response id.

    Raises:
        SelectionError: as `ReturnedHistory`; `atoms_unavailable` where a record does not say what its call served and
            the result has a history, or where an option compares parts of items.
        ConfigError: `policy_option_invalid`.
        PolicyError: `policy_load_failed`: the function of the fingerprints cannot be imported.
    """
    options = _options(
        "returned_history",
        reasoning=reasoning,
        whitespace=whitespace,
        tool_call_ids=tool_call_ids,
        unmatched=unmatched,
        fingerprint=fingerprint,
    )
    named = options.pop("fingerprint", NEMO_FINGERPRINT)
    if _ours(records):
        return _called(ReturnedHistory(**options), records, result)
    calls, value = views_of(records), plain(result)
    if isinstance(value, Mapping) and any(key in value for key in _CONTENT):
        _refuse_unknown(calls)
    made = fingerprint_named(named) if any(call.by_fingerprint for call in calls) else None
    return _called(ReturnedHistory(**options, fingerprint=made), calls, value)


def all_captured(
    records: Sequence[Any], result: Any, *, fingerprint: str | Fingerprint | None = None
) -> tuple[list[Any], str | None]:
    """Select every call that finished, in commit order; arguments, results and errors as `returned_history`.

    Raises:
        SelectionError: as `AllCaptured`.
    """
    return _by_terminal(AllCaptured, records, result, fingerprint)


def final_context(
    records: Sequence[Any], result: Any, *, fingerprint: str | Fingerprint | None = None
) -> tuple[list[Any], str | None]:
    """Select the scored call and its ancestors, parents first; arguments, results and errors as `returned_history`.

    Raises:
        SelectionError: as `FinalContext`.
    """
    return _by_terminal(FinalContext, records, result, fingerprint)


def _by_terminal(
    policy: type[AllCaptured | FinalContext], records: Sequence[Any], result: Any, fingerprint: str | Fingerprint | None
) -> tuple[list[Any], str | None]:
    options = _options(policy.name, fingerprint=fingerprint)
    if _ours(records):
        return _called(policy(), records, result)
    calls = views_of(records)
    named = options.get("fingerprint", NEMO_FINGERPRINT)
    made = fingerprint_named(named) if any(call.by_fingerprint for call in calls) else None
    return _called(policy(fingerprint=made), calls, plain(result))


def _ours(records: Sequence[Any]) -> bool:
    return all(isinstance(record, CallRecord) for record in records)


def _called(policy: SelectionPolicy, records: Sequence[Any], result: JsonValue) -> tuple[list[Any], str | None]:
    """Ask a policy; give the records back that its views stand for, and an id only where a record has it."""
    selected, terminal = policy(records, result)
    scored = next((call for call in selected if call.response_id == terminal), None)
    given = [call.record if isinstance(call, NemoCall) else call for call in selected]
    return given, getattr(scored.record, "response_id", None) if isinstance(scored, NemoCall) else terminal


def _refuse_unknown(calls: Sequence[NemoCall]) -> None:
    unknown = [call.model_call_id for call in calls if not call.known]
    if unknown:
        raise SelectionError(
            Code.ATOMS_UNAVAILABLE,
            f"expected every record to say what its call served, which the returned history is compared with; "
            f"{len(unknown)} of {len(calls)} do not, call {unknown[0]!r} for one",
            where=f"call={unknown[0]}",
            evidence={"calls": unknown},
        )


def _options(policy: str, **bound: Any) -> dict[str, Any]:
    """Return the options that are set, by name.

    Raises:
        ConfigError: `policy_option_invalid`: the variable cannot be read, or names an option that is not there.
    """
    options: dict[str, Any] = {}
    for part in os.environ.get(OPTIONS_VARIABLE, "").split(","):
        if not part.strip():
            continue
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in bound:
            raise ConfigError(
                f"expected NAME=VALUE of {', '.join(bound)} for {policy}, separated by commas, got {part.strip()!r}",
                code=Code.POLICY_OPTION_INVALID,
                where=OPTIONS_VARIABLE,
                hint=f"{OPTIONS_VARIABLE}=reasoning=optional,unmatched=context",
            )
        options[name] = value
    return {**options, **{name: value for name, value in bound.items() if value is not None}}
