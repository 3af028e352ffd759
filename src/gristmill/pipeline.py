"""One rollout through select and reconstruct: the function that every edge calls.

Invariant: a rollout either gives a selection (and rows) in which every captured call has a verdict, or one `Rejected`
value with a code, a place and the evidence; it never raises for what a rollout contains, so one rollout never takes
others with it.

Not here: policies (selection), rows (reconstruction), files and stores (ledger, export).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from gristmill.canonical import JsonValue
from gristmill.credit import Advantages
from gristmill.errors import Code, ReconstructionError, Refusal, SelectionError
from gristmill.reconstruction import Decode, Rebuilt, Rollout, Row, RowMode, rebuild
from gristmill.records import Attribution, CallRecord, Capture, ParentResolution, ResponseStatus, Result
from gristmill.selection import (
    Decision,
    ExplainingPolicy,
    Rejected,
    Selection,
    SelectionPolicy,
    Verdict,
    policy_name,
)
from gristmill.selection.completion import effective_status, is_interrupted, stopped_by_length
from gristmill.selection.contract import call_policy
from gristmill.selection.verdict import decided_verdicts, refused_verdicts

__all__ = [
    "Funnel",
    "RebuiltRollout",
    "funnel_of",
    "outcome_verdicts",
    "rebuild_rollout",
    "run_rollout",
    "select_rollout",
]


class RebuiltRollout(msgspec.Struct, frozen=True):
    """A selection and its rows, and how its calls became rows."""

    selection: Selection
    rebuilt: Rebuilt
    mode: RowMode

    @property
    def rows(self) -> tuple[Row, ...]:
        """The training rows; under `tree` the flattened ones."""
        return self.rebuilt.rows


class Funnel(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a capture was trained, in calls and sampled tokens; `excluded` counts calls and tokens by code."""

    captured_calls: int = 0
    captured_tokens: int = 0
    usable_calls: int = 0
    usable_tokens: int = 0
    selected_calls: int = 0
    selected_tokens: int = 0
    trained_calls: int = 0
    trained_tokens: int = 0
    lost_calls: int = 0
    excluded: Mapping[str, tuple[int, int]] = {}

    def plus(self, other: Funnel) -> Funnel:
        """Add up two funnels."""
        excluded = dict(self.excluded)
        for code, (calls, tokens) in other.excluded.items():
            have = excluded.get(code, (0, 0))
            excluded[code] = (have[0] + calls, have[1] + tokens)
        sums = {
            name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__ if name != "excluded"
        }
        return Funnel(**sums, excluded=excluded)


def select_rollout(
    capture: Capture, result: Result, policy: SelectionPolicy, *, train_model: str | None = None
) -> Selection | Rejected:
    """Choose the calls of one attempt that are to be trained, and say why for every captured call.

    Args:
        capture: everything captured of the attempt.
        result: what the harness handed back.
        policy: built-in or anybody's.
        train_model: selected calls of other models become context (verdict `foreign_model`).

    Raises:
        PolicyError: `policy_broke_contract` where a custom policy raised something other than a refusal.
    """
    try:
        if result.failure is not None and result.failure.attribution is Attribution.MASK:
            message = f"expected a rollout that counts, got one that failed: {result.failure.reason}"
            raise SelectionError(Code.FAILURE_MASKED, message, evidence={"reason": result.failure.reason})
        value: JsonValue = {} if result.value is None else result.value
        if isinstance(policy, ExplainingPolicy):
            decision = policy.decide(capture.records, value)
        else:
            decision = call_policy(policy, capture.records, value)
        return _checked(capture, decision, policy, train_model)
    except Refusal as refusal:
        return _rejected(capture, policy_name(policy), _options(policy), refusal)


def _options(policy: SelectionPolicy) -> Mapping[str, str]:
    return policy.options() if isinstance(policy, ExplainingPolicy) else {}


def _rejected(capture: Capture, policy: str, options: Mapping[str, str], refusal: Refusal) -> Rejected:
    unusable = refusal.evidence.get("unusable_calls")
    reasons = cast(Mapping[str, Mapping[str, Any]], unusable) if isinstance(unusable, Mapping) else None
    return Rejected(
        rollout_id=capture.rollout_id,
        attempt=capture.attempt,
        policy=policy,
        options=options,
        code=refusal.code,
        where=refusal.where,
        message=refusal.message,
        evidence=refusal.evidence,
        verdicts=refused_verdicts(capture, refusal.code, reasons),
    )


