"""Certificates: where a prompt leaves the tokens it continues, and only causes that are proved."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from gristmill.reconstruction import Certificate, DriftCause, Relation, build_forest, fork_counts
from gristmill.reconstruction.drift import Decode
from gristmill.records import (
    ItemKind,
    MediaSpan,
    OutputItem,
    ParentResolution,
    Purpose,
    PurposeLabel,
)
from tests.reconstruction.attempts import Call, attempt, call_forests

REASONED = {"output_items": (OutputItem(ItemKind.REASONING, "f1"), OutputItem(ItemKind.TEXT, "f2"))}
RESOLVED = {"parent_resolution": ParentResolution.RESOLVED}


def certificate(
    prompt: list[int],
    parent: dict[str, Any] | None = None,
    call: dict[str, Any] | None = None,
    *,
    first: tuple[list[int], list[int]] = ([1, 2], [60, 61, 62, 3]),
    decode: Decode | None = None,
) -> Certificate:
    """Certify a call with this prompt that continues a call with prompt and generation `first`."""
    made = attempt(Call("p", *first, fields=parent or {}), Call("c", prompt, [9], parent="p", fields=call or {}))
    found = build_forest(made.records, made.tokens, ["c"], decode=decode).calls["c"].certificate
    assert found is not None
    return found


def test_an_extension_is_exact() -> None:
    # The usual turn must not be counted as drift; the parent need not be selected.
    assert certificate([1, 2, 60, 61, 62, 3, 4]) == Certificate(Relation.EXACT, "p")


def test_a_fork_shows_place_and_ids() -> None:
    # An engineer must see where the template went another way.
    found = certificate([1, 2, 60, 7, 8])
    assert (found.relation, found.position, found.cause) == (Relation.FORKED, 3, DriftCause.UNKNOWN)
    assert (found.parent_ids, found.call_ids) == ((1, 2, 60, 61, 62, 3), (1, 2, 60, 7, 8))
    shorter = certificate([1, 2, 60])
    assert (shorter.position, shorter.call_ids) == (3, (1, 2, 60))


def test_windows_are_sixteen_ids_each_way() -> None:
    # Windows stay small in rows of any length, and never show the call's own generation.
    first = (list(range(100)), [500, 501])
    found = certificate([*range(50), 7, *range(20)], first=first)
    assert found.position == 50
    assert found.parent_ids == tuple(range(34, 66))
    assert found.call_ids == (*range(34, 50), 7, *range(15))


def test_without_parent_or_its_tokens_nothing_is_claimed() -> None:
    # A root has no certificate; a parent that was not captured gives none of the two answers.
    made = attempt(Call("a", [1], [2]), Call("b", [1, 2], [3], parent="lost"))
    forest = build_forest(made.records, made.tokens, ["a", "b"])
    assert forest.calls["a"].certificate is None
    assert forest.calls["b"].certificate == Certificate(Relation.UNKNOWN, "lost")


def test_another_model_forks_even_with_equal_tokens() -> None:
    # A model swap inside a conversation must be visible although the ids go on.
    found = certificate([1, 2, 60, 61, 62, 3, 4], {"model": "a"}, {"model": "b"})
    assert found == Certificate(Relation.FORKED, "p", cause=DriftCause.MODEL_CHANGED)
    assert certificate([1, 5], {"adapter": "a"}).cause is DriftCause.MODEL_CHANGED


def span(digest: str, offset: int, length: int = 1) -> MediaSpan:
    return MediaSpan(digest=digest, offset=offset, length=length)


@pytest.mark.parametrize(
    ("parent", "call", "position"),
    [
        ((span("a", 1),), (span("b", 1),), 1),
        ((span("a", 1),), (), 1),
        ((), (span("a", 0),), 0),
        ((span("a", 0), span("b", 1)), (span("a", 0), span("c", 1)), 1),
    ],
)
def test_other_media_at_equal_tokens_fork(
    parent: tuple[MediaSpan, ...], call: tuple[MediaSpan, ...], position: int
) -> None:
    # Placeholder ids do not tell images apart; their digests do, and the place is shown.
    found = certificate([1, 2, 60, 61, 62, 3, 4], {"media": parent}, {"media": call})
    assert (found.cause, found.position) == (DriftCause.MEDIA_CHANGED, position)


def test_other_placeholder_count_is_a_media_change() -> None:
    # An image that grows from one placeholder to three is the cause of the fork behind it.
    found = certificate(
        [1, 500, 500, 500, 2, 3],
        {"media": (span("a", 1),)},
        {"media": (span("a", 1, 3),)},
        first=([1, 500, 2], [3]),
    )
    assert (found.cause, found.position) == (DriftCause.MEDIA_CHANGED, 2)
    behind = certificate([1, 7, 500], {"media": (span("a", 4),)}, {"media": (span("a", 2),)})
    assert behind.cause is DriftCause.UNKNOWN


@pytest.mark.parametrize(
    ("parent", "call", "cause"),
    [
        ({"system_digest": "a"}, {"system_digest": "b"}, DriftCause.SYSTEM_CHANGED),
        ({"system_digest": "a"}, {}, DriftCause.UNKNOWN),
        ({}, {"system_digest": "b"}, DriftCause.UNKNOWN),
        ({"system_digest": "a"}, {"system_digest": "a"}, DriftCause.UNKNOWN),
        ({"tools_digest": "a"}, {"tools_digest": "b"}, DriftCause.TOOLS_CHANGED),
        ({}, {"purpose": Purpose(PurposeLabel.COMPACTION)}, DriftCause.COMPACTED),
        ({"purpose": Purpose(PurposeLabel.COMPACTION)}, {}, DriftCause.COMPACTED),
        ({"finish_reason": "length"}, {}, DriftCause.TRUNCATED),
    ],
)
def test_causes_that_records_prove(parent: dict[str, Any], call: dict[str, Any], cause: DriftCause) -> None:
    # A cause is a claim about somebody's template or harness: no evidence, no claim.
    assert certificate([1, 2, 60, 7], parent, call).cause is cause


def test_truncation_explains_only_what_lies_behind_the_prompt() -> None:
    # A length stop cannot have changed the prompt before it.
    assert certificate([1, 5], {"finish_reason": "length"}).cause is DriftCause.UNKNOWN


def test_template_drops_earlier_reasoning() -> None:
    # The most common drift of reasoning models is named, so that the split rows can be explained.
    found = certificate([1, 2, 3, 40], REASONED, RESOLVED)
    assert (found.cause, found.position) == (DriftCause.REASONING_DROPPED, 2)


def test_reasoning_dropped_by_the_digest_without_it() -> None:
    # A request that is the parent's conversation without its reasoning proves it whatever the ids look like.
    digests = {"continuation_digest": "full", "continuation_digest_bare": "bare"}
    found = certificate([1, 2, 8], REASONED | digests, {"context_digest": "bare"})
    assert found.cause is DriftCause.REASONING_DROPPED
    same = {"continuation_digest": "bare", "continuation_digest_bare": "bare"}
    assert certificate([1, 2, 8], REASONED | same, {"context_digest": "bare"}).cause is DriftCause.UNKNOWN


@pytest.mark.parametrize(
    ("prompt", "parent", "call"),
    [
        ([1, 2, 3, 40], {}, RESOLVED),
        ([1, 2, 3, 40], REASONED, {}),
        ([1, 2, 62, 40], REASONED, RESOLVED),
        ([1, 2, 8, 3, 40], REASONED, RESOLVED),
        ([1, 2], REASONED, RESOLVED),
    ],
)
def test_reasoning_is_not_blamed_without_proof(prompt: list[int], parent: dict[str, Any], call: dict[str, Any]) -> None:
    # No reasoning, no proved link, or other ids behind it: something else may have happened.
    assert certificate(prompt, parent, call).cause is DriftCause.UNKNOWN


TEXT = {1: "<", 2: ">", 60: "he", 61: "llo", 62: "!", 3: "\n", 70: "hel", 71: "lo", 72: "lo?", 80: "\ufffd"}


def decode(ids: Any) -> str:
    return "".join(TEXT[token] for token in ids)


def test_retokenised_needs_a_tokenizer_and_equal_text() -> None:
    # Re-tokenised history is a harness fault that costs rows; an edit is not the same fault.
    assert certificate([1, 2, 70, 71, 62, 3, 1], decode=decode).cause is DriftCause.RETOKENISED
    assert certificate([1, 2, 70, 71, 62, 3, 1]).cause is DriftCause.UNKNOWN
    assert certificate([1, 2, 70, 72, 3], decode=decode).cause is DriftCause.UNKNOWN
    broken = certificate([1, 2, 80, 3], first=([1, 2], [80]), decode=decode)
    assert broken.relation is Relation.EXACT
    twice = certificate([1, 2, 80, 3, 3], first=([1, 2], [80, 61]), decode=lambda ids: "\ufffd" * len(ids))
    assert twice.cause is DriftCause.UNKNOWN


def test_forks_are_counted_by_cause() -> None:
    # A run shows what costs it rows.
    exact = Certificate(Relation.EXACT, "p")
    fork = Certificate(Relation.FORKED, "p", cause=DriftCause.TRUNCATED)
    assert fork_counts([None, exact, fork, fork]) == {DriftCause.TRUNCATED: 2}


@given(call_forests())
def test_certificates_agree_with_the_whole_sequences(calls: list[Call]) -> None:
    # The fork position is the one that a plain comparison finds, for any history and storage.
    for whole in (False, True):
        made = attempt(*calls, whole=whole)
        chosen = [call_id for call_id, (_, generation) in made.sequences.items() if generation]
        if not chosen:
            return
        for call_id, call in build_forest(made.records, made.tokens, chosen).calls.items():
            parent_id = call.record.parent_call_id
            if parent_id is None:
                assert call.certificate is None
                continue
            assert call.certificate is not None
            before = made.whole(parent_id)
            prompt = made.sequences[call_id][0]
            if prompt[: len(before)] == before:
                other_model = made.record(parent_id).model != call.record.model
                assert call.certificate.relation is (Relation.FORKED if other_model else Relation.EXACT)
                continue
            at = next((at for at, pair in enumerate(zip(before, prompt, strict=False)) if len(set(pair)) > 1), None)
            position = min(len(before), len(prompt)) if at is None else at
            assert call.certificate.position == position
            low, high = max(0, position - 16), position + 16
            assert call.certificate.parent_ids == tuple(before[low:high])
            assert call.certificate.call_ids == tuple(prompt[low:high])
