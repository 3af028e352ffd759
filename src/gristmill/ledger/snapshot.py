"""The digest of a whole attempt: what a snapshot id is.

Invariant: two attempts have the same snapshot id exactly if their records, tokens, lost calls and results are equal.

Not here: when an attempt may be deleted (protocol).
"""

from __future__ import annotations

from hashlib import sha256

import msgspec

from gristmill.records import Capture, Result

__all__ = ["snapshot_id"]


def snapshot_id(capture: Capture, result: Result | None) -> str:
    """Digest an attempt: 64 hexadecimal digits."""
    digest = sha256(b"gristmill-snapshot-1\n")
    digest.update(msgspec.json.encode((capture.rollout_id, capture.attempt, capture.records, capture.lost)))
    for call_id in sorted(capture.tokens):
        delta = capture.tokens[call_id]
        for array in (delta.ids_T, delta.mask_T, delta.logprobs_T):
            data = array.tobytes()
            digest.update(f"{call_id} {array.dtype.str} {len(data)}\n".encode())
            digest.update(data)
    digest.update(msgspec.json.encode(result, enc_hook=repr))
    return digest.hexdigest()
