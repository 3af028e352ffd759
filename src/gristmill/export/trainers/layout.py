"""Rows as trainers cut them: prompt and response, turns, padded batches; and what no format may pass over.

Invariant: nothing is cut, moved or filled in: a row that does not fit a shape is refused, padding stands outside the
row, and a reward or an advantage that is not there, or is too large for its type, is refused, never made.

Not here: any trainer's field names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from gristmill.errors import Code, ExportError, ReconstructionError
from gristmill.export.trainers.projection import Kept
from gristmill.reconstruction import Row, SpanRole
from gristmill.records import Float32Array, Int32Array, UInt8Array

__all__ = [
    "METADATA",
    "ROUTED_EXPERTS",
    "PromptResponse",
    "Turn",
    "Versions",
    "advantage_of",
    "advantages_of",
    "as_float32",
    "by_rollout",
    "group_of",
    "gym_rollout_id",
    "joined",
    "metadata_of",
    "number_of",
    "one_reward",
    "padded",
    "prompt_response",
    "refuse_media",
    "refuse_without_prompt",
    "reward_of",
    "rewards_of",
    "rollout_number",
    "routed_experts_of",
    "turns_of",
    "versions_of",
]

METADATA: Final = "gristmill"
"""The key under which `metadata_of` a row stands in metadata that a trainer carries and does not read."""

ROUTED_EXPERTS: Final = "routed_experts"
"""The extra array that holds the experts of each token, [tokens, layers, experts of a token]."""

_number: Final = re.compile(r"[0-9]{1,18}", re.ASCII)
_names_attempt: Final = re.compile(r".*-a[0-9]+", re.ASCII | re.DOTALL)


class PromptResponse(NamedTuple):
    """A row of T tokens cut at its prompt's end P; R = T − P.

    Attributes:
        prompt_ids: int32[P].
        response_ids: int32[R], sampled tokens and what stands between them.
        response_mask: uint8[R], 1 = sampled and trained here.
        response_logprobs: float32[R] nats, 0.0 where the mask is 0.
    """

    prompt_ids: Int32Array
    response_ids: Int32Array
    response_mask: UInt8Array
    response_logprobs: Float32Array


class Turn(NamedTuple):
    """Neighbouring tokens [start, end) of a row that all are trained here, or all are not."""

    start: int
    end: int
    trained: bool


def prompt_response(row: Row) -> PromptResponse:
    """Cut a row at the end of its first selected call's prompt."""
    at = row.prompt_len
    return PromptResponse(row.token_ids[:at], row.token_ids[at:], row.loss_mask[at:], row.logprobs[at:])


def joined(
    prompt_ids: npt.ArrayLike,
    response_ids: npt.ArrayLike,
    response_mask: npt.ArrayLike,
    response_logprobs: npt.ArrayLike | None,
) -> Kept:
    """Put a row that was cut anywhere before its first trained token together again."""
    prompt, response = np.asarray(prompt_ids, np.int32), np.asarray(response_ids, np.int32)
    mask = np.concatenate([np.zeros(prompt.size, np.uint8), np.asarray(response_mask, np.uint8)])
    logprobs = None
    if response_logprobs is not None:
        tail = np.asarray(response_logprobs, np.float64).astype(np.float32)
        logprobs = np.concatenate([np.zeros(prompt.size, np.float32), tail])
    return Kept(np.concatenate([prompt, response]), mask, logprobs)


def turns_of(row: Row) -> Iterator[Turn]:
    """Cut a row wherever its spans go from one call's sampled tokens to something else.

    Two calls whose generations touch are two turns.
    """
    previous: tuple[SpanRole, str] | None = None
    start = 0
    for span in row.spans:
        key = (span.role, span.call_id if span.role is SpanRole.SAMPLED else "")
        if previous is not None and key != previous and SpanRole.SAMPLED in {key[0], previous[0]}:
            yield Turn(start, span.start, previous[0] is SpanRole.SAMPLED)
            start = span.start
        previous = key
    if previous is not None:
        yield Turn(start, row.token_ids.size, previous[0] is SpanRole.SAMPLED)


def by_rollout(rows: Iterable[Row]) -> Iterator[tuple[Row, ...]]:
    """Give the rows of one attempt after the other.

    Raises:
        ExportError: `row_missing`: rows of an attempt are apart, out of order or not all there.
    """
    held: list[Row] = []
    for row in rows:
        if held and (row.rollout_id, row.attempt) != (held[0].rollout_id, held[0].attempt):
            yield _whole(held)
            held = []
        held.append(row)
    if held:
        yield _whole(held)


