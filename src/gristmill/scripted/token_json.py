"""Tokens and their log-probabilities as the engines write them in JSON.

Invariant: of several log-probabilities at a position the first is that of the sampled token, whatever its rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import isnan
from typing import Any

from gristmill.scripted.asked import Logprobs
from gristmill.scripted.generation import Generation
from gristmill.scripted.logprobs import alternatives, logprobs
from gristmill.scripted.tokenizer import the_tokenizer

__all__ = ["chat_logprobs", "completions_logprobs", "prompt_logprobs", "token_text"]

JsonObject = dict[str, Any]


@lru_cache(8192)
def token_text(token: int, as_id: bool = False) -> str:
    """Return the text of one token; half a character is U+FFFD."""
    return f"token_id:{token}" if as_id else the_tokenizer().decode((token,))


@lru_cache(8192)
def _token_bytes(text: str) -> list[int]:
    return list(text.encode())


def _entry(token: int, value: float, as_id: bool, *, top: bool = False) -> JsonObject:
    text = token_text(token, as_id)
    # The sampled token's bytes stay those of its text, those of the alternatives become those of the placeholder.
    written = text if top else token_text(token)
    return {"token": text, "logprob": value, "bytes": _token_bytes(written)}


def chat_logprobs(generation: Generation, wanted: Logprobs, salt: int, wrong: str | None) -> list[JsonObject]:
    """Return one entry for each sampled id of a Chat choice.

    Args:
        generation: the choice.
        wanted: what was asked for.
        salt: tells sampling settings apart where values depend on them.
        wrong: `short` leaves out the last entry; `nan` makes the last value null, as engines write what is no number.
    """
    ids = generation.sampled.ids
    seed = generation.seed ^ salt
    values = logprobs(seed, ids)
    others = alternatives(seed, ids, max(0, wanted.top - 1), the_tokenizer().size) if wanted.top > 1 else None
    entries: list[JsonObject] = []
    for at, (token, value) in enumerate(zip(ids, values, strict=True)):
        entry = _entry(token, value, wanted.as_ids)
        tops = [_entry(token, value, wanted.as_ids, top=True)] if wanted.top else []
        if others is not None:
            ranked = zip(others[at].ids, others[at].values, strict=True)
            tops.extend(_entry(other, said, wanted.as_ids, top=True) for other, said in ranked)
        entry["top_logprobs"] = tops
        entries.append(entry)
    if wrong == "short":
        entries = entries[:-1]
    elif wrong == "nan" and entries:
        entries[-1] = {**entries[-1], "logprob": None}
    return entries


def completions_logprobs(
    ids: Sequence[int], values: Sequence[float | None], seed: int, wanted: Logprobs, offset: int
) -> JsonObject:
    """Return the arrays of a Completions choice.

    Args:
        ids: of the positions that are written, shape (T,).
        values: their log-probabilities, None where there is none (the first of a prompt), shape (T,).
        seed: of the alternatives.
        wanted: what was asked for.
        offset: length of the text before the first id, in characters.
    """
    others = alternatives(seed, ids, max(0, wanted.top - 1), the_tokenizer().size)
    made: JsonObject = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for at, (token, value) in enumerate(zip(ids, values, strict=True)):
        text = token_text(token, wanted.as_ids)
        made["text_offset"].append(offset)
        made["token_logprobs"].append(None if value is None or isnan(value) else value)
        made["tokens"].append(text)
        if value is None:
            made["top_logprobs"].append(None)
        else:
            ranked = {
                token_text(other, wanted.as_ids): said
                for other, said in zip(others[at].ids, others[at].values, strict=True)
            }
            made["top_logprobs"].append({text: made["token_logprobs"][-1], **ranked})
        offset += len(text)
    return made


def prompt_logprobs(ids: Sequence[int], seed: int, top: int) -> list[JsonObject | None]:
    """Return what the model says of a prompt: nothing at its first id, then candidates by id.

    Args:
        ids: the prompt, shape (T,).
        seed: as for what is sampled.
        top: how many candidates at each position; the prompt's own id is always one.
    """
    values = logprobs(seed, tuple(ids))
    others = alternatives(seed, ids, max(0, top - 1), the_tokenizer().size)
    said: list[JsonObject | None] = [None]
    for at in range(1, len(ids)):
        found = {ids[at]: values[at], **dict(zip(others[at].ids, others[at].values, strict=True))}
        ranked = sorted(found, key=lambda token: -found[token])
        said.append(
            {
                str(token): {"logprob": value, "rank": ranked.index(token) + 1, "decoded_token": token_text(token)}
                for token, value in found.items()
            }
        )
    return said
