"""The tokenizer of the scripted engine: text to ids and back, with the control tokens of ChatML.

Invariant: the ids of a text are the ids of its pieces between control tokens, in order; so pieces are tokenised once,
however often a conversation is rendered. Text is NFC-normalised on the way in, as Qwen's tokenizer does; control-token
text anywhere becomes the control token.

Not here: how the vocabulary was made (train), what a conversation looks like (template).
"""

from __future__ import annotations

import re
import unicodedata
from base64 import b64decode
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Final

import tiktoken

from gristmill.scripted.train import PATTERN

__all__ = ["CONTROL_TOKENS", "END_OF_TURN", "SKIPPED", "Tokenizer", "the_tokenizer"]

END_OF_TURN: Final = "<|im_end|>"

CONTROL_TOKENS: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    END_OF_TURN,
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""In the order of their ids, which follow the last rank of the vocabulary."""

SKIPPED: Final = frozenset({"<|endoftext|>", "<|im_start|>", END_OF_TURN})
"""Control tokens that are left out of decoded text; the others are text to the parsers."""

_VOCABULARY: Final = "vocabulary.txt"
_CACHED_PIECES: Final = 2048
_PIECES: Final = re.compile("(" + "|".join(map(re.escape, CONTROL_TOKENS)) + ")")


class Tokenizer:
    """A byte-level BPE tokenizer.

    Args:
        merged: tokens of more than one byte by rank, after the 256 single bytes.
    """

    def __init__(self, merged: Sequence[bytes]) -> None:
        by_rank = [*(bytes([byte]) for byte in range(256)), *merged]
        self._ranks = {token: rank for rank, token in enumerate(by_rank)}
        self._control = {text: len(by_rank) + number for number, text in enumerate(CONTROL_TOKENS)}
        self._bytes = [*by_rank, *(text.encode() for text in CONTROL_TOKENS)]
        self._skipped = frozenset(self._control[text] for text in SKIPPED)
        self._encoding = tiktoken.Encoding(
            "gristmill-scripted", pat_str=PATTERN, mergeable_ranks=self._ranks, special_tokens=self._control
        )
        self._encode_piece = lru_cache(_CACHED_PIECES)(self._encode_plain)

    @property
    def size(self) -> int:
        """How many ids there are; the largest is one less."""
        return len(self._bytes)

    def control(self, text: str) -> int:
        """Return the id of a control token."""
        return self._control[text]

    def is_control(self, token_id: int) -> bool:
        """Say whether an id is that of a control token."""
        return token_id >= len(self._ranks)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = []
        for piece in _PIECES.split(text):
            known = self._control.get(piece)
            if known is not None:
                ids.append(known)
            elif piece:
                ids.extend(self._encode_piece(piece))
        return ids

    def _encode_plain(self, piece: str) -> tuple[int, ...]:
        if not unicodedata.is_normalized("NFC", piece):
            piece = unicodedata.normalize("NFC", piece)
        return tuple(self._encoding.encode_ordinary(piece))

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of one token."""
        return self._bytes[token_id]

    def halves(self, token_id: int) -> list[tuple[int, int]]:
        """Return the pairs of ids that spell the same bytes as one id, none for a control token."""
        if self.is_control(token_id):
            return []
        whole = self._bytes[token_id]
        divided = ((self._ranks.get(whole[:at]), self._ranks.get(whole[at:])) for at in range(1, len(whole)))
        return [(left, right) for left, right in divided if left is not None and right is not None]

    def is_skipped(self, token_id: int) -> bool:
        """Say whether an id is left out of decoded text."""
        return token_id in self._skipped

    def decode(self, ids: Iterable[int], *, skip: bool = False) -> str:
        """Return the text of ids; bytes that are not UTF-8 come out as U+FFFD.

        Args:
            ids: tokens.
            skip: leave out what is no text: begin and end of turns, end of text.
        """
        kept = (token for token in ids if not (skip and token in self._skipped))
        return b"".join(map(self._bytes.__getitem__, kept)).decode("utf-8", "replace")


@lru_cache(1)
def the_tokenizer() -> Tokenizer:
    """Return the tokenizer with the vocabulary that ships with the package."""
    text = files(__name__.rpartition(".")[0]).joinpath("data", _VOCABULARY).read_text(encoding="ascii")
    return Tokenizer([b64decode(line) for line in text.splitlines() if not line.startswith("#")])