def _whole(rows: Sequence[Row]) -> tuple[Row, ...]:
    expected = list(range(rows[0].row_count))
    got = [row.row_index for row in rows]
    if got != expected:
        raise ExportError(
            f"expected rows 0 to {len(expected) - 1} of rollout {rows[0].rollout_id!r} in a piece, got {got}",
            code=Code.ROW_MISSING,
            where=rows[0].rollout_id,
            hint="project all rows of a rollout together; shuffle rollouts, or shuffle afterwards",
        )
    return tuple(rows)


def padded(
    arrays: Sequence[npt.NDArray[Any]],
    width: int,
    value: float,
    *,
    side: Literal["left", "right"] = "right",
    dtype: npt.DTypeLike = np.int64,
    what: str = "row",
) -> npt.NDArray[Any]:
    """Put arrays into a matrix [B, width], padded on one side.

    Raises:
        ReconstructionError: `row_too_long`: an array does not fit; nothing is ever cut.
    """
    matrix = np.full((len(arrays), width), value, dtype)
    for index, array in enumerate(arrays):
        size = array.shape[0]
        if size > width:
            message = f"expected at most {width} tokens in {what} {index}, got {size}"
            raise ReconstructionError(Code.ROW_TOO_LONG, message, where=f"row={index}")
        begin = width - size if side == "left" else 0
        matrix[index, begin : begin + size] = array
    return matrix


def as_float32(values: npt.ArrayLike, row: Row, what: str) -> Float32Array:
    """Round rewards, advantages, temperatures or weights to the type that trainers hold them in.

    What is nearer to 0 than every float32 becomes 0.0, which is how far any other number may be rounded too.

    Args:
        values: numbers of any shape.
        row: that they belong to.
        what: they are, for the message.

    Returns:
        float32 of the same shape; all are finite.

    Raises:
        ReconstructionError: `not_expressible`: a number is not finite, or becomes infinite.
    """
    wide = np.asarray(values, np.float64)
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    beyond = wide[~np.isfinite(narrow)]
    if beyond.size:
        message = f"expected {what} of row {row.row_id} that float32 can hold, got {beyond[0]}"
        raise ReconstructionError(Code.NOT_EXPRESSIBLE, message, where=f"row={row.row_id}")
    return narrow


def reward_of(row: Row) -> float:
    """Return the reward of a row's rollout.

    Raises:
        ReconstructionError: `reward_missing`.
    """
    if row.reward is None:
        message = f"expected rollout {row.rollout_id!r} to have a reward, it has none"
        raise ReconstructionError(Code.REWARD_MISSING, message, where=f"row={row.row_id}")
    return row.reward


def one_reward(rows: Sequence[Row]) -> float:
    """Return the reward that all rows of a rollout have.

    Raises:
        ReconstructionError: `reward_missing`, `rewards_differ`.
    """
    rewards = {reward_of(row) for row in rows}
    if len(rewards) > 1:
        message = f"expected one reward for rollout {rows[0].rollout_id!r}, got {sorted(rewards)}"
        raise ReconstructionError(Code.REWARDS_DIFFER, message, where=rows[0].rollout_id)
    return rewards.pop()


def advantage_of(row: Row) -> float:
    """Return the advantage of a row's rollout.

    Raises:
        ReconstructionError: `advantage_required`.
    """
    if row.advantage is None:
        message = f"expected rollout {row.rollout_id!r} to have an advantage, it has none"
        raise ReconstructionError(Code.ADVANTAGE_REQUIRED, message, where=f"row={row.row_id}")
    return row.advantage


def advantages_of(row: Row) -> Float32Array:
    """Return the advantage of every token: a call's or span's own where one was given, else the rollout's.

    Returns:
        float32[T], 0.0 where the mask is 0.

    Raises:
        ReconstructionError: `advantage_required`: a trained token has neither; `not_expressible`: one is no float32.
    """
    known = np.full(row.token_ids.size, row.advantage is not None) | (row.loss_mask == 0)
    advantages = np.where(row.loss_mask == 1, row.advantage or 0.0, 0.0)
    for credit in row.credits:
        if credit.advantage is not None:
            known[credit.start : credit.end] = True
            advantages[credit.start : credit.end] = credit.advantage
    if not known.all():
        advantage_of(row)
    return as_float32(advantages, row, "advantages")


