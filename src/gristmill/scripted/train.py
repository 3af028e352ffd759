"""Trains the vocabulary of the scripted engine's tokenizer: byte-level BPE on text of this repository.

    python -m gristmill.scripted.train --out src/gristmill/scripted/data/vocabulary.txt *.md docs/*.md docs/*/*.md

Invariant: the same texts and number of merges give the same bytes, on any machine; of pairs that are equally frequent
the one that sorts first is merged. The file names its texts' digest, so that it can be proved where it came from.

Not here: splitting text with a vocabulary (tokenizer).
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import unicodedata
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import regex

__all__ = ["PATTERN", "train", "vocabulary_text"]

PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""What is never merged across: words with the blank before them, single digits, runs of signs, line ends, blanks."""

_Pair = tuple[bytes, bytes]


class _Words:
    """The words of a text as they are split so far, and how often each pair of neighbours stands in them."""

    def __init__(self, texts: Iterable[str]) -> None:
        counted: Counter[str] = Counter()
        for text in texts:
            counted.update(regex.findall(PATTERN, unicodedata.normalize("NFC", text)))
        self._words = [
            ([bytes([byte]) for byte in word.encode()], count) for word, count in sorted(counted.items()) if word
        ]
        self.pairs: Counter[_Pair] = Counter()
        self._holders: dict[_Pair, set[int]] = {}
        for number in range(len(self._words)):
            self._count(number, 1)

    def _count(self, number: int, sign: int) -> None:
        parts, count = self._words[number]
        for pair in pairwise(parts):
            self.pairs[pair] += sign * count
            if sign > 0:
                self._holders.setdefault(pair, set()).add(number)
            elif self.pairs[pair] <= 0:
                del self.pairs[pair]

    def merge(self, pair: _Pair) -> None:
        """Replace the pair by its concatenation wherever it stands."""
        for number in sorted(self._holders.pop(pair, ())):
            parts, count = self._words[number]
            self._count(number, -1)
            self._words[number] = (_merged(parts, pair), count)
            self._count(number, 1)


def _merged(parts: Sequence[bytes], pair: _Pair) -> list[bytes]:
    merged: list[bytes] = []
    at = 0
    while at < len(parts):
        if at + 1 < len(parts) and (parts[at], parts[at + 1]) == pair:
            merged.append(parts[at] + parts[at + 1])
            at += 2
        else:
            merged.append(parts[at])
            at += 1
    return merged


def train(texts: Iterable[str], merges: int) -> list[bytes]:
    """Return the merged tokens in the order in which they were found, the 256 single bytes left out.

    Args:
        texts: what to learn from.
        merges: how many tokens to find at most; a text that runs out of pairs that stand twice gives fewer.
    """
    words = _Words(texts)
    found: list[bytes] = []
    known = {bytes([byte]) for byte in range(256)}
    while len(found) < merges and words.pairs:
        pair, count = min(words.pairs.items(), key=lambda item: (-item[1], item[0]))
        if count < 2:
            break
        words.merge(pair)
        token = pair[0] + pair[1]
        if token not in known:  # two pairs may give the same bytes
            known.add(token)
            found.append(token)
    return found


def vocabulary_text(tokens: Sequence[bytes], digest: str, sources: int) -> str:
    """Write a vocabulary: where it came from, then one token a line in base64, in the order of their ranks."""
    lines = [
        "# byte-level BPE: the 256 single bytes, then these tokens by rank; made by gristmill.scripted.train",
        f"# merges={len(tokens)} texts={sources} sha256={digest}",
        *(b64encode(token).decode() for token in tokens),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Train on the named files, which are sorted, and write the vocabulary."""
    parser = argparse.ArgumentParser(prog="python -m gristmill.scripted.train", description="Train the vocabulary.")
    parser.add_argument("--merges", type=int, default=3000)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("texts", type=Path, nargs="+")
    given = parser.parse_args(arguments)
    texts = [path.read_text(encoding="utf-8") for path in sorted(given.texts)]
    digest = hashlib.sha256("\x00".join(texts).encode()).hexdigest()
    tokens = train(texts, given.merges)
    given.out.write_text(vocabulary_text(tokens, digest, len(texts)), encoding="utf-8")
    sys.stderr.write(f"{len(tokens)} tokens from {len(texts)} texts\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
