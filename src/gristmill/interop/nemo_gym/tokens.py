"""NeMo Gym's tokens of a call made whole: suffixes joined to the sequences they continue, digests compared.

Invariant: a sequence is given only where all its tokens are at hand and every digest that stands beside them is
theirs; a suffix whose parent is not there, and tokens that do not have their digest, are refused.

Not here: whether tokens may be trained (tokens.check_tokens) and what else a record says (reading).
"""

from __future__ import annotations

from hashlib import sha256
from struct import error as StructError
from struct import pack
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from gristmill.canonical import JsonValue
from gristmill.captures.fields import JsonObject, count_at, list_at, name_at, number, text_at
from gristmill.captures.reply import Unexpected
from gristmill.errors import Code, DecodeError

__all__ = ["Sequences", "Tokens", "check_schema"]

_ENTRY_SCHEMA: Final = 1
_STAGED_SCHEMA: Final = 2
_IDS: Final = ("prompt_token_ids", "generation_token_ids")


class Tokens(NamedTuple):
    """A call's tokens as they stand in JSON, None where they do not: whole prompt, generation, log-probabilities."""

    prompt: list[JsonValue] | None
    generation: list[JsonValue] | None
    logprobs: list[JsonValue] | None


def check_schema(line: JsonObject, newest: int, place: str) -> None:
    """Refuse a record of a newer form than is known.

    Raises:
        DecodeError: `schema_unsupported`.
    """
    stated = count_at(line, "schema_version", "$")
    if stated is not None and stated > newest:
        message = f"expected schema_version {newest} or older, got {stated}"
        raise DecodeError(message, code=Code.SCHEMA_UNSUPPORTED, where=place)


class Sequences:
    """The whole token sequences of one rollout's calls so far, by call id."""

    def __init__(self) -> None:
        self._ids: dict[str, list[JsonValue]] = {}

    def entry(self, line: JsonObject, call_id: str, place: str) -> Tokens:
        """Take a token record.

        Raises:
            Unexpected: ids are missing, its parent is not there, or the tokens do not have its digest or length.
            DecodeError: `schema_unsupported`.
        """
        check_schema(line, _ENTRY_SCHEMA, place)
        prompt, generation = (list_at(line, key, "$") for key in _IDS)
        logprobs = list_at(line, "generation_log_probs", "$")
        if prompt is None or generation is None:
            return Tokens(prompt, generation, logprobs)
        if line.get("prompt_is_delta") is True:
            prompt = [*self._parent(line), *prompt]
        whole = [*prompt, *generation]
        _check_length(whole, count_at(line, "cum_len", "$"))
        _check_digest(whole, name_at(line, "digest", "$"), _entry_digest, "$.digest")
        self._ids[call_id] = whole
        return Tokens(prompt, generation, logprobs)

    def staged(self, line: JsonObject, row: JsonObject | None, call_id: str, place: str) -> Tokens:
        """Take a staged call, and compare it with its line of the manifest.

        Raises:
            Unexpected: as `entry`; the mask is not a prompt followed by a generation; the manifest says otherwise.
            DecodeError: `schema_unsupported`.
        """
        check_schema(line, _STAGED_SCHEMA, place)
        if row is not None:
            for key in ("parent_call_id", "prev_len", "delta_len", "cum_len", "cumulative_hash", "digest"):
                if key in row and row[key] != line.get(key):
                    raise Unexpected(f"{key} {row[key]!r}, as the manifest says", repr(line.get(key)), f"$.{key}")
        delta = list_at(line, "token_ids_delta", "$") or []
        masks = [number(mask) for mask in list_at(line, "token_mask_delta", "$") or []]
        logprobs = list_at(line, "generation_log_probs_delta", "$") or []
        if not len(delta) == len(masks) == len(logprobs):
            counts = f"{len(delta)}, {len(masks)} and {len(logprobs)}"
            raise Unexpected("as many ids as mask values and log-probabilities", counts, "$.token_ids_delta")
        begin = masks.index(1.0) if 1.0 in masks else len(masks)
        if any(mask != 0.0 for mask in masks[:begin]) or any(mask != 1.0 for mask in masks[begin:]):
            raise Unexpected("a mask of zeros and then ones", "another order or value", "$.token_mask_delta")
        carried = self._parent(line) if line.get("parent_call_id") is not None else []
        if len(carried) != (count_at(line, "prev_len", "$") or 0):
            raise Unexpected(f"prev_len {len(carried)}, as its parent is long", str(line.get("prev_len")), "$.prev_len")
        whole = [*carried, *delta]
        _check_length(whole, count_at(line, "cum_len", "$"))
        _check_digest(whole, name_at(line, "cumulative_hash", "$"), _prefix_digest, "$.cumulative_hash")
        _check_staged(line, logprobs, masks)
        self._ids[call_id] = whole
        return Tokens(whole[: len(carried) + begin], delta[begin:], logprobs[begin:])

    def _parent(self, line: JsonObject) -> list[JsonValue]:
        parent = name_at(line, "parent_call_id", "$")
        if parent is None or parent not in self._ids:
            told = "none" if parent is None else f"{parent!r}, which does not stand before it"
            raise Unexpected("the call that its tokens continue", told, "$.parent_call_id")
        return self._ids[parent]


