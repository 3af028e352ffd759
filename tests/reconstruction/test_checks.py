"""`verify`: whatever is changed in rows or capture is found, and untouched rows are not accused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.errors import Code, ReconstructionError
from gristmill.reconstruction import (
    Certificate,
    Finding,
    Relation,
    Row,
    RowExtras,
    RowMode,
    SpanArray,
    SpanRole,
    conservation,
    rebuild,
    row_id_of,
    verify_rows,
)
from gristmill.records import LogprobsMode, MediaSpan, Sampling, WeightSpan
from tests.reconstruction.attempts import ROLLOUT, Attempt, Call, attempt, call_forests

replace = msgspec.structs.replace


def example() -> Attempt:
    """Two branches with a shared turn, a fork, and an unselected call in between."""
    return attempt(
        Call("a", [1, 2], [3, 4], fields={"weight_versions": (WeightSpan("7", 0, 1), WeightSpan("8", 1, 2))}),
        Call("b", [1, 2, 3, 4, 5], [6], parent="a"),
        Call("c", [1, 2, 3, 4, 7], [8, 9], parent="a", extras={"experts": np.array([1, 2, 3])}),
        Call("d", [1, 2, 3, 4, 5, 6, 10], [11], parent="b"),
        Call("e", [1, 2, 9], [12], parent="a", fields={"sampling": Sampling(temperature=0.5)}),
    )


SELECTED = ["a", "c", "d", "e"]


def built(made: Attempt, mode: RowMode = RowMode.MERGED) -> list[Row]:
    return list(rebuild(made.records, made.tokens, SELECTED, ROLLOUT, mode=mode).rows)


def verify(made: Attempt, rows: list[Row], mode: RowMode = RowMode.MERGED) -> tuple[Finding, ...]:
    return verify_rows(made.records, made.tokens, SELECTED, rows, rollout=ROLLOUT, mode=mode)


def codes(findings: tuple[Finding, ...]) -> set[Code]:
    return {finding.code for finding in findings}


@pytest.mark.parametrize("mode", list(RowMode))
def test_untouched_rows_pass(mode: RowMode) -> None:
    # A check that cries wolf is switched off.
    made = example()
    assert verify(made, built(made, mode), mode) == ()


def put(name: str, at: int, value: float) -> Callable[[Row], Row]:
    """Change one element of an array, and keep the claimed id."""

    def change(row: Row) -> Row:
        array = getattr(row, name).copy()
        array[at] = value
        return replace(row, **{name: array})

    return change


def put_span(at: int, **fields: Any) -> Callable[[Row], Row]:
    def change(row: Row) -> Row:
        spans = list(row.spans)
        spans[at] = replace(spans[at], **fields)
        return replace(row, spans=tuple(spans))

    return change


FORGED = Certificate(Relation.EXACT, "a")
TAMPERED: list[tuple[int, Callable[[Row], Row], Code]] = [
    (0, put("token_ids", 0, 99), Code.ROW_TOKENS_DIFFER),
    (0, put("token_ids", 6, 99), Code.ROW_TOKENS_DIFFER),
    (1, put("token_ids", 3, 99), Code.ROW_TOKENS_DIFFER),
    (0, lambda row: replace(row, token_ids=row.token_ids[:-1]), Code.ROW_MALFORMED),
    (0, lambda row: replace(row, token_ids=row.token_ids.astype(np.int64)), Code.ROW_MALFORMED),
    (0, put("loss_mask", 0, 1), Code.ROW_MASK_DIFFERS),
    (0, put("loss_mask", 0, 1), Code.TOKENS_NOT_CONSERVED),
    (0, put("loss_mask", 2, 0), Code.ROW_MASK_DIFFERS),
    (1, put("loss_mask", 2, 1), Code.ROW_MASK_DIFFERS),
    (0, put("logprobs", 2, -9.0), Code.ROW_LOGPROBS_DIFFER),
    (0, put("logprobs", 0, -9.0), Code.ROW_LOGPROBS_DIFFER),
    (0, put("logprobs", 2, float("nan")), Code.ROW_LOGPROBS_DIFFER),
    (0, put_span(0, call_id="c"), Code.ROW_LINEAGE_DIFFERS),
    (0, put_span(0, end=1), Code.ROW_SPANS_INVALID),
    (0, put_span(0, role=SpanRole.SAMPLED), Code.ROW_SPANS_INVALID),
    (1, put_span(1, role=SpanRole.SAMPLED), Code.TOKEN_NOT_ONCE),
    (1, put_span(1, owner="0"), Code.ROW_METADATA_DIFFERS),
    (0, put_span(1, weight_version="9"), Code.ROW_METADATA_DIFFERS),
    (0, put_span(1, logprobs_mode=LogprobsMode.RAW), Code.ROW_METADATA_DIFFERS),
    (2, put_span(1, temperature=1.0), Code.ROW_METADATA_DIFFERS),
    (2, put_span(0, certificate=FORGED), Code.ROW_LINEAGE_DIFFERS),
    (2, put_span(0, certificate=None), Code.ROW_LINEAGE_DIFFERS),
    (0, lambda row: replace(row, spans=()), Code.ROW_SPANS_INVALID),
    (0, lambda row: replace(row, spans=row.spans[:-1]), Code.ROW_SPANS_INVALID),
    (0, lambda row: replace(row, row_id="0"), Code.ROW_ID_DIFFERS),
    (0, lambda row: replace(row, loss_weight=0.9), Code.ROW_METADATA_DIFFERS),
    (0, lambda row: replace(row, reward=None), Code.ROW_METADATA_DIFFERS),
    (0, lambda row: replace(row, advantage=1.0), Code.ROW_METADATA_DIFFERS),
    (0, lambda row: replace(row, group_id=None), Code.ROW_METADATA_DIFFERS),
    (0, lambda row: replace(row, rollout_id="x"), Code.ROW_METADATA_DIFFERS),
    (0, lambda row: replace(row, attempt=1), Code.ROW_METADATA_DIFFERS),
    (0, lambda row: replace(row, row_index=1), Code.ROW_METADATA_DIFFERS),
    (0, lambda row: replace(row, row_count=9), Code.ROW_METADATA_DIFFERS),
    (0, lambda row: replace(row, prompt_len=1), Code.ROW_METADATA_DIFFERS),
    (0, lambda row: replace(row, truncated=True), Code.ROW_METADATA_DIFFERS),
    (0, lambda row: replace(row, finish_reason=None), Code.ROW_METADATA_DIFFERS),
    (0, lambda row: replace(row, extras=RowExtras()), Code.ROW_METADATA_DIFFERS),
    (1, lambda row: replace(row, extras=RowExtras(media=(MediaSpan("x", 0, 1),))), Code.ROW_METADATA_DIFFERS),
    (
        0,
        lambda row: replace(row, extras=RowExtras((SpanArray("experts", "c", 4, np.array([1, 2, 4])),))),
        Code.ROW_METADATA_DIFFERS,
    ),
]


@pytest.mark.parametrize(("number", "change", "code"), TAMPERED)
@pytest.mark.parametrize("forged", [False, True])
def test_every_change_of_a_row_is_found(number: int, change: Callable[[Row], Row], code: Code, forged: bool) -> None:
    # A row that somebody or some bug changed must not be trained, even if its id was made to fit.
    made = example()
    rows = built(made)
    rows[number] = change(rows[number])
    if forged and code not in (Code.ROW_MALFORMED, Code.ROW_ID_DIFFERS):
        rows[number] = replace(rows[number], row_id=row_id_of(rows[number], RowMode.MERGED))
    findings = verify(made, rows)
    assert code in codes(findings)
    assert all(finding.message and finding.where for finding in findings)


@pytest.mark.parametrize("name", ["token_ids", "loss_mask", "logprobs"])
def test_every_single_element_counts(name: str) -> None:
    # There is no place in a row where a wrong value could hide.
    made = example()
    for number, row in enumerate(built(made)):
        for at in range(row.token_ids.size):
            rows = built(made)
            rows[number] = put(name, at, getattr(row, name)[at] + 1)(row)
            assert verify(made, rows), (number, at)


def test_missing_unexpected_and_reordered_rows_are_found() -> None:
    # A lost file part is not a shorter rollout.
    made = example()
    rows = built(made)
    assert {Code.ROW_MISSING, Code.TOKEN_NOT_ONCE} <= codes(verify(made, rows[1:]))
    assert Code.ROW_UNEXPECTED in codes(verify(made, [*rows, rows[0]]))
    stranger = put_span(-1, call_id="b")(rows[1])
    assert {Code.ROW_UNEXPECTED, Code.ROW_MISSING} <= codes(verify(made, [rows[0], stranger, rows[2]]))
    swapped = [replace(rows[at], row_index=place) for place, at in enumerate((0, 2, 1))]
    assert Code.ROW_METADATA_DIFFERS in codes(verify(made, swapped))


def test_short_row_with_fitting_arrays_is_found() -> None:
    # A row cut at its end, with spans that fit, is not the captured sequence.
    made = example()
    rows = built(made)
    row = rows[0]
    spans = (*row.spans[:-1], replace(row.spans[-1], end=row.spans[-1].end - 1))
    rows[0] = replace(
        row, token_ids=row.token_ids[:-1], loss_mask=row.loss_mask[:-1], logprobs=row.logprobs[:-1], spans=spans
    )
    assert {Code.ROW_TOKENS_DIFFER, Code.ROW_SPANS_INVALID} <= codes(verify(made, rows))


def test_long_lists_of_calls_are_shortened() -> None:
    # A message about a long conversation stays readable.
    calls = [Call(f"c{at}", [*range(2 * at), 2 * at], [2 * at + 1]) for at in range(12)]
    made = attempt(*calls)
    chosen = [call.call_id for call in calls]
    [row] = rebuild(made.records, made.tokens, chosen, ROLLOUT).rows
    wrong = [put_span(0, call_id="c5")(row)]
    findings = verify_rows(made.records, made.tokens, chosen, wrong, rollout=ROLLOUT)
    assert any("and 4 more" in finding.message for finding in findings)


@pytest.mark.parametrize(
    ("call_id", "fields", "code"),
    [
        ("d", {"parent_call_id": "a"}, Code.ROW_LINEAGE_DIFFERS),
        ("d", {"parent_call_id": None}, Code.ROW_LINEAGE_DIFFERS),
        ("a", {"parent_call_id": "lost"}, Code.ROW_LINEAGE_DIFFERS),
        ("d", {"base_call_id": "a"}, Code.ROW_LINEAGE_DIFFERS),
        ("d", {"base_call_id": None}, Code.ROW_LINEAGE_DIFFERS),
        ("b", {"base_call_id": "e"}, Code.ROW_TOKENS_DIFFER),
        ("d", {"prompt_len": 8}, Code.ROW_LINEAGE_DIFFERS),
        ("d", {"cum_len": 7}, Code.ROW_LINEAGE_DIFFERS),
        ("d", {"chain_digest": "0"}, Code.ROW_LINEAGE_DIFFERS),
        ("b", {"chain_digest": "0"}, Code.ROW_LINEAGE_DIFFERS),
        ("b", {"sequence_digest": "0"}, Code.ROW_TOKENS_DIFFER),
        ("d", {"logprobs_digest": "0"}, Code.ROW_LOGPROBS_DIFFER),
        ("e", {"model": "other"}, Code.ROW_LINEAGE_DIFFERS),
        ("a", {"weight_versions": ()}, Code.ROW_LINEAGE_DIFFERS),
        ("a", {"weight_versions": (WeightSpan("7", 0, 9),)}, Code.TOKENS_UNUSABLE),
        ("c", {"finish_reason": "length"}, Code.ROW_METADATA_DIFFERS),
        ("c", {"usable": False}, Code.TOKENS_UNUSABLE),
    ],
)
def test_every_change_of_a_record_is_found(call_id: str, fields: dict[str, Any], code: Code) -> None:
    # Rows are proved by the capture; a capture that was changed proves nothing.
    made = example()
    rows = built(made)
    made.change(call_id, **fields)
    assert code in codes(verify(made, rows))


@pytest.mark.parametrize(
    ("name", "at", "value", "code"),
    [
        ("ids_T", 0, 99, Code.ROW_TOKENS_DIFFER),
        ("mask_T", 0, 1, Code.ROW_MASK_DIFFERS),
        ("mask_T", 2, 0, Code.ROW_MASK_DIFFERS),
        ("logprobs_T", 0, -1.0, Code.ROW_LOGPROBS_DIFFER),
        ("logprobs_T", 2, -7.0, Code.ROW_LOGPROBS_DIFFER),
        ("logprobs_T", 2, float("inf"), Code.ROW_LOGPROBS_DIFFER),
    ],
)
def test_every_change_of_a_delta_is_found(name: str, at: int, value: float, code: Code) -> None:
    # A flipped bit in storage must not be trained, nor blamed on the rows.
    made = example()
    rows = built(made)
    array = getattr(made.tokens["a"], name).copy()
    array[at] = value
    made.change_tokens("a", **{name: array})
    assert code in codes(verify(made, rows))


def test_changed_extras_are_found() -> None:
    # Router choices are evidence like the ids.
    made = example()
    rows = built(made)
    made.change_tokens("c", extras={"experts": np.array([1, 2, 4])})
    assert {Code.ROW_LINEAGE_DIFFERS, Code.ROW_METADATA_DIFFERS} <= codes(verify(made, rows))


def test_records_without_digests_are_checked_by_their_tokens() -> None:
    # Imported captures carry no digests; their rows can still be checked.
    made = example()
    rows = built(made)
    for call_id in "abcde":
        made.change(call_id, sequence_digest=None, logprobs_digest=None, chain_digest=None)
    assert verify(made, rows) == ()
    assert verify(made, [put("token_ids", 0, 9)(rows[0]), *rows[1:]])


def test_refused_rollouts_have_no_rows() -> None:
    # All or nothing: what cannot be rebuilt gives no row, and none may lie in a file.
    made = attempt(Call("a", [1], []))
    assert verify_rows(made.records, made.tokens, ["a"], [], rollout=ROLLOUT) == ()
    rows = built(example())
    found = verify_rows(made.records, made.tokens, ["a"], rows, rollout=ROLLOUT)
    assert codes(found) == {Code.NOTHING_TO_TRAIN, Code.ROW_UNEXPECTED}
    assert len(found) == 1 + len(rows)


@given(call_forests(), st.data())
def test_rows_of_any_history_pass_and_changes_are_found(calls: list[Call], data: st.DataObject) -> None:
    # Rebuilding and checking must agree on every history.
    made = attempt(*calls, whole=data.draw(st.booleans()))
    selected = data.draw(st.lists(st.sampled_from([call.call_id for call in calls]), min_size=1, unique=True))
    mode = data.draw(st.sampled_from(list(RowMode)))
    try:
        rows = list(rebuild(made.records, made.tokens, selected, ROLLOUT, mode=mode).rows)
    except ReconstructionError:
        return

    def check(rows: list[Row]) -> tuple[Finding, ...]:
        return verify_rows(made.records, made.tokens, selected, rows, rollout=ROLLOUT, mode=mode)

    assert check(rows) == ()
    number = data.draw(st.integers(0, len(rows) - 1))
    at = data.draw(st.integers(0, rows[number].token_ids.size - 1))
    name = data.draw(st.sampled_from(["token_ids", "loss_mask", "logprobs"]))
    changed = put(name, at, getattr(rows[number], name)[at] + 1)(rows[number])
    assert check([*rows[:number], changed, *rows[number + 1 :]])


# ---- conservation ------------------------------------------------------------------------------------------


def test_every_sampled_token_is_accounted_for() -> None:
    # The funnel of a run must add up, or somebody's tokens got lost.
    made = example()
    report = conservation(made.records, built(made), {"b": Code.NOT_RETURNED})
    assert (report.sampled, report.trained, report.unexplained) == (7, 6, 0)
    assert report.excluded == {Code.NOT_RETURNED: 1}
    b = next(call for call in report.calls if call.call_id == "b")
    assert (b.sampled, b.trained, b.excluded, b.reason) == (1, 0, 1, Code.NOT_RETURNED)


def test_unexplained_tokens_are_counted() -> None:
    # Neither a token without a reason nor one trained twice may balance out.
    made = example()
    rows = built(made)
    assert conservation(made.records, rows, {}).unexplained == 1
    twice = conservation(made.records, [*rows, rows[2]], {"b": Code.NOT_RETURNED, "e": Code.LOST})
    assert twice.unexplained == 1