def routed_experts_of(row: Row) -> Int32Array | None:
    """Return the experts that each token but the last was routed to, as engines give them.

    Returns:
        int32[T − 1, layers, experts of a token]; None where they were not captured for all of these tokens.
    """
    arrays = [array for array in row.extras.arrays if array.name == ROUTED_EXPERTS]
    end = 0
    for array in arrays:
        values = array.values
        if array.start != end or values.ndim != 3 or values.dtype.kind not in "iu":
            return None
        if values.shape[1:] != arrays[0].values.shape[1:]:
            return None
        end += values.shape[0]
    wanted = row.token_ids.size - 1
    if not arrays or end not in {wanted, wanted + 1}:
        return None
    return np.concatenate([array.values for array in arrays])[:wanted].astype(np.int32)


def metadata_of(row: Row) -> dict[str, Any]:
    """Return what names a row and says what it counts, as JSON values."""
    names = ("rollout_id", "attempt", "group_id", "row_id", "row_index", "row_count", "advantage", "loss_weight")
    return {name: getattr(row, name) for name in names}


def refuse_without_prompt(row: Row, name: str) -> None:
    """Refuse a row whose first token is trained, in a format that is shifted by one: no position predicts it.

    Raises:
        ReconstructionError: `not_expressible`.
    """
    if row.loss_mask[0]:
        message = (
            f"expected a prompt before the first trained token of row {row.row_id}, got none: {name} shifts by one"
        )
        raise ReconstructionError(Code.NOT_EXPRESSIBLE, message, where=f"row={row.row_id}")


def refuse_media(row: Row, name: str) -> None:
    """Refuse a row with media in a format that has no place for them: its context would be another one.

    Raises:
        ReconstructionError: `not_expressible`.
    """
    if row.extras.media:
        message = f"expected no media in row {row.row_id}: {name} has no place for {len(row.extras.media)} of them"
        raise ReconstructionError(Code.NOT_EXPRESSIBLE, message, where=f"row={row.row_id}")


def rewards_of(rows: Sequence[Row], *, calls: bool) -> list[Float32Array]:
    """Return the reward of every token of the rows of a rollout, which stands on the last token of each row.

    Args:
        rows: all rows of the rollout.
        calls: add the rewards of calls and spans, each on the last token of its span.

    Returns:
        of each row float32[T]; its sum is what a trainer takes for the score of the rollout.

    Raises:
        ReconstructionError: `reward_missing`, `rewards_differ`; `not_expressible`: calls of a rollout of several rows
            have rewards, so that no row's sum is the score, or a reward is no float32.
    """
    reward = one_reward(rows)
    rewards: list[Float32Array] = []
    for row in rows:
        made = np.zeros(row.token_ids.size, np.float64)
        made[-1] = reward
        for credit in row.credits if calls else ():
            if credit.reward is not None and row.row_count > 1:
                message = f"expected no rewards of calls in rollout {row.rollout_id!r}: it makes {row.row_count} rows"
                raise ReconstructionError(Code.NOT_EXPRESSIBLE, message, where=f"row={row.row_id}")
            with np.errstate(over="ignore"):
                made[credit.end - 1] += credit.reward or 0.0
        rewards.append(as_float32(made, row, "rewards"))
    return rewards


def group_of(row: Row) -> str:
    """Return what a trainer groups a row by: its group or, of a rollout without one, a name that no other has."""
    if row.group_id is not None:
        return row.group_id
    return f"ungrouped-{number_of(_attempt(row))}"


def gym_rollout_id(row: Row) -> str:
    """Return the name that NeMo Gym has for an attempt: the rollout's, and `-a1` and so on where it is not the first.

    A rollout whose own name ends so gets `-a0`, since its first attempt is not the second of another rollout.
    """
    plain = not row.attempt and _names_attempt.fullmatch(row.rollout_id) is None
    return row.rollout_id if plain else f"{row.rollout_id}-a{row.attempt}"


def rollout_number(row: Row) -> int:
    """Return the number that stands for the attempt of a row."""
    return number_of(_attempt(row))


def number_of(text: str) -> int:
    """Return a number of 53 bits that stands for an id: trainers compare them, and JSON keeps them."""
    return int.from_bytes(sha256(text.encode("utf-8", "surrogatepass")).digest()[:7]) >> 3


def _attempt(row: Row) -> str:
    return f"{row.rollout_id}\0{row.attempt}"


class Versions(NamedTuple):
    """The oldest and the newest version of the weights that sampled a row."""

    oldest: int
    newest: int


def versions_of(row: Row) -> Versions | None:
    """Return the versions of the weights, where every trained token has one that is a plain number."""
    versions = {span.weight_version for span in row.spans if span.role is SpanRole.SAMPLED}
    numbers = [int(version) for version in versions if version is not None and _number.fullmatch(version)]
    return Versions(min(numbers), max(numbers)) if len(numbers) == len(versions) else None
