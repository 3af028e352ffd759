"""A ledger that lasts as long as the process: for files read whole, conformance cases, and as the simplest example.

Invariant: behaves as every other ledger does, durability apart.

Not here: what is kept of an attempt (memory_attempt).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import time

import msgspec

from gristmill.errors import Code, LedgerError
from gristmill.ledger.book import check_names, closed_error, name_of, unknown_attempt
from gristmill.ledger.calls import own_purpose, own_record
from gristmill.ledger.endings import FROZEN_STATES
from gristmill.ledger.imports import differs, own_capture
from gristmill.ledger.memory_attempt import HeldAttempt, check_call, imported_attempt, summary_of
from gristmill.ledger.protocol import (
    LATE_REASON,
    AttemptKey,
    AttemptSetup,
    AttemptState,
    Counts,
    Imported,
    StoredCall,
    Summary,
)
from gristmill.ledger.setups import key_exists, prepare_setup, setup_of
from gristmill.ledger.snapshot import snapshot_id as digest_attempt
from gristmill.ledger.writes import prepare_result, reused, unknown_call
from gristmill.records import Capture, Delivery, LostCall, Purpose, Result

__all__ = ["MemoryLedger"]


class MemoryLedger:
    """Keeps attempts in dictionaries.

    Args:
        clock: unix seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time) -> None:
        self._attempts: dict[AttemptKey, HeldAttempt] = {}
        self._clock = clock

    def _begun(self, key: AttemptKey) -> HeldAttempt:
        return self._attempts.get(key) or HeldAttempt()

    def _known(self, key: AttemptKey) -> HeldAttempt:
        attempt = self._attempts.get(key)
        if attempt is None:
            raise unknown_attempt(key)
        return attempt

    def _change(self, key: AttemptKey, attempt: HeldAttempt) -> None:
        attempt.touched_at = self._clock()
        self._attempts.setdefault(key, attempt)

    def begin(self, key: AttemptKey, setup: AttemptSetup) -> None:
        """Open an attempt before its first call."""
        prepared = prepare_setup(key, setup)
        attempt = self._begun(key)
        if attempt.setup is not None:
            if prepare_setup(key, attempt.setup) != prepared:
                raise key_exists(key, f"{name_of(key)} is there with another")
            return
        if attempt.state != AttemptState.OPEN:
            raise closed_error(key, attempt.state, "takes a setup")
        if setup.key_digest is not None and setup.key_digest in self._digests():
            raise key_exists(key, "another attempt has its key")
        attempt.setup = setup_of(key, prepared)
        self._change(key, attempt)

    def _digests(self) -> set[str | None]:
        return {other.setup.key_digest for other in self._attempts.values() if other.setup is not None}

    def setup(self, key: AttemptKey) -> AttemptSetup | None:
        """Return what an attempt was opened with, None where it has only calls."""
        return self._known(key).setup

    def revoke(self, key: AttemptKey) -> None:
        """Let the attempt's key never open it again."""
        self._known(key).revoked = True

    def grants(self) -> Iterator[tuple[str, AttemptKey]]:
        """Yield the key digests that open an attempt, with their attempts."""
        for key, attempt in tuple(self._attempts.items()):
            digest = None if attempt.setup is None else attempt.setup.key_digest
            if digest is not None and not attempt.revoked and attempt.state not in FROZEN_STATES:
                yield digest, key

    def admit(self, key: AttemptKey, model_call_id: str, parent_call_id: str | None = None) -> None:
        """Record that a call is about to be made."""
        check_names(key, model_call_id, parent_call_id)
        attempt = self._begun(key)
        if attempt.state != AttemptState.OPEN:
            raise closed_error(key, attempt.state, "takes calls")
        if model_call_id in attempt.ids or attempt.admitted(model_call_id):
            raise reused(model_call_id, f"expected a new call id, got {model_call_id} again")
        attempt.lost.append(LostCall(model_call_id=model_call_id, parent_call_id=parent_call_id))
        attempt.open.add(model_call_id)
        self._change(key, attempt)

    def commit(self, key: AttemptKey, call: StoredCall) -> int:
        """Store the outcome of a call and return its ordinal."""
        return self.commit_choices(key, (call,))[0]

    def commit_choices(self, key: AttemptKey, calls: Sequence[StoredCall]) -> tuple[int, ...]:
        """Store the calls of one reply, all or none, and return their ordinals."""
        check_names(key)
        attempt = self._begun(key)
        if attempt.state in FROZEN_STATES:
            raise closed_error(key, attempt.state, "takes outcomes")
        ids = dict(attempt.ids)
        for call in calls:
            call_id = call.record.model_call_id
            if call_id in ids:
                raise reused(call_id, f"expected a call without outcome, {call_id} has one")
            if attempt.admitted(call_id) and call_id not in attempt.open:
                raise reused(call_id, f"expected a call in flight, {call_id} was lost")
            check_call(call, ids)
            ids[call_id] = None if call.tokens is None else call.record.cum_len
        late = attempt.state == AttemptState.FINISHED
        ordinals: list[int] = []
        for call in calls:
            record = msgspec.structs.replace(own_record(key, call.record), ordinal=attempt.next_ordinal)
            (attempt.late if late else attempt.calls).append(msgspec.structs.replace(call, record=record))
            ordinals.append(attempt.next_ordinal)
            attempt.next_ordinal += 1
            if record.model_call_id in attempt.open:
                attempt.open.discard(record.model_call_id)
                attempt.lost = [lost for lost in attempt.lost if lost.model_call_id != record.model_call_id]
        attempt.ids = ids
        self._change(key, attempt)
        return tuple(ordinals)

    def lose(self, key: AttemptKey, model_call_id: str, reason: str) -> None:
        """Say why an admitted call has no outcome and will get none."""
        check_names(key, model_call_id, reason)
        attempt = self._known(key)
        if attempt.state in FROZEN_STATES:
            raise closed_error(key, attempt.state, "takes outcomes")
        if model_call_id in attempt.ids:
            raise reused(model_call_id, f"expected a call without outcome, {model_call_id} has one")
        if not attempt.admitted(model_call_id):
            raise unknown_call(key, model_call_id)
        if model_call_id not in attempt.open:
            raise reused(model_call_id, f"expected a call in flight, {model_call_id} was lost before")
        attempt.open.discard(model_call_id)
        attempt.lost = [
            msgspec.structs.replace(lost, reason=reason) if lost.model_call_id == model_call_id else lost
            for lost in attempt.lost
        ]
        self._change(key, attempt)

    def deliver(self, key: AttemptKey, model_call_id: str, delivery: Delivery) -> None:
        """Append whether the client got the reply."""
        check_names(key, model_call_id)
        attempt = self._known(key)
        if model_call_id not in attempt.ids and not attempt.admitted(model_call_id):
            raise unknown_call(key, model_call_id)
        attempt.deliveries[model_call_id] = delivery
        self._change(key, attempt)

    def label(self, key: AttemptKey, labels: Mapping[str, Purpose]) -> None:
        """Append purposes by call id, all or none."""
        attempt = self._known(key)
        if attempt.state in FROZEN_STATES:
            raise closed_error(key, attempt.state, "takes labels")
        for call_id, purpose in labels.items():
            if call_id not in attempt.ids and not attempt.admitted(call_id):
                raise unknown_call(key, call_id)
            check_names(key, purpose.evidence)
        if labels:
            attempt.labels.update({call_id: own_purpose(purpose) for call_id, purpose in labels.items()})
            self._change(key, attempt)

    def finish(self, key: AttemptKey, result: Result) -> None:
        """Store what the harness handed back."""
        check_names(key, result.group_id)
        attempt = self._begun(key)
        prepared = prepare_result(result)
        if attempt.result is not None:
            if prepare_result(attempt.result) != prepared:
                raise LedgerError(
                    f"expected the result that {name_of(key)} has already, got another",
                    code=Code.ATTEMPT_DIFFERS,
                    where=key.rollout_id,
                )
            return
        if attempt.state in FROZEN_STATES:
            raise closed_error(key, attempt.state, "takes a result")
        attempt.result, attempt.state = result, AttemptState.FINISHED
        self._change(key, attempt)

    def attempts(self) -> Iterator[AttemptKey]:
        """Yield the attempts in the order in which they began."""
        yield from tuple(self._attempts)

    def rollout(self, rollout_id: str) -> tuple[AttemptKey, ...]:
        """Return the attempts of one rollout by number."""
        return tuple(sorted(key for key in self._attempts if key.rollout_id == rollout_id))

    def summaries(
        self,
        *,
        after: AttemptKey | None = None,
        state: AttemptState | None = None,
        group_id: str | None = None,
    ) -> Iterator[Summary]:
        """Yield one line for each attempt, in the order in which they began."""
        keys = list(self._attempts)
        if after is not None:
            self._known(after)
            keys = keys[keys.index(after) + 1 :]
        for key in keys:
            summary = summary_of(key, self._attempts[key])
            if state in (None, summary.state) and group_id in (None, summary.group_id):
                yield summary

    def summary(self, key: AttemptKey) -> Summary:
        """Return the line of one attempt."""
        return summary_of(key, self._known(key))

    def counts(self) -> Counts:
        """Add up all attempts."""
        summaries = list(self.summaries())
        states = [summary.state for summary in summaries]
        return Counts(
            attempts={state: states.count(state) for state in AttemptState if state in states},
            calls=sum(summary.calls for summary in summaries),
            lost=sum(summary.lost for summary in summaries),
            usable_calls=sum(summary.usable_calls for summary in summaries),
            sampled_tokens=sum(summary.sampled_tokens for summary in summaries),
            prompt_tokens=sum(summary.prompt_tokens for summary in summaries),
        )

    def read(self, key: AttemptKey, *, tokens: bool = True, exchanges: bool = False) -> tuple[Capture, Result | None]:
        """Return everything captured of an attempt, and its result."""
        attempt = self._known(key)
        late = [
            LostCall(
                model_call_id=call.record.model_call_id,
                parent_call_id=call.record.parent_call_id,
                reason=LATE_REASON,
            )
            for call in attempt.late
        ]
        calls = [attempt.as_stated(call) for call in attempt.calls]
        capture = Capture(
            rollout_id=key.rollout_id,
            attempt=key.attempt,
            records=tuple(call.record for call in calls),
            tokens={call.record.model_call_id: call.tokens for call in calls if tokens and call.tokens is not None},
            lost=(*attempt.lost, *late),
            exchanges={
                call.record.model_call_id: call.exchange for call in calls if exchanges and call.exchange is not None
            },
        )
        return capture, attempt.result

    def late(self, key: AttemptKey) -> tuple[StoredCall, ...]:
        """Return the outcomes that came after the attempt had finished, in commit order."""
        attempt = self._known(key)
        return tuple(attempt.as_stated(call) for call in attempt.late)

    def check(self, key: AttemptKey) -> tuple[str, ...]:
        """Say where what is stored of an attempt contradicts itself: nowhere."""
        self._known(key)
        return ()

    def import_attempts(self, attempts: Iterable[tuple[Capture, Result | None]]) -> Imported:
        """Add whole attempts, frozen: all of them or none."""
        fresh: dict[AttemptKey, HeldAttempt] = {}
        unchanged = 0
        for given, result in attempts:
            capture = own_capture(given)
            key = AttemptKey(capture.rollout_id, capture.attempt)
            there = self._attempts.get(key) or fresh.get(key)
            if there is None:
                fresh[key] = imported_attempt(capture, result)
            elif self._digest(key, there, with_setup=False) == digest_attempt(capture, result):
                unchanged += 1
            else:
                raise differs(key)
        for key, attempt in fresh.items():
            self._change(key, attempt)
        return Imported(len(fresh), unchanged)

    def _digest(self, key: AttemptKey, attempt: HeldAttempt, *, with_setup: bool = True) -> str:
        apart = MemoryLedger()
        apart._attempts[key] = attempt
        setup = attempt.setup if with_setup else None
        return digest_attempt(*apart.read(key, exchanges=True), apart.late(key), setup)

    def freeze(self, key: AttemptKey) -> str:
        """Admit no more calls and return the snapshot id."""
        return self._freeze(key, AttemptState.FROZEN)

    def abandon(self, key: AttemptKey) -> str:
        """Freeze an attempt that its harness never finished."""
        state = self._known(key).state
        if state != AttemptState.OPEN:
            raise closed_error(key, state, "is open")
        return self._freeze(key, AttemptState.ABANDONED)

    def _freeze(self, key: AttemptKey, state: AttemptState) -> str:
        attempt = self._known(key)
        if attempt.state not in FROZEN_STATES:
            attempt.state = state
            self._change(key, attempt)
        return self._digest(key, attempt)

    def retire(self, key: AttemptKey, snapshot_id: str) -> None:
        """Delete a frozen attempt that has not changed."""
        attempt = self._known(key)
        if attempt.state not in FROZEN_STATES or self._digest(key, attempt) != snapshot_id:
            raise LedgerError(
                f"expected a frozen attempt with snapshot {snapshot_id}, {name_of(key)} is another",
                code=Code.MANIFEST_DIFFERS,
                where=key.rollout_id,
            )
        del self._attempts[key]
