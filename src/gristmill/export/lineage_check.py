"""Checks of a capture itself: lengths, digests and bases of its tokens, and the recorded parents.

Invariant: a parent is contradicted only by evidence: an id that was never captured, a request that continues
exactly one other call, or that continues no captured call at all. Where requests or digests are absent nothing is
said.

Not here: rows (check).
"""

from __future__ import annotations

from collections.abc import Iterator

from gristmill.errors import Code, SelectionError
from gristmill.lineage import LineageIndex, ParentLink, RequestDigests, request_digests
from gristmill.reconstruction import Finding, verify_capture
from gristmill.records import CallRecord, Capture, ParentResolution

__all__ = ["check_capture"]

_DIGESTS = RequestDigests.__struct_fields__


def check_capture(capture: Capture) -> Iterator[Finding]:
    """Find what a capture contradicts in itself."""
    by_id = {record.model_call_id: record for record in capture.records}
    yield from verify_capture(by_id, capture.tokens, list(capture.tokens))
    yield from _bases(capture)
    yield from _parents(capture)


def _bases(capture: Capture) -> Iterator[Finding]:
    """A usable call has tokens; one without a base stands alone."""
    for record in capture.records:
        if record.usable and record.model_call_id not in capture.tokens:
            yield _finding(record, "expected the tokens of a usable call, got none", Code.ROW_TOKENS_DIFFER)


def _parents(capture: Capture) -> Iterator[Finding]:
    known = {record.model_call_id for record in capture.records} | {call.model_call_id for call in capture.lost}
    recorded = any(record.parent_call_id is not None for record in capture.records)
    index = LineageIndex()
    for record in capture.records:
        parent = record.parent_call_id
        if parent is not None and parent not in known:
            yield _finding(record, f"expected its parent {parent!r} to be a captured or a lost call, it is neither")
        elif record.context_digest is not None:
            yield from _against_request(capture, record, index, recorded)
        digests = RequestDigests(**{name: getattr(record, name) for name in _DIGESTS})
        index.add(record.model_call_id, digests, record.delivery)


def _against_request(capture: Capture, record: CallRecord, index: LineageIndex, recorded: bool) -> Iterator[Finding]:
    """Compare digests and parent of a call with its request, where that was kept."""
    exchange = capture.exchanges.get(record.model_call_id)
    if exchange is None or exchange.request is None:
        return
    try:
        link = index.parent_of(exchange.request)
    except SelectionError:
        return
    computed = request_digests(exchange.request, ())
    for name in ("context_digest", "system_digest", "tools_digest"):
        stated, found = getattr(record, name), getattr(computed, name)
        if stated is not None and found is not None and stated != found:
            yield _finding(record, f"expected {name} {found} of its request, got {stated}")
    problem = _problem(record, link, recorded, {call.model_call_id for call in capture.lost})
    if problem is not None:
        yield _finding(record, problem)


def _problem(record: CallRecord, link: ParentLink, recorded: bool, lost: set[str]) -> str | None:
    """Say how a recorded parent contradicts the call that its request continues."""
    parent = record.parent_call_id
    if parent in lost:
        return None
    if link.resolution is ParentResolution.RESOLVED and parent != link.parent_call_id:
        # Captures that record no parent at all contradict nothing.
        if parent is None and not recorded:
            return None
        return f"expected parent {link.parent_call_id!r}, the call that its request continues, got {parent!r}"
    if parent is None:
        return None
    if link.resolution is ParentResolution.AMBIGUOUS and parent not in link.candidates:
        return f"expected one of {', '.join(link.candidates)} as parent, got {parent!r}"
    if link.resolution is ParentResolution.ROOT:
        return f"expected no parent, since its request holds no captured reply, got {parent!r}"
    return None


def _finding(record: CallRecord, message: str, code: Code = Code.ROW_LINEAGE_DIFFERS) -> Finding:
    return Finding(code, f"call={record.model_call_id}", f"{record.model_call_id}: {message}")