def _checked(capture: Capture, decision: Decision, policy: SelectionPolicy, train_model: str | None) -> Selection:
    """Check what holds under every policy."""
    records = capture.records
    if not decision.selected:
        raise SelectionError(Code.SELECTION_EMPTY, "expected at least one selected call, got none")
    if decision.terminal is None:
        raise SelectionError(Code.TERMINAL_UNATTRIBUTED, "expected the policy to name the scored call, it named none")
    for position in decision.selected:
        _check_completion(records[position])
    _check_lost(capture, decision.selected)
    foreign = {
        position for position in decision.selected if train_model is not None and records[position].model != train_model
    }
    kept = [position for position in decision.selected if position not in foreign]
    if not kept:
        raise SelectionError(Code.NOTHING_TO_TRAIN, f"expected a selected call of model {train_model!r}, got none")
    terminal = records[decision.terminal]
    return Selection(
        rollout_id=capture.rollout_id,
        attempt=capture.attempt,
        policy=policy_name(policy),
        options=_options(policy),
        calls=tuple(records[position].model_call_id for position in kept),
        terminal_call_id=terminal.model_call_id,
        terminal_response_id=terminal.response_id,
        verdicts=decided_verdicts(capture, decision, foreign),
        notes=decision.notes,
        truncated=any(stopped_by_length(records[position]) for position in kept),
        lost=tuple(call.model_call_id for call in capture.lost),
    )


def _check_completion(record: CallRecord) -> None:
    status, reason, where = effective_status(record), record.finish_reason, f"call={record.model_call_id}"
    evidence = {"response_status": record.response_status, "finish_reason": reason}
    known = {ResponseStatus.COMPLETED, ResponseStatus.INCOMPLETE, ResponseStatus.FAILED}
    if status not in known or (status == ResponseStatus.INCOMPLETE and reason is None):
        raise SelectionError(
            Code.COMPLETION_UNKNOWN,
            f"expected call {record.model_call_id} to have a completion status, got status "
            f"{record.response_status!r} with finish reason {reason!r}",
            where=where,
            evidence=evidence,
        )
    bad_stop = status == ResponseStatus.INCOMPLETE and not stopped_by_length(record)
    if status == ResponseStatus.FAILED or is_interrupted(record) or bad_stop:
        raise SelectionError(
            Code.SELECTED_CALL_FAILED,
            f"expected call {record.model_call_id} to have finished, got status {status!r} with finish reason "
            f"{reason!r}",
            where=where,
            evidence=evidence,
        )


def _check_lost(capture: Capture, selected: Sequence[int]) -> None:
    """Refuse where a lost call may belong to the selected history; a lost sibling is only counted."""
    if not capture.lost:
        return
    lost = {call.model_call_id: call for call in capture.lost}
    by_id = {record.model_call_id: record for record in capture.records}
    passed: set[str] = set()
    for position in selected:
        record: CallRecord | None = capture.records[position]
        while record is not None and record.model_call_id not in passed:
            passed.add(record.model_call_id)
            parent = record.parent_call_id
            if parent in lost:
                raise _incomplete(parent, f"it is an ancestor of selected call {record.model_call_id}", record)
            record = by_id.get(parent) if parent is not None else None
        record = capture.records[position]
        if record.parent_resolution in {ParentResolution.UNRESOLVED, ParentResolution.AMBIGUOUS}:
            why = f"the parent of selected call {record.model_call_id} is {record.parent_resolution}"
            raise _incomplete(next(iter(lost)), why, record)
    for call_id, call in lost.items():
        if call.maybe_received:
            raise _incomplete(call_id, "the harness may have received it", None)


def _incomplete(call_id: str, why: str, record: CallRecord | None) -> SelectionError:
    return SelectionError(
        Code.CAPTURE_INCOMPLETE,
        f"expected every call that may belong to the history to be captured, but {call_id} was lost and {why}",
        where=f"call={call_id}",
        evidence={"lost": call_id, "selected_call": None if record is None else record.model_call_id},
    )


# Rows


def rebuild_rollout(
    capture: Capture,
    selection: Selection,
    result: Result,
    *,
    mode: RowMode = RowMode.MERGED,
    advantage: float | Advantages | None = None,
    decode: Decode | None = None,
) -> RebuiltRollout | Rejected:
    """Rebuild the rows of a selection from the captured tokens.

    Args:
        capture: everything captured of the attempt.
        selection: which calls to train.
        result: reward, credits and group of the rollout.
        mode: one row per path, per call, or a tree.
        advantage: of this rollout, or those of a run by which it is found; None leaves rows without one.
        decode: ids to text, to tell `retokenised` forks from others.
    """
    try:
        by_id = {record.model_call_id: record for record in capture.records}
        _check_rebuildable([by_id[call_id] for call_id in selection.calls])
        rollout = Rollout(
            rollout_id=capture.rollout_id,
            attempt=capture.attempt,
            group_id=result.group_id,
            reward=result.reward,
            advantage=advantage.of(result) if isinstance(advantage, Advantages) else advantage,
            credits=result.credits,
        )
        rebuilt = rebuild(capture.records, capture.tokens, selection.calls, rollout, mode=mode, decode=decode)
        return RebuiltRollout(selection, rebuilt, mode)
    except Refusal as refusal:
        return _rejected(capture, selection.policy, selection.options, refusal)


