"""Rows: every sampled token once, in its own context, with its own log-probability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill import reconstruction
from gristmill.errors import Code, ReconstructionError
from gristmill.reconstruction import (
    DriftCause,
    Rebuilt,
    Relation,
    Row,
    RowMode,
    SpanRole,
    build_forest,
    flatten,
    merged,
    rebuild,
    row_id_of,
    tree,
)
from gristmill.records import LogprobsMode, MediaSpan, Sampling, WeightSpan
from tests.reconstruction.attempts import ROLLOUT, Attempt, Call, attempt, call_forests, chain, logprobs_of


def rows_of(
    made: Attempt, selected: Sequence[str] | None = None, mode: RowMode = RowMode.MERGED, **facts: Any
) -> Rebuilt:
    chosen = [record.model_call_id for record in made.records] if selected is None else selected
    rollout = msgspec.structs.replace(ROLLOUT, **facts)
    return rebuild(made.records, made.tokens, chosen, rollout, mode=mode)


def calls_in(row: Row) -> list[str]:
    return list(dict.fromkeys(span.call_id for span in row.spans))


def plain(row: Row) -> tuple[list[str], list[int], list[int], list[float]]:
    logprobs = [round(float(value), 4) for value in row.logprobs]
    return calls_in(row), row.token_ids.tolist(), row.loss_mask.tolist(), logprobs


# ---- public faults -----------------------------------------------------------------------------------------


def test_filtered_parent_does_not_drag_its_subtree_away() -> None:
    # NVIDIA-NeMo/Gym#2180: c1 sampled nothing and is filtered out; c2 and c3 carry complete prompts and lose nothing.
    made = attempt(
        Call("c1", [1, 2], []),
        Call("c2", [1, 2], [3, 4], [-0.1, -0.2], parent="c1"),
        Call("c3", [1, 2, 3, 4, 5], [6], [-0.3], parent="c2"),
    )
    [row] = rows_of(made, ["c2", "c3"]).rows
    expected = (["c2", "c3"], [1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1], [0, 0, -0.1, -0.2, 0, -0.3])
    assert plain(row) == expected


def test_separator_tokens_between_turns_are_kept() -> None:
    # verl-project/verl#6921: token 198 comes from the next captured prompt; a local template would lose it.
    made = attempt(
        Call("c1", [1, 2], [3, 151645], [-0.1, -0.2]),
        Call("c2", [1, 2, 3, 151645, 198, 40, 41], [42, 151645], [-0.3, -0.4], parent="c1"),
    )
    [row] = rows_of(made).rows
    assert row.token_ids.tolist() == [1, 2, 3, 151645, 198, 40, 41, 42, 151645]
    assert row.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 1]


def test_sampled_stop_token_is_trained_once() -> None:
    # radixark/miles#784: 99 ends the reply and begins the next turn; sampled, so it stands once and is trained.
    made = attempt(
        Call("c1", [1, 2], [10, 11, 99], [-0.1, -0.2, -0.3]),
        Call("c2", [1, 2, 10, 11, 99, 50, 51], [12, 98], [-0.4, -0.5], parent="c1"),
    )
    [row] = rows_of(made).rows
    assert row.token_ids.tolist() == [1, 2, 10, 11, 99, 50, 51, 12, 98]
    assert row.loss_mask.tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert plain(row)[3] == [0, 0, -0.1, -0.2, -0.3, 0, 0, -0.4, -0.5]


def test_no_end_token_is_made_up() -> None:
    # NovaSky-AI/SkyRL#758: cut before an end token; none is appended, trained or given a log-probability.
    [row] = rows_of(attempt(Call("c1", [1, 5], [6, 7], [-0.4, -0.5]))).rows
    assert plain(row) == (["c1"], [1, 5, 6, 7], [0, 0, 1, 1], [0, 0, -0.4, -0.5])


def test_dropped_reasoning_costs_a_row_and_no_token() -> None:
    # THUDM/slime#2288: both calls belong to the rollout; two exact rows, and the split is counted.
    made = attempt(
        Call("c1", [1, 2], [60, 61, 62, 3], [-0.1, -0.1, -0.1, -0.2]),
        Call("c2", [1, 2, 3, 40], [63, 42], [-0.3, -0.4], parent="c1"),
    )
    rebuilt = rows_of(made)
    assert [plain(row) for row in rebuilt.rows] == [
        (["c1"], [1, 2, 60, 61, 62, 3], [0, 0, 1, 1, 1, 1], [0, 0, -0.1, -0.1, -0.1, -0.2]),
        (["c2"], [1, 2, 3, 40, 63, 42], [0, 0, 0, 0, 1, 1], [0, 0, 0, 0, -0.3, -0.4]),
    ]
    assert rebuilt.forks == {DriftCause.UNKNOWN: 1}
    certificate = rebuilt.rows[1].spans[0].certificate
    assert certificate is not None
    assert (certificate.relation, certificate.position) == (Relation.FORKED, 2)
    assert (rebuilt.context_tokens, rebuilt.trained_tokens) == (6, 6)


def test_calls_with_other_media_are_not_merged() -> None:
    # areal-project/AReaL#1606: one placeholder became three; the second prompt is another context.
    made = attempt(
        Call("c1", [1, 500, 2], [3], fields={"media": (MediaSpan("sha:aa", 1, 1),)}),
        Call("c2", [1, 500, 500, 500, 2, 3, 4], [5], parent="c1", fields={"media": (MediaSpan("sha:aa", 1, 3),)}),
    )
    first, second = rows_of(made).rows
    assert (calls_in(first), calls_in(second)) == (["c1"], ["c2"])
    assert first.extras.media == (MediaSpan("sha:aa", 1, 1),)
    assert second.extras.media == (MediaSpan("sha:aa", 1, 3),)


def test_one_token_is_trained_and_none_is_reported() -> None:
    # thinking-machines-lab/tinker-cookbook#848: one token makes a row, none is reported.
    made = attempt(Call("c1", [1, 2], [151643], [-4.0]), Call("c2", [1, 3], []))
    rebuilt = rows_of(made)
    assert [plain(row) for row in rebuilt.rows] == [(["c1"], [1, 2, 151643], [0, 0, 1], [0, 0, -4.0])]
    assert rebuilt.empty == ("c2",)


# ---- fields ------------------------------------------------------------------------------------------------


def test_all_exports_exist() -> None:
    # The public names are what the docs and other packages import.
    assert [name for name in reconstruction.__all__ if not hasattr(reconstruction, name)] == []
    assert sorted(reconstruction.__all__) == reconstruction.__all__


def test_a_shared_turn_is_trained_in_the_first_row_only() -> None:
    # A branch point trained twice would weigh twice in the loss.
    made = attempt(
        Call("a", [1], [2]),
        Call("b", [1, 2, 3], [4], parent="a"),
        Call("c", [1, 2, 5], [6, 7], parent="a"),
    )
    first, second = rows_of(made).rows
    assert (first.loss_mask.tolist(), second.loss_mask.tolist()) == ([0, 1, 0, 1], [0, 0, 0, 1, 1])
    assert second.logprobs[1] == 0.0
    elsewhere = second.spans[1]
    assert (elsewhere.role, elsewhere.owner) == (SpanRole.SAMPLED_ELSEWHERE, first.row_id)
    assert (first.loss_weight, second.loss_weight) == (0.5, 0.5)
    assert [(row.row_index, row.row_count) for row in (first, second)] == [(0, 2), (1, 2)]


def test_rows_follow_the_selection_order() -> None:
    # The priority that a policy gives to roots and paths is the order of the rows.
    made = attempt(Call("a", [1], [2]), Call("x", [9], [8]), Call("b", [1, 2, 3], [4]), Call("c", [1, 2, 5], [6]))
    ends = [[calls_in(row)[-1] for row in rows_of(made, order).rows] for order in ("abxc", "xcba", "cbax")]
    assert ends == [["b", "c", "x"], ["x", "c", "b"], ["c", "b", "x"]]


def test_row_carries_what_it_is_told() -> None:
    # A missing reward stays missing; it is never 0, and no advantage is invented.
    made = attempt(*chain(2))
    [row] = rows_of(made, reward=None, group_id=None).rows
    assert (row.reward, row.advantage, row.group_id, row.loss_weight) == (None, None, None, 1.0)
    [row] = rows_of(made, advantage=-0.5).rows
    assert (row.rollout_id, row.attempt, row.group_id, row.reward, row.advantage) == ("r1", 0, "g1", 1.0, -0.5)
    assert (row.prompt_len, row.truncated, row.finish_reason) == (3, False, "stop")


def test_a_length_stop_marks_its_row() -> None:
    # Trainers that filter cut-off rows must see them, wherever in the row the cut was.
    calls = chain(2)
    calls[0].fields = {"finish_reason": "max_tokens"}
    [row] = rows_of(attempt(*calls)).rows
    assert (row.truncated, row.finish_reason) == (True, "stop")


def test_spans_name_weights_mode_and_temperature() -> None:
    # Off-policy correction needs to know which weights and which distribution gave each log-probability.
    fields = {
        "weight_versions": (WeightSpan("7", 1, 1), WeightSpan("7", 1, 3), WeightSpan("8", 3, 4)),
        "sampling": Sampling(temperature=1, logprobs_mode=LogprobsMode.RAW),
    }
    [row] = rows_of(attempt(Call("a", [1, 2], [3, 4, 5, 6, 7], fields=fields))).rows
    got = [(span.start, span.end, span.role, span.weight_version) for span in row.spans]
    assert got == [
        (0, 2, SpanRole.CONTEXT, None),
        (2, 3, SpanRole.SAMPLED, None),
        (3, 5, SpanRole.SAMPLED, "7"),
        (5, 6, SpanRole.SAMPLED, "8"),
        (6, 7, SpanRole.SAMPLED, None),
    ]
    assert (row.spans[1].logprobs_mode, row.spans[0].logprobs_mode) == (LogprobsMode.RAW, None)
    # A temperature read back from a file is a float; the id must not depend on that.
    assert isinstance(row.spans[1].temperature, float)
    assert row_id_of(row, RowMode.MERGED) == row.row_id


@pytest.mark.parametrize("spans", [[(0, 3)], [(1, 2), (0, 1)], [(2, 1)], [(0, 2), (1, 2)]])
def test_contradicting_weight_versions_are_refused(spans: list[tuple[int, int]]) -> None:
    # A token under two versions has none that can be trusted.
    fields = {"weight_versions": tuple(WeightSpan("7", *span) for span in spans)}
    with pytest.raises(ReconstructionError, match="weight versions") as caught:
        rows_of(attempt(Call("a", [1], [2, 3], fields=fields)))
    assert (caught.value.code, caught.value.where) == (Code.TOKENS_UNUSABLE, "call=a")


def test_certificate_stands_on_the_first_span_of_a_call() -> None:
    # Readers find it by call id, also where a call adds no context of its own.
    made = attempt(Call("a", [1], [2]), Call("b", [1, 2], [3], parent="a"))
    [row] = rows_of(made).rows
    assert [span.certificate is not None for span in row.spans] == [False, False, True]


def test_extras_keep_their_place_and_type() -> None:
    # Router choices that cannot be aligned with their tokens are worth nothing.
    experts = np.arange(6, dtype=np.int16).reshape(3, 2)
    made = attempt(
        Call("z", [1], [2], extras={"experts": experts[:2]}),
        Call("a", [1, 2, 3], [4], parent="z", extras={"experts": experts[1:], "also": np.array([1.5])}),
        Call("b", [7], [8]),
    )
    first, second = rows_of(made, ["a", "b"]).rows
    assert [(item.name, item.call_id, item.start) for item in first.extras.arrays] == [
        ("experts", "z", 0),
        ("also", "a", 2),
        ("experts", "a", 2),
    ]
    assert first.extras.arrays[2].values.tolist() == [[2, 3], [4, 5]]
    assert first.extras.arrays[2].values.dtype == np.int16
    assert second.extras.arrays == ()


def test_row_id_is_of_the_content() -> None:
    # The same row has the same id in every run; reward, weight and place in the file do not change it.
    made = attempt(*chain(2))
    [row] = rows_of(made).rows
    [again] = rows_of(attempt(*chain(2), whole=True), reward=9.0, group_id="other").rows
    assert row.row_id == again.row_id
    assert len(row.row_id) == 32
    [other_attempt] = rows_of(made, attempt=1).rows
    [other_rollout] = rows_of(made, rollout_id="r2").rows
    per_call = rows_of(made, ["c0"], RowMode.PER_CALL).rows[0]
    alone = rows_of(made, ["c0"]).rows[0]
    ids = {row.row_id, other_attempt.row_id, other_rollout.row_id, per_call.row_id, alone.row_id}
    assert len(ids) == 5


def test_per_call_rows_are_complete_prompts() -> None:
    # Trainers that take one call a row get each call with its whole context.
    first, second = rows_of(attempt(*chain(2)), mode=RowMode.PER_CALL).rows
    assert (first.token_ids.size, second.token_ids.size) == (6, 12)
    assert second.loss_mask.tolist() == [0] * 9 + [1] * 3
    assert (second.prompt_len, second.loss_weight) == (9, 0.5)


def test_tree_shares_context_and_trains_each_generation_once() -> None:
    # Tree attention pays for each distinct token once; a system prompt of many calls is one segment.
    system = list(range(20))
    made = attempt(
        Call("a", [*system, 50], [60, 61]),
        Call("b", [*system, 51], [62]),
        Call("c", [*system, 50], [63]),
        Call("d", [*system, 50, 60, 61, 70], [64], parent="a"),
        Call("e", [*system[:10], 52], [65]),
    )
    rebuilt = rows_of(made, mode=RowMode.TREE)
    assert rebuilt.tree is not None
    assert rebuilt.tree.token_ids.size == 20 + 3 + 1 + 6
    segments = rebuilt.tree.segments
    owned = [segment.call_id for segment in segments if segment.owned]
    assert sorted(filter(None, owned)) == ["a", "b", "c", "d", "e"]
    for number, segment in enumerate(segments):
        assert segment.parent < number
        before = segments[segment.parent] if segment.parent >= 0 else None
        assert segment.position == (before.position + before.length if before else 0)
    assert [row.row_id for row in rebuilt.rows] == [row.row_id for row in rows_of(made).rows]


# ---- invariants --------------------------------------------------------------------------------------------


def as_bytes(row: Row) -> bytes:
    """Everything of a row that can be compared."""
    arrays = [(array.dtype.str, array.tolist()) for array in (row.token_ids, row.loss_mask, row.logprobs)]
    rest = [
        getattr(row, name)
        for name in row.__struct_fields__
        if name not in ("token_ids", "loss_mask", "logprobs", "extras")
    ]
    return msgspec.json.encode((arrays, rest, row.extras.media))


@given(call_forests(), st.data())
def test_invariants_of_rows(calls: list[Call], data: st.DataObject) -> None:
    # The promises of the rows, on histories with forks, shared prefixes, equal sequences and empty replies.
    by_id = {call.call_id: call for call in calls}
    made = attempt(*calls)
    selected = data.draw(st.lists(st.sampled_from(list(by_id)), min_size=1, unique=True))
    sampled = [call_id for call_id in selected if by_id[call_id].generation]
    if not sampled:
        return
    forest = build_forest(made.records, made.tokens, selected)
    rows = merged(forest, ROLLOUT)
    trained: list[str] = []
    for row in rows:
        end = 0
        for span in row.spans:
            # Spans tile the row, and say the truth about every token in it.
            assert (span.start, span.start < span.end) == (end, True)
            end = span.end
            mask, nats = row.loss_mask[span.start : span.end], row.logprobs[span.start : span.end]
            call = by_id[span.call_id]
            if span.role is SpanRole.SAMPLED:
                # Exact context, own log-probability: the row up to here is prompt and generation as captured.
                assert row.token_ids[: span.end].tolist() == [*call.prompt, *call.generation]
                assert mask.all()
                assert nats.tolist() == np.array(logprobs_of(call), np.float32).tolist()
                trained.append(span.call_id)
            else:
                assert not mask.any()
                assert not nats.any()
        assert end == row.token_ids.size
        assert row_id_of(row, RowMode.MERGED) == row.row_id
    # Once, and none lost.
    assert sorted(trained) == sorted(sampled)
    assert math.isclose(sum(row.loss_weight for row in rows), 1.0)
    assert len({row.row_id for row in rows}) == len(rows)
    # However stored, in whatever order, as a tree or not: the same rows.
    whole = attempt(*calls, whole=True)
    shuffled = data.draw(st.permutations(whole.records))
    again = merged(build_forest(shuffled, whole.tokens, selected), ROLLOUT)
    flat = flatten(tree(forest, ROLLOUT))
    assert [as_bytes(row) for row in rows] == [as_bytes(row) for row in again] == [as_bytes(row) for row in flat]
    singles = rows_of(made, selected, RowMode.PER_CALL).rows
    assert sum(int(row.loss_mask.sum()) for row in singles) == sum(int(row.loss_mask.sum()) for row in rows)
