"""What every ledger does, on every ledger.

If one of these fails, a call that a gateway was told is stored may be missing, doubled, or in the wrong attempt.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from gristmill.canonical import canonical_text
from gristmill.errors import Code
from gristmill.ledger import (
    LATE_REASON,
    AttemptKey,
    AttemptState,
    Imported,
    Ledger,
    MemoryLedger,
    SqliteLedger,
    StoredCall,
    open_ledger,
    parse_address,
    snapshot_id,
)
from gristmill.records import (
    Capture,
    Continuation,
    ContinuationState,
    Delivery,
    Exchange,
    LostCall,
    Result,
    TokenDelta,
)
from tests.ledger.attempts import ODD_JSON, chain, comparable, fill, lone, refused, same_tokens

KEY = AttemptKey("r", 0)


def test_what_is_committed_is_read_back(ledger: Ledger) -> None:
    # A user's rows are made of exactly this.
    calls = list(chain(6))
    fill(ledger, KEY, 6)
    capture, result = ledger.read(KEY, exchanges=True)
    assert result is None
    assert [record.ordinal for record in capture.records] == list(range(6))
    for call, record in zip(calls, capture.records, strict=True):
        expected = msgspec.structs.replace(call.record, rollout_id="r", attempt=0, ordinal=record.ordinal)
        assert record == expected
        assert call.tokens is not None
        assert same_tokens(capture.tokens[record.model_call_id], call.tokens)
        assert capture.exchanges[record.model_call_id] == call.exchange


def test_what_a_gateway_knows_of_a_call_is_kept(ledger: Ledger) -> None:
    # Which engine, which weights, which retry: nothing else remembers it.
    call = lone(
        "c",
        requested_model="asked",
        upstream="a",
        upstream_id="chatcmpl-1",
        engine_epoch=3,
        weights_at_start="7",
        weights_at_end="8",
        changes=("removed:cache_salt",),
        retry_of="b",
        request_digest="d",
    )
    ledger.commit(KEY, call)
    [record] = ledger.read(KEY)[0].records
    assert record == msgspec.structs.replace(call.record, rollout_id="r", schema=2)


def test_whether_a_call_was_continued_is_kept(ledger: Ledger) -> None:
    # After a restart nothing else tells what continuing the call itself depends on.
    said = Continuation(
        state=ContinuationState.CONTINUED, parent_call_id="b", closed=True, suffix_len=4, model="m", ended=True
    )
    call = lone("c", continuation=said)
    ledger.commit(KEY, call)
    [record] = ledger.read(KEY)[0].records
    assert record == msgspec.structs.replace(call.record, rollout_id="r", schema=4)
    assert record.continuation == said


def test_parts_can_be_left_out(ledger: Ledger) -> None:
    fill(ledger, KEY, 2)
    assert not ledger.read(KEY, tokens=False)[0].tokens
    assert not ledger.read(KEY)[0].exchanges
    assert len(ledger.read(KEY)[0].tokens) == 2


def test_odd_json_is_kept(ledger: Ledger) -> None:
    # Exact numbers, repeated keys and lone surrogates decide whether a call matches.
    call = StoredCall(
        record=lone("c").record,
        exchange=Exchange(model_call_id="c", request={"messages": [ODD_JSON] * 40}, reply=[ODD_JSON, "\udfff" * 400]),
    )
    ledger.commit(KEY, call)
    ledger.finish(KEY, Result(value=ODD_JSON, metadata={"a": 0.5, "b": [1, None, "x"]}))
    capture, result = ledger.read(KEY, exchanges=True)
    read = capture.exchanges["c"]
    assert call.exchange is not None
    assert canonical_text(read.request) == canonical_text(call.exchange.request)
    assert canonical_text(read.reply) == canonical_text(call.exchange.reply)
    assert result is not None
    assert canonical_text(result.value) == canonical_text(ODD_JSON)
    assert result.metadata == {"a": 0.5, "b": [1, None, "x"]}


def test_lost_calls_are_reported_with_their_reasons(ledger: Ledger) -> None:
    for call_id in ("a", "b", "c"):
        ledger.admit(KEY, call_id, "p")
    ledger.lose(KEY, "b", "engine_lost")
    ledger.commit(KEY, lone("c"))
    lost = ledger.read(KEY)[0].lost
    assert lost == (
        LostCall(model_call_id="a", parent_call_id="p"),
        LostCall(model_call_id="b", parent_call_id="p", reason="engine_lost"),
    )


def test_a_call_has_one_outcome(ledger: Ledger) -> None:
    ledger.admit(KEY, "a")
    ledger.admit(KEY, "b")
    refused(Code.CALL_IDENTITY_REUSED, ledger.admit, KEY, "a")
    ledger.commit(KEY, lone("a"))
    refused(Code.CALL_IDENTITY_REUSED, ledger.admit, KEY, "a")
    refused(Code.CALL_IDENTITY_REUSED, ledger.commit, KEY, lone("a"))
    refused(Code.CALL_IDENTITY_REUSED, ledger.lose, KEY, "a", "x")
    ledger.lose(KEY, "b", "x")
    refused(Code.CALL_IDENTITY_REUSED, ledger.lose, KEY, "b", "y")
    refused(Code.CALL_IDENTITY_REUSED, ledger.commit, KEY, lone("b"))
    refused(Code.CALL_UNKNOWN, ledger.lose, KEY, "z", "x")
    assert [record.model_call_id for record in ledger.read(KEY)[0].records] == ["a"]


def test_choices_are_stored_together_or_not_at_all(ledger: Ledger) -> None:
    assert ledger.commit_choices(KEY, [lone("a"), lone("a#1", choice_index=1)]) == (0, 1)
    refused(Code.CALL_IDENTITY_REUSED, ledger.commit_choices, KEY, [lone("b"), lone("a")])
    refused(Code.CALL_IDENTITY_REUSED, ledger.commit_choices, KEY, [lone("d"), lone("d")])
    assert [record.model_call_id for record in ledger.read(KEY)[0].records] == ["a", "a#1"]


def test_deliveries_are_events_and_the_last_counts(ledger: Ledger) -> None:
    fill(ledger, KEY, 2)
    ledger.deliver(KEY, "c1", Delivery.PARTIAL)
    ledger.deliver(KEY, "c1", Delivery.DELIVERED)
    states = [record.delivery for record in ledger.read(KEY)[0].records]
    assert states == [Delivery.UNKNOWN, Delivery.DELIVERED]
    refused(Code.CALL_UNKNOWN, ledger.deliver, KEY, "zz", Delivery.DELIVERED)
    refused(Code.ROLLOUT_UNKNOWN, ledger.deliver, AttemptKey("other"), "c1", Delivery.DELIVERED)


def test_finish_stops_admission_and_keeps_late_outcomes_apart(ledger: Ledger) -> None:
    # An outcome after the result cannot have earned the reward.
    fill(ledger, KEY, 2)
    ledger.admit(KEY, "slow", "c1")
    ledger.finish(KEY, Result(value={"x": 1}, reward=0.5, group_id="g"))
    refused(Code.ATTEMPT_CLOSED, ledger.admit, KEY, "more")
    late = lone("slow", parent_call_id="c1")
    ledger.commit(KEY, late)
    capture, result = ledger.read(KEY)
    assert result == Result(value={"x": 1}, reward=0.5, group_id="g")
    assert [record.model_call_id for record in capture.records] == ["c0", "c1"]
    assert capture.lost == (LostCall(model_call_id="slow", parent_call_id="c1", reason=LATE_REASON),)
    assert [call.record.model_call_id for call in ledger.late(KEY)] == ["slow"]
    [summary] = ledger.summaries()
    assert (summary.calls, summary.lost) == (2, 1)


def test_a_result_is_never_replaced(ledger: Ledger) -> None:
    ledger.finish(KEY, Result(value=1, reward=1.0))
    ledger.finish(KEY, Result(value=1, reward=1.0))
    refused(Code.ATTEMPT_DIFFERS, ledger.finish, KEY, Result(value=1, reward=0.0))
    assert ledger.read(KEY)[1] == Result(value=1, reward=1.0)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_is_a_number(ledger: Ledger, reward: float) -> None:
    # SQLite would store NaN as no reward at all.
    refused(Code.OPTION_INVALID, ledger.finish, KEY, Result(value=1, reward=reward))
    refused(Code.OPTION_INVALID, ledger.finish, KEY, Result(value={1: object()}))
    assert list(ledger.attempts()) == []


def test_a_frozen_attempt_takes_no_calls(ledger: Ledger) -> None:
    fill(ledger, KEY, 2)
    ledger.admit(KEY, "open")
    ledger.freeze(KEY)
    refused(Code.ATTEMPT_CLOSED, ledger.admit, KEY, "x")
    refused(Code.ATTEMPT_CLOSED, ledger.commit, KEY, lone("open"))
    refused(Code.ATTEMPT_CLOSED, ledger.lose, KEY, "open", "x")
    refused(Code.ATTEMPT_CLOSED, ledger.finish, KEY, Result())
    refused(Code.ATTEMPT_CLOSED, ledger.abandon, KEY)


def test_abandoning_freezes_under_another_name(ledger: Ledger) -> None:
    fill(ledger, KEY, 2)
    digest = ledger.abandon(KEY)
    assert [summary.state for summary in ledger.summaries()] == [AttemptState.ABANDONED]
    assert ledger.freeze(KEY) == digest
    assert [summary.state for summary in ledger.summaries(state=AttemptState.ABANDONED)]
    ledger.retire(KEY, digest)
    assert list(ledger.attempts()) == []


def test_an_attempt_is_retired_only_as_it_was_frozen(ledger: Ledger) -> None:
    other = AttemptKey("r", 1)
    fill(ledger, KEY)
    fill(ledger, other, 2)
    refused(Code.MANIFEST_DIFFERS, ledger.retire, KEY, "0" * 64)
    digest = ledger.freeze(KEY)
    assert ledger.freeze(KEY) == digest
    refused(Code.MANIFEST_DIFFERS, ledger.retire, KEY, "0" * 64)
    ledger.deliver(KEY, "c0", Delivery.DELIVERED)
    refused(Code.MANIFEST_DIFFERS, ledger.retire, KEY, digest)
    ledger.retire(KEY, ledger.freeze(KEY))
    refused(Code.ROLLOUT_UNKNOWN, ledger.read, KEY)
    assert list(ledger.attempts()) == [other]
    assert len(ledger.read(other)[0].records) == 2


def test_the_snapshot_covers_everything(ledger: Ledger) -> None:
    # What is not covered could be lost in an archive, and the original be deleted all the same.
    def digest(**changes: object) -> str:
        key = AttemptKey(f"r{len(seen)}")
        call = next(chain(1))
        assert call.tokens is not None
        assert call.exchange is not None
        if "tokens" in changes:
            logprobs_T = call.tokens.logprobs_T.copy()
            logprobs_T[-1] -= 1
            call = msgspec.structs.replace(call, tokens=msgspec.structs.replace(call.tokens, logprobs_T=logprobs_T))
        if "exchange" in changes:
            call = msgspec.structs.replace(call, exchange=msgspec.structs.replace(call.exchange, status=201))
        ledger.commit(key, call)
        ledger.admit(key, "late")
        if "lost" in changes:
            ledger.admit(key, "lost")
        ledger.finish(key, Result(value={"a": 0.5}, reward=1.0 if "reward" in changes else 0.0))
        if "late" in changes:
            ledger.commit(key, lone("late"))
        ledger.freeze(key)
        capture, result = ledger.read(key, exchanges=True)
        same = msgspec.structs.replace(
            capture,
            rollout_id="r",
            records=tuple(msgspec.structs.replace(record, rollout_id="r") for record in capture.records),
        )
        late = [
            msgspec.structs.replace(call, record=msgspec.structs.replace(call.record, rollout_id="r"))
            for call in ledger.late(key)
        ]
        return snapshot_id(same, result, late)

    seen: list[str] = []
    for change in ("nothing", "tokens", "exchange", "lost", "reward", "late"):
        seen.append(digest(**{change: True}))
    assert len(set(seen)) == len(seen)


def test_all_ledgers_give_one_snapshot_id(tmp_path: Path, postgres_url: str) -> None:
    digests: list[str] = []
    with SqliteLedger(tmp_path / "run.ledger") as stored, open_ledger(parse_address(postgres_url)) as shared:
        for ledger in (MemoryLedger(), stored, shared):
            fill(ledger, KEY)
            for call_id in ("open", "late", "lost"):
                ledger.admit(KEY, call_id)
            ledger.lose(KEY, "lost", "x")
            ledger.commit(
                KEY, StoredCall(record=lone("odd").record, exchange=Exchange(model_call_id="odd", request=ODD_JSON))
            )
            ledger.deliver(KEY, "c0", Delivery.PARTIAL)
            ledger.finish(KEY, Result(value={"f": [0.1, 1e300, -0.0], "o": ODD_JSON}, reward=1, metadata={"a": 1e-7}))
            ledger.commit(KEY, lone("late"))
            digests.append(ledger.freeze(KEY))
    assert len(set(digests)) == 1
    assert len(digests) == 3


def test_tokens_that_disagree_with_their_record_are_refused(ledger: Ledger) -> None:
    # Stored, they would make a row whose mask is wrong.
    first, second = list(chain(2))
    assert first.tokens is not None
    delta = first.tokens
    replace = msgspec.structs.replace
    bad = [
        replace(first, record=replace(first.record, delta_len=3)),
        replace(first, record=replace(first.record, prompt_len=5)),
        replace(first, record=replace(first.record, prompt_len=99)),
        replace(first, record=replace(first.record, base_call_id="x")),
        replace(first, tokens=replace(delta, mask_T=np.ones_like(delta.mask_T))),
        replace(first, tokens=replace(delta, mask_T=delta.mask_T * np.uint8(2))),
        replace(first, tokens=replace(delta, logprobs_T=delta.logprobs_T - 1)),
        replace(first, tokens=replace(delta, ids_T=delta.ids_T[1:])),
        replace(first, tokens=TokenDelta(delta.ids_T.astype(np.int64), delta.mask_T, delta.logprobs_T)),  # pyright: ignore
        second,
    ]
    for call in bad:
        refused(Code.TOKEN_COUNT_MISMATCH, ledger.commit, KEY, call)
    assert list(ledger.attempts()) == []
    ledger.commit(KEY, replace(first, tokens=None))
    refused(Code.TOKEN_COUNT_MISMATCH, ledger.commit, KEY, second)


def test_attempts_do_not_mix(ledger: Ledger) -> None:
    keys = [AttemptKey("r", 0), AttemptKey("r", 1), AttemptKey("q", 0)]
    for seed, key in enumerate(keys):
        fill(ledger, key, 3, seed)
    assert list(ledger.attempts()) == keys
    assert ledger.rollout("r") == (keys[0], keys[1])
    assert ledger.rollout("none") == ()
    for seed, key in enumerate(keys):
        capture, _ = ledger.read(key)
        expected = [call.tokens for call in chain(3, seed)]
        assert all(
            wanted is not None and same_tokens(capture.tokens[f"c{n}"], wanted) for n, wanted in enumerate(expected)
        )
    refused(Code.ROLLOUT_UNKNOWN, ledger.read, AttemptKey("r", 2))
    refused(Code.ROLLOUT_UNKNOWN, ledger.read, AttemptKey("r", 2**70))
    refused(Code.ROLLOUT_UNKNOWN, ledger.freeze, AttemptKey("r", 2))
    refused(Code.OPTION_INVALID, ledger.admit, AttemptKey("\ud800"), "a")


def test_summaries_say_what_reading_says(ledger: Ledger) -> None:
    keys = [AttemptKey(f"r{n}") for n in range(4)]
    for n, key in enumerate(keys):
        fill(ledger, key, n + 1, n)
        ledger.admit(key, "open")
        if n % 2:
            ledger.finish(key, Result(value=n, reward=float(n), group_id="odd"))
    summaries = list(ledger.summaries())
    assert [summary.key for summary in summaries] == keys
    for summary in summaries:
        capture, result = ledger.read(summary.key)
        records = capture.records
        assert summary.calls == len(records)
        assert summary.lost == len(capture.lost) == 1
        assert summary.usable_calls == sum(record.usable for record in records)
        assert summary.sampled_tokens == sum(record.cum_len - record.prompt_len for record in records)
        assert summary.prompt_tokens == sum(record.prompt_len for record in records)
        assert summary.models == tuple(dict.fromkeys(record.model for record in records))
        assert (summary.first_at, summary.last_at) == (100.0, 199.0 + len(records))
        assert summary.has_result is (result is not None)
        assert (summary.reward, summary.group_id) == ((result.reward, result.group_id) if result else (None, None))
    assert [ledger.summary(key) for key in keys] == summaries
    refused(Code.ROLLOUT_UNKNOWN, ledger.summary, AttemptKey("none"))
    assert list(ledger.summaries(after=keys[1])) == summaries[2:]
    assert list(ledger.summaries(group_id="odd")) == summaries[1::2]
    assert list(ledger.summaries(state=AttemptState.OPEN)) == summaries[::2]
    counts = ledger.counts()
    assert counts.calls == sum(summary.calls for summary in summaries)
    assert counts.attempts == {AttemptState.OPEN: 2, AttemptState.FINISHED: 2}
    refused(Code.ROLLOUT_UNKNOWN, lambda: list(ledger.summaries(after=AttemptKey("none"))))


def captured(calls: int = 4, seed: int = 0, rollout_id: str = "r") -> tuple[Capture, Result | None]:
    memory = MemoryLedger()
    key = AttemptKey(rollout_id)
    fill(memory, key, calls, seed)
    memory.admit(key, "gone")
    memory.finish(key, Result(value=ODD_JSON, reward=1.0, group_id="g"))
    return memory.read(key, exchanges=True)


def test_an_import_is_whole_and_idempotent(ledger: Ledger) -> None:
    attempts = [captured(seed=n, rollout_id=f"r{n}") for n in range(3)]
    assert ledger.import_attempts(iter(attempts)) == Imported(3, 0)
    assert ledger.import_attempts(iter(attempts)) == Imported(0, 3)
    for capture, result in attempts:
        key = AttemptKey(capture.rollout_id)
        assert comparable(*ledger.read(key, exchanges=True)) == comparable(capture, result)
        assert ledger.freeze(key) == snapshot_id(capture, result)
    changed = captured(seed=9, rollout_id="r1")
    error = refused(Code.ATTEMPT_DIFFERS, ledger.import_attempts, [captured(rollout_id="new"), changed])
    assert "r1/0" in error.message
    assert [key.rollout_id for key in ledger.attempts()] == ["r0", "r1", "r2"]


def test_an_import_that_breaks_off_leaves_nothing(ledger: Ledger) -> None:
    class Broken(Exception):
        pass

    def attempts() -> Iterator[tuple[Capture, Result | None]]:
        yield captured()
        raise Broken

    with pytest.raises(Broken):
        ledger.import_attempts(attempts())
    assert list(ledger.attempts()) == []
    fill(ledger, KEY)


def test_an_import_of_what_was_captured_here_changes_nothing(ledger: Ledger) -> None:
    fill(ledger, KEY)
    ledger.finish(KEY, Result(value=1))
    attempt = ledger.read(KEY, exchanges=True)
    assert ledger.import_attempts([attempt]) == Imported(0, 1)
    ledger.deliver(KEY, "c0", Delivery.DELIVERED)
    refused(Code.ATTEMPT_DIFFERS, ledger.import_attempts, [attempt])


def test_repeated_call_ids_are_imported_as_they_are(ledger: Ledger) -> None:
    # Selection refuses them; the ledger does not choose.
    capture, result = captured(3)
    doubled = msgspec.structs.replace(
        capture, records=(*capture.records, msgspec.structs.replace(capture.records[1], ordinal=3))
    )
    ledger.import_attempts([(doubled, result)])
    assert comparable(*ledger.read(KEY, exchanges=True)) == comparable(doubled, result)


def test_an_import_needs_records_for_its_tokens(ledger: Ledger) -> None:
    capture, result = captured(3)
    headless = msgspec.structs.replace(capture, records=capture.records[1:])
    refused(Code.CALL_UNKNOWN, ledger.import_attempts, [(headless, result)])
    assert list(ledger.attempts()) == []
