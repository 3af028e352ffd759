"""The contract that any selection policy is held to.

Invariant: what leaves here is unique, unchanged records of the attempt, by position, with a terminal among them; a
policy that answers anything else is refused with `policy_broke_contract`.

Not here: why a call was chosen (verdict, pipeline).
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Iterable, Sequence
from typing import Any, cast

import msgspec

from gristmill.canonical import JsonValue
from gristmill.errors import Code, PolicyError, Refusal, SelectionError
from gristmill.selection.policies import SelectionPolicy, policy_name
from gristmill.selection.verdict import Decision, Reason

__all__ = ["call_policy"]


def call_policy(policy: SelectionPolicy, records: Sequence[Any], result: JsonValue) -> Decision:
    """Ask a policy, and check its answer.

    Raises:
        SelectionError: the policy's refusal, or `policy_broke_contract`; a plain `ValueError` of a policy is a refusal
            too (`policy_refused`).
        PolicyError: `policy_broke_contract` where the policy raised anything else, `SystemExit` among it; its exception
            is the cause. `MemoryError` and `KeyboardInterrupt` pass.
    """
    name = policy_name(policy)
    before = msgspec.json.encode(list(records), enc_hook=repr)
    try:
        answer: Any = policy(tuple(records), result)
    except Refusal:
        raise
    except ValueError as error:
        raise SelectionError(
            Code.POLICY_REFUSED, f"policy {name} refused the rollout: {error}", evidence={"policy": name}
        ) from error
    except MemoryError:
        # Says something of the machine: with more of it the rollout would be trained.
        raise
    except (Exception, SystemExit, GeneratorExit) as error:
        raise PolicyError(
            f"expected policy {name} to select or to raise SelectionError, got {type(error).__name__}: {error}",
            code=Code.POLICY_BROKE_CONTRACT,
            where=name,
            hint=f"it was raised at {_raised_at(policy, error)}; GRISTMILL_DEBUG=1 shows the traceback",
        ) from error
    selected, terminal_id = _pair(answer, name)
    positions = _positions(selected, records, name)
    if msgspec.json.encode(list(records), enc_hook=repr) != before:
        raise _broke(name, "it changed a record")
    terminal = _terminal(terminal_id, positions, records, name)
    reason = Reason(Code.CAPTURED, {"policy": name})
    return Decision(tuple(positions), terminal, dict.fromkeys(positions, reason), Code.POLICY_EXCLUDED)


def _raised_at(policy: SelectionPolicy, error: BaseException) -> str:
    """Return file and line of the innermost frame in the policy's own module, or else of the innermost one."""
    target: Any = policy.func if isinstance(policy, functools.partial) else policy
    module = getattr(target, "__module__", None)
    frames = [
        (f"{frame.f_code.co_filename}:{line}", frame.f_globals.get("__name__"))
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    own = [place for place, name in frames if name == module]
    return own[-1] if own else frames[-1][0]


def _broke(name: str, what: str) -> SelectionError:
    return SelectionError(
        Code.POLICY_BROKE_CONTRACT,
        f"expected policy {name} to return (unique captured records, response id or None), but {what}",
        where=f"policy={name}",
        evidence={"policy": name},
    )


def _kind(value: object) -> str:
    return type(value).__name__


def _pair(answer: Any, name: str) -> tuple[Any, Any]:
    if inspect.isawaitable(answer):
        close = getattr(answer, "close", None)
        if close is not None:
            close()
        raise _broke(name, "it returned an awaitable: policies are synchronous")
    if not isinstance(answer, tuple) or len(cast(tuple[Any, ...], answer)) != 2:
        raise _broke(name, f"it returned {_kind(cast(object, answer))}, expected a pair (records, response id)")
    return cast(tuple[Any, Any], answer)


def _positions(selected: Any, records: Sequence[Any], name: str) -> list[int]:
    if not isinstance(selected, Sequence) or isinstance(selected, str | bytes):
        kind = _kind(cast(object, selected))
        raise _broke(name, f"its selection is {kind}, not a sequence of records")
    place_of = {id(record): position for position, record in enumerate(records)}
    positions: list[int] = []
    taken: set[int] = set()
    for index, record in enumerate(cast(Iterable[Any], selected)):
        position = place_of.get(id(record))
        if position is None:
            known = getattr(record, "model_call_id", None)
            raise _broke(name, f"selected[{index}] ({known or type(record).__name__}) is not one of the records given")
        if position in taken:
            raise _broke(name, f"it selected call {records[position].model_call_id} twice")
        taken.add(position)
        positions.append(position)
    return positions


def _terminal(terminal_id: Any, positions: Sequence[int], records: Sequence[Any], name: str) -> int | None:
    if terminal_id is None:
        return None
    if not isinstance(terminal_id, str):
        raise _broke(name, f"its terminal response id is {type(terminal_id).__name__}")
    found = [position for position in positions if records[position].response_id == terminal_id]
    if not found:
        raise _broke(name, f"its terminal {terminal_id!r} is not among the selected calls")
    if len(found) > 1:
        raise _broke(name, f"its terminal {terminal_id!r} names several selected choices")
    return found[0]