def _check_rebuildable(selected: Sequence[CallRecord]) -> None:
    unusable = {
        record.model_call_id: {"reason": str(record.unusable_reason), "detail": record.unusable_detail}
        for record in selected
        if not record.usable
    }
    if unusable:
        first, why = next(iter(unusable.items()))
        raise ReconstructionError(
            Code.TOKENS_UNUSABLE,
            f"expected call {first} to have usable tokens, got {why['reason']}: {why['detail'] or 'no detail'}",
            where=f"call={first}",
            evidence={"unusable_calls": unusable},
        )
    for record in selected:
        placed = Counter(span.digest for span in record.media)
        missing = Counter(record.request_media) - placed
        if missing:
            raise ReconstructionError(
                Code.MEDIA_MISSING,
                f"expected call {record.model_call_id} to say where its {len(record.request_media)} media stand in "
                f"the prompt, {sum(missing.values())} have no place",
                where=f"call={record.model_call_id}",
                evidence={"missing": sorted(missing)},
            )
    models = list(dict.fromkeys(record.model for record in selected))
    if len(models) > 1:
        raise ReconstructionError(
            Code.MODELS_MIXED,
            f"expected the selected calls to come from one model, got {', '.join(map(str, models))}",
            evidence={"models": models},
        )


def run_rollout(
    capture: Capture,
    result: Result,
    policy: SelectionPolicy,
    *,
    mode: RowMode = RowMode.MERGED,
    train_model: str | None = None,
    advantage: float | Advantages | None = None,
    decode: Decode | None = None,
) -> RebuiltRollout | Rejected:
    """Select and rebuild one attempt; see `select_rollout` and `rebuild_rollout`."""
    selection = select_rollout(capture, result, policy, train_model=train_model)
    if isinstance(selection, Rejected):
        return selection
    return rebuild_rollout(capture, selection, result, mode=mode, advantage=advantage, decode=decode)


def funnel_of(capture: Capture, outcome: Selection | RebuiltRollout | Rejected) -> Funnel:
    """Count one attempt, captured to trained, in calls and sampled tokens; what is not trained has a code."""
    selection = outcome.selection if isinstance(outcome, RebuiltRollout) else outcome
    selected = set(selection.calls) if isinstance(selection, Selection) else set[str]()
    trained = set[str]()
    if isinstance(outcome, RebuiltRollout):
        trained = selected - set(outcome.rebuilt.empty)
    codes = {verdict.model_call_id: str(verdict.code) for verdict in outcome_verdicts(outcome)}
    counts: dict[str, tuple[int, int]] = dict.fromkeys(("captured", "usable", "selected", "trained"), (0, 0))
    excluded: dict[str, tuple[int, int]] = {}

    def count(stage: str, tokens: int) -> None:
        calls, total = counts[stage]
        counts[stage] = (calls + 1, total + tokens)

    for record in capture.records:
        call_id, tokens = record.model_call_id, record.cum_len - record.prompt_len
        count("captured", tokens)
        if record.usable:
            count("usable", tokens)
        if call_id in selected:
            count("selected", tokens)
        if call_id in trained:
            count("trained", tokens)
        elif isinstance(outcome, RebuiltRollout) or call_id not in selected:
            code = str(Code.EMPTY_GENERATION) if call_id in selected else codes.get(call_id, "")
            calls, total = excluded.get(code, (0, 0))
            excluded[code] = (calls + 1, total + tokens)
    return Funnel(
        captured_calls=counts["captured"][0],
        captured_tokens=counts["captured"][1],
        usable_calls=counts["usable"][0],
        usable_tokens=counts["usable"][1],
        selected_calls=counts["selected"][0],
        selected_tokens=counts["selected"][1],
        trained_calls=counts["trained"][0],
        trained_tokens=counts["trained"][1],
        lost_calls=len(capture.lost),
        excluded=excluded,
    )


def outcome_verdicts(outcome: Selection | RebuiltRollout | Rejected) -> tuple[Verdict, ...]:
    """Return the verdicts of any outcome."""
    return outcome.selection.verdicts if isinstance(outcome, RebuiltRollout) else outcome.verdicts
