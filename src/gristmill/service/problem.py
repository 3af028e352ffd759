"""Errors of the admin API: every code has one HTTP status, every answer the same four members.

Invariant: a body says `code`, `message`, `where` and `hint`, and never repeats a key or anything else that a header
held.

Not here: errors in a dialect's shape, which harnesses get (gateway).
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from gristmill.errors import Code, GristmillError, Refusal
from gristmill.gateway.front import RequestRefused

__all__ = ["Problem", "problem_of"]

_STATUS: Final = {
    Code.KEY_MISSING: 401,
    Code.KEY_UNKNOWN: 401,
    Code.KEY_FORBIDDEN: 403,
    Code.HOST_REFUSED: 403,
    Code.ROUTE_UNKNOWN: 404,
    Code.ROLLOUT_UNKNOWN: 404,
    Code.CALL_UNKNOWN: 404,
    Code.KEY_EXISTS: 409,
    Code.ATTEMPT_CLOSED: 409,
    Code.ATTEMPT_DIFFERS: 409,
    Code.ATTEMPT_ELSEWHERE: 409,
    Code.BODY_TOO_LARGE: 413,
    Code.REQUEST_MALFORMED: 400,
    Code.OPTION_INVALID: 400,
    Code.PARAMETER_REFUSED: 400,
    Code.FILE_MALFORMED: 400,
    Code.POLICY_UNKNOWN: 400,
    Code.POLICY_OPTION_INVALID: 400,
    Code.GATEWAY_BUSY: 503,
    Code.DISK_LOW: 503,
    Code.LEDGER_BUSY: 503,
    Code.LEDGER_FULL: 503,
    Code.LEDGER_CLOSED: 503,
    Code.LEDGER_UNREACHABLE: 503,
    Code.LEASE_EXPIRED: 503,
}


class Problem(NamedTuple):
    """An error as it is answered."""

    status: int
    code: Code
    message: str
    where: str | None = None
    hint: str | None = None

    def body(self) -> bytes:
        """Write the answer's body."""
        told: dict[str, Any] = {
            "code": str(self.code),
            "message": self.message,
            "where": self.where,
            "hint": self.hint,
        }
        return json.dumps({"error": told}).encode()


def problem_of(error: GristmillError | RequestRefused | Refusal) -> Problem:
    """Read an error of ours; a code without a status of its own is a fault of the server, a refused rollout 422."""
    if isinstance(error, RequestRefused):
        return Problem(error.status, error.code, error.message, error.where)
    if isinstance(error, Refusal):
        return Problem(422, error.code, error.message, error.where)
    return Problem(_STATUS.get(error.code, 500), error.code, error.message, error.where, error.hint)
