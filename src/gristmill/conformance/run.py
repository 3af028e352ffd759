"""Run one conformance case: its input in, an outcome out.

Invariant: an outcome is made by the functions that the commands use; a kind that is not known is `unsupported`, and a
case that cannot be read is a `DecodeError`, never a pass.

Not here: the kinds that start from engine replies (capture_cases) and comparing (check).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from gristmill.canonical import JsonValue, loads
from gristmill.conformance.capture_cases import capture_outcome, capture_with
from gristmill.conformance.inputs import JsonObject, capture_of, list_of, object_of, result_of, text_of
from gristmill.errors import DecodeError, SelectionError
from gristmill.fingerprint import fingerprint
from gristmill.ledger import AttemptKey, MemoryLedger, StoredCall
from gristmill.lineage import LineageIndex, request_digests
from gristmill.pipeline import RebuiltRollout, rebuild_rollout, select_rollout
from gristmill.records import Capture, Result
from gristmill.selection import Rejected, Selection, resolve_selection_policy

__all__ = ["UNSUPPORTED_KINDS", "read_case", "run_case"]

UNSUPPORTED_KINDS: Final = frozenset({"gateway", "store", "security"})
"""Kinds that the tests of gateway and ledger run, not this."""

Outcome = dict[str, Any]


def read_case(line: bytes, where: str) -> JsonObject:
    """Read one line of a case file.

    Raises:
        DecodeError: `file_malformed`.
    """
    return object_of(loads(line, where), where)


def run_case(case: Mapping[str, JsonValue]) -> Outcome:
    """Run a case and return its outcome, its variants each under their name.

    Raises:
        DecodeError: the case cannot be read.
        PolicyError, ConfigError: the case names a policy or option that does not exist.
    """
    given = object_of(case.get("input"), "input")
    variants = given.get("variants")
    if variants is None:
        return _run(given)
    outcome: Outcome = {"outcome": "variants"}
    for index, raw in enumerate(list_of(variants, "input.variants")):
        variant = object_of(raw, f"input.variants[{index}]")
        name = text_of(variant.get("name"), f"input.variants[{index}].name")
        outcome[name] = _run({**given, **variant})
    return outcome


def _run(given: JsonObject) -> Outcome:
    kind = given.get("kind")
    runner = _RUNNERS.get(kind) if isinstance(kind, str) else None
    return {"outcome": "unsupported", "kind": kind} if runner is None else runner(given)


def _policy(given: JsonObject) -> Any:
    options = {
        name: text_of(value, f"options.{name}")
        for name, value in object_of(given.get("options") or {}, "options").items()
    }
    return resolve_selection_policy(text_of(given.get("policy", "returned_history"), "policy"), options)


def _select(capture: Capture, result: Result, given: JsonObject) -> Selection | Rejected:
    return select_rollout(capture, result, _policy(given), train_model=given.get("train_model"))


def rejected(outcome: Rejected) -> Outcome:
    """Write a refusal as an outcome."""
    return {
        "outcome": "reject",
        "code": str(outcome.code),
        "where": outcome.where,
        "message": outcome.message,
        "evidence": dict(outcome.evidence),
    }


def selected(outcome: Selection | Rejected) -> Outcome:
    """Write a selection as an outcome."""
    if isinstance(outcome, Rejected):
        return rejected(outcome)
    return {
        "outcome": "select",
        "calls": list(outcome.calls),
        "terminal": outcome.terminal_response_id,
        "verdicts": {
            verdict.model_call_id: {"included": verdict.included, "code": str(verdict.code)}
            for verdict in outcome.verdicts
        },
        "notes": list(outcome.notes),
    }


def rebuilt(outcome: RebuiltRollout | Rejected) -> Outcome:
    """Write rows as an outcome."""
    if isinstance(outcome, Rejected):
        return rejected(outcome)
    return {
        "outcome": "rows",
        "rows": [
            {
                "calls": list(dict.fromkeys(span.call_id for span in row.spans if span.role != "context")),
                "tokens": row.token_ids.tolist(),
                "mask": row.loss_mask.tolist(),
                "logprobs": row.logprobs.tolist(),
            }
            for row in outcome.rows
        ],
        "reported_empty": list(outcome.rebuilt.empty),
    }


def _given_selection(capture: Capture, given: JsonObject) -> Selection:
    """Make a selection of the calls that a case names."""
    known = {record.model_call_id: record for record in capture.records}
    calls = [text_of(value, "selected") for value in list_of(given.get("selected"), "selected")]
    for call_id in calls:
        if call_id not in known:
            raise DecodeError(f"expected `selected` to name records, got {call_id!r}", where="selected")
    last = calls[-1] if calls else ""
    return Selection(
        rollout_id=capture.rollout_id,
        attempt=capture.attempt,
        policy="given",
        calls=tuple(calls),
        terminal_call_id=last,
        terminal_response_id=known[last].response_id if last else "",
        verdicts=(),
    )


def _run_select(given: JsonObject) -> Outcome:
    return selected(_select(capture_of(given), result_of(given), given))


def _run_reconstruct(given: JsonObject) -> Outcome:
    capture = capture_of(given)
    return rebuilt(rebuild_rollout(capture, _given_selection(capture, given), result_of(given)))


def _both(capture: Capture, given: JsonObject) -> Outcome:
    selection = _select(capture, result_of(given), given)
    if isinstance(selection, Rejected):
        return rejected(selection)
    rows = rebuilt(rebuild_rollout(capture, selection, result_of(given)))
    if rows["outcome"] == "rows":
        rows |= {"calls": list(selection.calls), "terminal": selection.terminal_response_id}
    return rows


def _run_select_reconstruct(given: JsonObject) -> Outcome:
    return _both(capture_of(given), given)


def _run_fingerprint(given: JsonObject) -> Outcome:
    digests: dict[str, str] = {}
    errors: dict[str, str] = {}
    for name, item in object_of(given.get("items"), "items").items():
        try:
            digests[name] = fingerprint(item)
        except SelectionError as error:
            errors[name] = str(error.code)
    return {"outcome": "fingerprint", "digests": digests, "error": errors}


def _run_lineage(given: JsonObject) -> Outcome:
    index = LineageIndex()
    for number, raw in enumerate(list_of(given.get("records"), "records")):
        record = object_of(raw, f"records[{number}]")
        served = list_of(record.get("output_items"), f"records[{number}].output_items")
        call_id = text_of(record.get("model_call_id"), f"records[{number}].model_call_id")
        index.add(call_id, request_digests(record.get("request"), served))
    parents: dict[str, str | None] = {}
    resolutions: dict[str, str] = {}
    for number, raw in enumerate(list_of(given.get("requests"), "requests")):
        request = object_of(raw, f"requests[{number}]")
        link = index.parent_of({key: value for key, value in request.items() if key != "name"})
        name = text_of(request.get("name"), f"requests[{number}].name")
        parents[name], resolutions[name] = link.parent_call_id, str(link.resolution)
    return {"outcome": "lineage", "parents": parents, "resolutions": resolutions}


def _run_store_select(given: JsonObject) -> Outcome:
    ledger = MemoryLedger()
    for number, raw in enumerate(list_of(given.get("store_events"), "store_events")):
        event = object_of(raw, f"store_events[{number}]")
        key = AttemptKey(text_of(event.get("rollout"), f"store_events[{number}].rollout"))
        capture = capture_of({"records": [event.get("append")]})
        for record in capture.records:
            ledger.admit(key, record.model_call_id, record.parent_call_id)
            tokens = capture.tokens.get(record.model_call_id)
            ledger.commit(key, StoredCall(record=record, tokens=tokens))
    result = result_of(given)
    rollout = object_of(result.value, "result").get("rollout")
    capture, _ = ledger.read(AttemptKey(text_of(rollout, "result.rollout")))
    return selected(_select(capture, result, given))


def _run_capture(given: JsonObject) -> Outcome:
    return capture_outcome(given)


def _run_capture_select(given: JsonObject) -> Outcome:
    return selected(_select(capture_with(given), result_of(given), given))


def _run_capture_reconstruct(given: JsonObject) -> Outcome:
    capture = capture_with(given)
    return rebuilt(rebuild_rollout(capture, _given_selection(capture, given), result_of(given)))


_RUNNERS: Final[Mapping[str, Callable[[JsonObject], Outcome]]] = {
    "select": _run_select,
    "reconstruct": _run_reconstruct,
    "select+reconstruct": _run_select_reconstruct,
    "fingerprint": _run_fingerprint,
    "lineage": _run_lineage,
    "store+select": _run_store_select,
    "capture": _run_capture,
    "capture+select": _run_capture_select,
    "capture+reconstruct": _run_capture_reconstruct,
}
