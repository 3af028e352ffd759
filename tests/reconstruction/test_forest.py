"""The token tree: who shares a row with whom is proved on ids, whatever the links and the storage say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.errors import Code, ReconstructionError
from gristmill.reconstruction import DriftCause, Forest, Relation, build_forest
from gristmill.records import CallRecord, MediaSpan
from tests.reconstruction.attempts import Attempt, Call, attempt, call_forests, chain


def forest_of(made: Attempt, selected: list[str] | None = None) -> Forest:
    chosen = [record.model_call_id for record in made.records] if selected is None else selected
    return build_forest(made.records, made.tokens, chosen)


def parents(forest: Forest) -> dict[str, str | None]:
    return {call_id: call.parent for call_id, call in forest.calls.items()}


def test_a_conversation_is_one_path() -> None:
    # An ordinary agent run must give one row, not one per turn.
    forest = forest_of(attempt(*chain(4)))
    assert parents(forest) == {"c0": None, "c1": "c0", "c2": "c1", "c3": "c2"}
    [leaf] = forest.leaves()
    assert [call.record.model_call_id for call in forest.path(leaf)] == ["c0", "c1", "c2", "c3"]


def test_unselected_ancestors_are_only_inside_prompts() -> None:
    # A turn that the harness threw away must not cost the turns that continue it.
    forest = forest_of(attempt(*chain(4)), ["c0", "c3"])
    assert parents(forest) == {"c0": None, "c3": "c0"}
    assert parents(forest_of(attempt(*chain(4)), ["c3"])) == {"c3": None}


def test_longest_prefix_wins_over_the_recorded_parent() -> None:
    # A wrong link must not repeat context that one row can hold.
    calls = chain(3)
    calls[2].parent = "c0"
    assert parents(forest_of(attempt(*calls)))["c2"] == "c1"


def test_equal_sequences_do_not_collapse() -> None:
    # Two samples of one prompt that came out equal are both trained; the child continues the recorded one.
    twins = [Call("b", [1], [2]), Call("a", [1], [2])]
    forest = forest_of(attempt(*twins, Call("c", [1, 2, 3], [4], parent="b")))
    assert parents(forest) == {"b": None, "a": None, "c": "b"}
    assert [leaf.record.model_call_id for leaf in forest.leaves()] == ["a", "c"]
    forest = forest_of(attempt(*twins, Call("c", [1, 2, 3], [4], parent="x")))
    assert parents(forest)["c"] == "a"


def test_parent_may_be_committed_later() -> None:
    # Parallel calls commit in any order; the rows must not depend on it.
    made = attempt(Call("late", [1, 2, 3], [4]), Call("early", [1], [2]))
    assert parents(forest_of(made)) == {"late": "early", "early": None}


def test_empty_generations_are_set_aside() -> None:
    # A reply without tokens makes no row, is reported, and takes nothing with it.
    made = attempt(Call("c1", [1, 2], []), Call("c2", [1, 2], [3, 4], parent="c1"))
    forest = forest_of(made)
    assert forest.empty == ("c1",)
    assert parents(forest) == {"c2": None}


def test_nothing_to_train_is_refused() -> None:
    # An attempt of empty replies is one refusal that names them, not an empty row.
    with pytest.raises(ReconstructionError) as caught:
        forest_of(attempt(Call("c1", [1], [])))
    assert caught.value.code is Code.NOTHING_TO_TRAIN
    assert caught.value.evidence == {"empty_generation": ["c1"]}


@pytest.mark.parametrize("field", ["model", "tokenizer", "adapter"])
def test_another_model_forks(field: str) -> None:
    # Tokens of another model or adapter are not the context under which this policy sampled.
    calls = chain(2)
    calls[1].fields = {field: "other"}
    forest = forest_of(attempt(*calls))
    assert parents(forest)["c1"] is None
    assert forest.calls["c1"].fork is DriftCause.MODEL_CHANGED
    calls[0].fields = {field: "other"}
    assert parents(forest_of(attempt(*calls)))["c1"] == "c0"


IMAGE = MediaSpan(digest="sha:aa", offset=1, length=1)


@pytest.mark.parametrize(
    ("media", "forks"),
    [
        ((IMAGE,), False),
        ((IMAGE, MediaSpan(digest="sha:bb", offset=6, length=1)), False),
        ((MediaSpan(digest="sha:bb", offset=1, length=1),), True),
        ((MediaSpan(digest="sha:aa", offset=2, length=1),), True),
        ((MediaSpan(digest="sha:aa", offset=1, length=2),), True),
        ((IMAGE, MediaSpan(digest="sha:bb", offset=5, length=2)), True),
        ((), True),
    ],
)
def test_media_over_the_prefix_must_be_equal(media: tuple[MediaSpan, ...], forks: bool) -> None:
    # Equal placeholder ids with another image are another context.
    calls = chain(2)
    calls[0].fields = {"media": (IMAGE,)}
    calls[1].fields = {"media": media}
    call = forest_of(attempt(*calls)).calls["c1"]
    assert (call.parent is None) == forks
    assert call.fork is (DriftCause.MEDIA_CHANGED if forks else None)


def test_a_compatible_call_of_equal_tokens_is_preferred() -> None:
    # Of two calls with equal ids, the one under the same model may carry the row on.
    made = attempt(
        Call("a", [1], [2], fields={"model": "x"}),
        Call("b", [1], [2], fields={"model": "y"}),
        Call("c", [1, 2, 3], [4], fields={"model": "y"}),
    )
    call = forest_of(made).calls["c"]
    assert (call.parent, call.fork) == ("b", None)


@pytest.mark.parametrize(
    ("fields", "arrays", "match"),
    [
        ({"usable": False, "unusable_reason": Code.LOGPROB_NOT_FINITE}, {}, "logprob_not_finite"),
        ({"usable": False}, {}, "a record without"),
        ({"prev_len": 5}, {}, "prev_len 5"),
        ({"sequence_digest": "0"}, {}, "sequence_digest"),
        ({"logprobs_digest": "0"}, {}, "logprobs_digest"),
        ({}, {"ids_T": np.array([10, 11, 13, 1010, 1011, 1012], np.int32)}, "sequence_digest"),
    ],
)
def test_contradicting_tokens_are_refused(fields: dict[str, Any], arrays: dict[str, Any], match: str) -> None:
    # A damaged record or delta costs this rollout, names the call, and never gives a wrong row.
    made = attempt(*chain(3))
    made.change("c1", **fields)
    made.change_tokens("c1", **arrays)
    with pytest.raises(ReconstructionError, match=match) as caught:
        forest_of(made)
    assert caught.value.code is Code.TOKENS_UNUSABLE
    assert caught.value.where == "call=c1"


def test_unknown_and_repeated_calls_are_refused() -> None:
    # A selection that does not fit the capture must not be rebuilt in part.
    made = attempt(*chain(2))
    with pytest.raises(ReconstructionError, match="got none"):
        forest_of(made, ["c0", "x"])
    with pytest.raises(ReconstructionError, match="2 times") as caught:
        forest_of(made, ["c0", "c1", "c0"])
    assert caught.value.code is Code.SELECTION_DUPLICATED


def test_bases_in_a_circle_are_refused() -> None:
    # A damaged store must not hang a build.
    made = attempt(Call("a", [1], [2]), Call("b", [1], [2]))
    made.tokens = dict.fromkeys("ab", made.tokens["a"])
    made.records = [
        CallRecord(
            model_call_id=name, response_id=name, base_call_id=base, usable=True, delta_len=2,
            prev_len=2, prompt_len=3, cum_len=4,
        )
        for name, base in (("a", "b"), ("b", "a"))
    ]  # fmt: skip
    with pytest.raises(ReconstructionError, match="base of 4"):
        forest_of(made)
    made.tokens = {
        name: type(delta)(delta.ids_T[:0], delta.mask_T[:0], delta.logprobs_T[:0])
        for name, delta in made.tokens.items()
    }
    for name in "ab":
        made.change(name, delta_len=0, prev_len=2, prompt_len=2, cum_len=2)
    with pytest.raises(ReconstructionError, match="cycle"):
        forest_of(made)


def test_a_broken_parent_only_costs_the_certificate() -> None:
    # An unselected call with damaged tokens is no reason to lose the selected ones.
    calls = chain(2)
    made = attempt(*calls, whole=True)
    made.change("c0", sequence_digest="0")
    certificate = forest_of(made, ["c1"]).calls["c1"].certificate
    assert certificate is not None
    assert certificate.relation is Relation.UNKNOWN


def test_many_calls_on_one_lane_are_found() -> None:
    # Long conversations of which few turns are selected still find their nearest selected turn.
    made = attempt(*chain(40))
    chosen = [f"c{number}" for number in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 25, 39)]
    forest = forest_of(made, chosen)
    assert parents(forest) == dict(zip(chosen, [None, *chosen], strict=False))
    unselected_trunk = [
        *chain(12),
        *(Call(f"leaf{number}", [*range(3), 1000, 1001, 1002, 500 + number], [1]) for number in range(3)),
    ]
    forest = forest_of(attempt(*unselected_trunk), ["leaf0", "leaf1", "leaf2"])
    assert set(parents(forest).values()) == {None}


def brute_parent(made: Attempt, selected: list[str], call_id: str) -> str | None:
    """The rule, said plainly over whole sequences."""
    prompt, _ = made.sequences[call_id]
    record = made.record(call_id)
    fits = [
        other
        for other in selected
        if made.sequences[other][1] and made.whole(other) == prompt[: made.record(other).cum_len]
    ]
    longest = max((made.record(other).cum_len for other in fits), default=0)
    candidates = sorted(
        other for other in fits if made.record(other).cum_len == longest and made.record(other).model == record.model
    )
    if record.parent_call_id in candidates:
        return record.parent_call_id
    return candidates[0] if candidates else None


@given(call_forests(), st.booleans(), st.data())
def test_token_parents_are_the_brute_force_ones(calls: list[Call], whole: bool, data: st.DataObject) -> None:
    # Rows must follow from the captured ids alone, not from how they were stored or ordered.
    made = attempt(*calls, whole=whole)
    selected = data.draw(st.lists(st.sampled_from([call.call_id for call in calls]), min_size=1, unique=True))
    sampled = [call_id for call_id in selected if made.sequences[call_id][1]]
    records = data.draw(st.permutations(made.records))
    if not sampled:
        with pytest.raises(ReconstructionError):
            build_forest(records, made.tokens, selected)
        return
    forest = build_forest(records, made.tokens, selected)
    assert list(forest.calls) == sampled
    assert forest.empty == tuple(call_id for call_id in selected if call_id not in sampled)
    for call_id in sampled:
        assert forest.calls[call_id].parent == brute_parent(made, selected, call_id)
