"""Samples a composed text: its ids, where sampling ends and why, and the text that each id adds.

Invariant: a function of text, seed and limits. The ids decode to the text; with a share of tokens split in two they are
not the ids that the text tokenises to.

Not here: log-probabilities (logprobs), the engine's parsers (parsing).
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from gristmill.scripted.logprobs import draws
from gristmill.scripted.tokenizer import END_OF_TURN, Tokenizer, the_tokenizer

__all__ = ["Limits", "Sampled", "sample"]

_CACHED: Final = 1024
_SPLIT_SALT: Final = 0x5B17


class Limits(NamedTuple):
    """What ends sampling before the text does.

    Attributes:
        most: so many ids at most.
        cut: the script ends it after so many ids; None does not.
        stop: stop strings.
        keep_stop: leave the stop string that was hit in the text.
        stop_ids: ids that end it.
        ignore_eos: go on after the end of turn: the text is sampled again and again, up to `most`.
        show_special: leave control tokens in the text, but not an end of turn that ended it.
    """

    most: int
    cut: int | None = None
    stop: tuple[str, ...] = ()
    keep_stop: bool = False
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    show_special: bool = False


class Sampled(NamedTuple):
    """What was sampled.

    Attributes:
        ids: the sampled ids, end of turn included.
        pieces: the text that becomes visible with each id; bytes of half a character wait for the rest.
        finish: `stop` or `length`.
        stop_reason: the stop string or id that was hit.
    """

    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    finish: str
    stop_reason: str | int | None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def sample(text: str, *, eos: bool, seed: int, split: float, limits: Limits) -> Sampled:
    """Sample a text.

    Args:
        text: with control tokens.
        eos: an end of turn follows.
        seed: of the split.
        split: share of the tokens that are sampled in two halves, 0 to 1.
        limits: what ends sampling earlier.
    """
    ids = _ids(text, eos, seed, split)
    if not limits.ignore_eos and limits.most >= len(ids):
        # Nearly every request has room for the whole text, whatever its own limit: one entry serves them all.
        limits = limits._replace(most=len(ids))
    return _sampled(text, eos, seed, split, limits)


@lru_cache(_CACHED)
def _ids(text: str, eos: bool, seed: int, split: float) -> tuple[int, ...]:
    tokenizer = the_tokenizer()
    ids = tokenizer.encode(text)
    if split > 0:
        ids = _divided(ids, seed, split, tokenizer)
    if eos:
        ids.append(tokenizer.control(END_OF_TURN))
    return tuple(ids)


def _divided(ids: Sequence[int], seed: int, split: float, tokenizer: Tokenizer) -> list[int]:
    drawn = draws(seed ^ _SPLIT_SALT, np.asarray(ids, dtype=np.uint64))
    chosen = (drawn >> np.uint64(40)) < int(split * (1 << 24))
    divided: list[int] = []
    values: list[int] = drawn.tolist()
    wanted: list[bool] = chosen.tolist()
    for token, value, divide in zip(ids, values, wanted, strict=True):
        halves = tokenizer.halves(token) if divide else []
        if halves:
            divided.extend(halves[value % len(halves)])
        else:
            divided.append(token)
    return divided


@lru_cache(_CACHED)
def _sampled(text: str, eos: bool, seed: int, split: float, limits: Limits) -> Sampled:
    tokenizer = the_tokenizer()
    ids = _ids(text, eos, seed, split)
    if limits.ignore_eos and ids:
        ids = (ids * (limits.most // len(ids) + 1))[: limits.most]
    finish, stop_reason = ("stop", None) if eos and not limits.ignore_eos else ("length", None)
    most = min(limits.most, limits.cut or limits.most)
    if most < len(ids):
        ids, finish = ids[:most], "length"
    hit = next((at for at, token in enumerate(ids) if token in limits.stop_ids), None)
    if hit is not None:
        ids, finish, stop_reason = ids[: hit + 1], "stop", ids[hit]
    ended_by_eos = finish == "stop" and stop_reason is None
    pieces = _pieces(ids, tokenizer, limits.show_special, ended_by_eos)
    if limits.stop:
        ids, pieces, found = _stopped(ids, pieces, limits)
        if found is not None:
            finish, stop_reason = "stop", found
    return Sampled(ids, tuple(pieces), finish, stop_reason)


def _pieces(ids: Sequence[int], tokenizer: Tokenizer, show_special: bool, ended_by_eos: bool) -> list[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces: list[str] = []
    last = len(ids) - 1
    for at, token in enumerate(ids):
        skipped = tokenizer.is_skipped(token) and (not show_special or (ended_by_eos and at == last))
        pieces.append("" if skipped else decoder.decode(tokenizer.bytes_of(token)))
    rest = decoder.decode(b"", final=True)
    if rest:
        pieces[-1] += rest
    return pieces


def _stopped(ids: tuple[int, ...], pieces: list[str], limits: Limits) -> tuple[tuple[int, ...], list[str], str | None]:
    """Cut at the first stop string, and hold back at each id what may yet become one."""
    held = max(map(len, limits.stop)) - 1
    text, end, found = "", len(ids), None
    shown = 0
    made: list[str] = []
    for at, piece in enumerate(pieces):
        before = len(text)
        text += piece
        hits = [(place, stop) for stop in limits.stop if (place := text.find(stop, max(0, before - held))) >= 0]
        if hits:
            place, found = min(hits)
            cut = place + len(found) if limits.keep_stop else place
            made.append(text[shown:cut] if cut > shown else "")
            end = at + 1
            break
        visible = len(text) if at == len(pieces) - 1 else max(shown, len(text) - held)
        made.append(text[shown:visible])
        shown = visible
    return ids[:end], made, found


def seed_of(*parts: object) -> int:
    """Make one seed of several values."""
    text = "\x00".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
