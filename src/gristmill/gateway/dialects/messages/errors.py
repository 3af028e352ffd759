"""Errors in the words of the Messages dialect: HTTP status to error type, as a body and as an event.

Invariant: what a client cannot repair by sending less is never an `invalid_request_error`.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from gristmill.gateway.front import JsonObject

__all__ = ["error_body", "error_type"]

_TYPES: Final = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.PAYMENT_REQUIRED: "billing_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
    529: "overloaded_error",
}


def error_type(status: int) -> str:
    """Name the type that this dialect gives to an HTTP status."""
    return _TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")


def error_body(status: int, message: str, code: str | None = None) -> JsonObject:
    """Make the body of an error; `code` is ours, beside what the dialect knows."""
    error = {"type": error_type(status), "message": message}
    return {"type": "error", "error": error if code is None else {**error, "code": code}}