def _check_length(whole: list[JsonValue], stated: int | None) -> None:
    if stated is not None and stated != len(whole):
        raise Unexpected(f"cum_len {len(whole)}, as many as there are tokens", str(stated), "$.cum_len")


def _check_digest(whole: list[JsonValue], stated: str | None, digest: Any, where: str) -> None:
    """Compare a digest; ids that no digest is of are left to the check of tokens."""
    ids = _encoded(whole)
    if stated is not None and ids is not None and stated != digest(ids):
        raise Unexpected(f"tokens of digest {stated}", f"tokens of digest {digest(ids)}", where)


def _encoded(ids: list[JsonValue]) -> bytes | None:
    """Write ids as their number and themselves, unsigned and big-endian; None where one is no such number."""
    if not all(type(token) is int and 0 <= token < 1 << 63 for token in ids):
        return None
    return pack(">Q", len(ids)) + np.asarray(cast("list[int]", ids), ">u8").tobytes()


def _entry_digest(ids: bytes) -> str:
    # Of no token at all its digest is that of the domain.
    return sha256(b"nemo-gym-tokens" + (b"\x01" + ids if len(ids) > 8 else b"")).hexdigest()


def _prefix_digest(ids: bytes) -> str:
    return sha256(b"nemo-gym-staging-prefix-v2" + ids).hexdigest()


def _check_staged(line: JsonObject, logprobs: list[JsonValue], masks: list[float]) -> None:
    """Compare the digest over everything that a staged call says but its extras."""
    stated, ids = name_at(line, "digest", "$"), _encoded(list_at(line, "token_ids_delta", "$") or [])
    with np.errstate(over="ignore"):
        values = np.asarray([number(value) for value in logprobs]).astype(">f4")
    if stated is None or ids is None or not np.isfinite(values).all():
        return
    try:
        parts = _staged_parts(line, ids, np.asarray(masks, ">f4"), values)
    except StructError as error:
        raise Unexpected("versions and lengths that fit their digest", str(error), "$") from error
    made = sha256(b"nemo-gym-staging-call-v2" + b"".join(parts)).hexdigest()
    if made != stated:
        raise Unexpected(f"a call of digest {stated}", f"one of digest {made}", "$.digest")


def _staged_parts(
    line: JsonObject, ids: bytes, masks: npt.NDArray[np.float32], logprobs: npt.NDArray[np.float32]
) -> list[bytes]:
    versions = [count_at(line, key, "$") or 0 for key in ("schema_version", "digest_version", "extras_digest_version")]
    parent = text_at(line, "parent_call_id", "$")
    return [
        pack(">BBB", *versions),
        _text(text_at(line, "rollout_id", "$") or ""),
        _text(text_at(line, "model_call_id", "$") or ""),
        b"\x00" if parent is None else b"\x01" + _text(parent),
        _text(text_at(line, "mode", "$") or ""),
        *(pack(">Q", count_at(line, key, "$") or 0) for key in ("prev_len", "delta_len", "cum_len", "weight_version")),
        _sized(ids),
        _sized(pack(">Q", masks.size) + masks.tobytes()),
        _sized(pack(">Q", logprobs.size) + logprobs.tobytes()),
        _hex(line, "extras_digest"),
        b"\x01" + _hex(line, "chain_hash"),
        b"\x01" + _hex(line, "cumulative_hash"),
    ]


def _sized(data: bytes) -> bytes:
    return pack(">Q", len(data)) + data


def _text(text: str) -> bytes:
    return _sized(text.encode("utf-8", "surrogatepass"))


def _hex(line: JsonObject, key: str) -> bytes:
    try:
        return bytes.fromhex(text_at(line, key, "$") or "")
    except ValueError as error:
        raise Unexpected("a digest in hexadecimal digits", repr(line.get(key)), f"$.{key}") from error
