"""How errors leave the command line: `error:` and `hint:` for people, one JSON document for programs, an exit code.

Invariant: every error has a code of the closed set, and every code one exit code.

Not here: where errors come from, and the boundary that catches them (app).
"""

from __future__ import annotations

import sys
from typing import Final, NamedTuple

import click

from gristmill.cli.visible import visible
from gristmill.errors import Code, GristmillError

__all__ = [
    "DATA_FAILED",
    "Failure",
    "exit_code_of",
    "failure_of",
    "internal_failure",
    "interrupted",
    "memory_failure",
    "print_failure",
    "usage_failure",
]

DATA_FAILED: Final = 1
"""Exit code: every rollout was rejected, a finding, or a case that differs."""

_USAGE: Final = frozenset(
    {
        Code.USAGE,
        Code.OPTION_INVALID,
        Code.ROLLOUT_UNKNOWN,
        Code.CALL_UNKNOWN,
        Code.POLICY_UNKNOWN,
        Code.POLICY_LOAD_FAILED,
        Code.POLICY_NOT_CALLABLE,
        Code.POLICY_OPTION_INVALID,
    }
)
_ENVIRONMENT: Final = frozenset(
    {
        Code.FILE_UNREADABLE,
        Code.OUTPUT_EXISTS,
        Code.SCHEMA_UNSUPPORTED,
        Code.LEDGER_LOCKED,
        Code.LEDGER_FOREIGN,
        Code.LEDGER_READ_ONLY,
        Code.LEDGER_NETWORK_FILE_SYSTEM,
        Code.LEDGER_FULL,
        Code.LEDGER_WRITE_FAILED,
        Code.LEDGER_DAMAGED,
        Code.LEDGER_BUSY,
        Code.LEDGER_CLOSED,
        Code.LEDGER_UNREACHABLE,
        Code.LEASE_EXPIRED,
        Code.ATTEMPT_ELSEWHERE,
        Code.KEY_MISSING,
        Code.KEY_UNKNOWN,
        Code.KEY_FORBIDDEN,
        Code.HOST_REFUSED,
        Code.GATEWAY_BUSY,
        Code.DISK_LOW,
        Code.NOT_DURABLE,
        Code.ENGINE_UNREACHABLE,
        Code.ENGINE_LOST,
        Code.WORKER_LOST,
        Code.MEMORY_EXHAUSTED,
        Code.INTERNAL,
    }
)


class Failure(NamedTuple):
    """An error as it is told."""

    code: Code
    message: str
    where: str | None = None
    hint: str | None = None


def exit_code_of(code: Code) -> int:
    """Return the exit code that an error of this code ends the command with."""
    if code is Code.INTERRUPTED:
        return 130
    if code in _USAGE:
        return 2
    return 3 if code in _ENVIRONMENT else DATA_FAILED


def failure_of(error: GristmillError | OSError) -> Failure:
    """Read an error of ours, or of the operating system."""
    if isinstance(error, GristmillError):
        return Failure(error.code, error.message, error.where, error.hint)
    place = error.filename
    where = place if isinstance(place, str) else None
    return Failure(Code.FILE_UNREADABLE, f"cannot read or write: {error.strerror or error}", where)


def usage_failure(error: click.ClickException) -> Failure:
    """Read an error of the command line's own parser."""
    message = error.format_message().rstrip(".")
    context = error.ctx if isinstance(error, click.UsageError) else None
    path = "gristmill" if context is None else context.command_path
    return Failure(Code.USAGE, message[:1].lower() + message[1:], None, f"see {path} --help")


def interrupted() -> Failure:
    """Return the failure of a command that was interrupted."""
    return Failure(Code.INTERRUPTED, "interrupted")


def memory_failure() -> Failure:
    """Return the failure of a command that got no more memory."""
    hint = "free memory or raise its limit, and run it again; several processes (--jobs) take more than one"
    return Failure(Code.MEMORY_EXHAUSTED, "expected more memory, there is none left", None, hint)


def internal_failure(error: BaseException, debug_variable: str) -> Failure:
    """Return the failure of a bug."""
    return Failure(
        Code.INTERNAL,
        f"internal: {type(error).__name__}: {error}",
        None,
        f"this is a bug in Gristmill, please report it; {debug_variable}=1 shows the traceback",
    )


def _without_passwords(failure: Failure) -> Failure:
    if not any(told and ":/" in told and "@" in told for told in failure[1:]):
        return failure
    from gristmill.ledger.address import without_passwords

    where, hint = (told and without_passwords(told) for told in (failure.where, failure.hint))
    return Failure(failure.code, without_passwords(failure.message), where, hint)


def print_failure(failure: Failure, *, as_json: bool) -> None:
    """Write an error: on stdout as JSON, or on stderr for people; passwords of URLs are left out."""
    failure = _without_passwords(failure)
    if as_json:
        from gristmill.cli.document import json_text

        told = {
            "code": str(failure.code),
            "message": failure.message,
            "where": failure.where,
            "hint": failure.hint,
        }
        sys.stdout.write(json_text({"error": told}) + "\n")
        return
    # The message often names the place already.
    told_where = failure.where is not None and failure.where not in failure.message
    place = f" (at {failure.where})" if told_where else ""
    sys.stderr.write(f"error: {visible(failure.message + place)}\n")
    if failure.hint:
        sys.stderr.write(f"hint: {visible(failure.hint)}\n")
