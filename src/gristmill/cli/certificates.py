"""How the prompt of every usable call relates to the call that it continues, and what forks cost.

Invariant: certificates are those of reconstruction; a call whose tokens contradict its record has none, and takes no
other call with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gristmill.errors import ReconstructionError
from gristmill.reconstruction import Certificate, Relation, build_forest
from gristmill.records import CallRecord, Capture

__all__ = ["certificates", "paid_again", "turn_text"]


def certificates(capture: Capture) -> dict[str, Certificate]:
    """Certify every usable call that sampled something and has a recorded parent."""
    usable = [
        record.model_call_id for record in capture.records if record.usable and record.cum_len > record.prompt_len
    ]
    usable = list(dict.fromkeys(usable))
    if not usable:
        return {}
    try:
        return _certified(capture, usable)
    except ReconstructionError:
        # Some tokens contradict their record: each call for itself then.
        found: dict[str, Certificate] = {}
        for call_id in usable:
            try:
                found |= _certified(capture, [call_id])
            except ReconstructionError:
                continue
        return found


def _certified(capture: Capture, call_ids: Iterable[str]) -> dict[str, Certificate]:
    forest = build_forest(capture.records, capture.tokens, list(call_ids))
    return {call_id: call.certificate for call_id, call in forest.calls.items() if call.certificate is not None}


def paid_again(certificate: Certificate, records: Mapping[str, CallRecord], call_id: str) -> int:
    """Count the context tokens that stand once more in a row of their own because a prompt forked.

    Had the prompt begun with its parent's whole sequence, so many of its tokens would have been there already.
    """
    parent = records.get(certificate.parent_call_id)
    if certificate.relation is not Relation.FORKED or parent is None:
        return 0
    return min(records[call_id].prompt_len, parent.cum_len)


def turn_text(certificate: Certificate | None) -> str:
    """Say a certificate in a few words; nothing for a call that continues none."""
    if certificate is None:
        return ""
    if certificate.relation is not Relation.FORKED:
        return str(certificate.relation) if certificate.relation is Relation.EXACT else "tokens of its parent unknown"
    place = "" if certificate.position is None else f" at {certificate.position}"
    return f"forked: {certificate.cause}{place}"
