"""One attempt while a foreign file is read: lines of our own format in, the capture and its result out.

Invariant: calls are made by the code that reads our own capture lines, so ids, counts, log-probabilities, parents and
media are checked alike. What could not be read leaves a lost call behind.

Not here: what the foreign fields are called (the importers).
"""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.captures import CapturedRollout
from gristmill.captures.attempt import AttemptReader
from gristmill.captures.call_line import parse_call
from gristmill.captures.exchange_line import ExchangeLine
from gristmill.captures.fields import JsonObject
from gristmill.captures.reply import Unexpected, encodable
from gristmill.errors import DecodeError
from gristmill.interop.importer import Report
from gristmill.records import LostCall, Result

__all__ = ["AttemptLines", "hole", "refused"]


def refused(error: Unexpected | DecodeError, place: str) -> DecodeError:
    """Say of a line or file, by its place, what in it cannot be read."""
    if isinstance(error, DecodeError):
        return error
    return DecodeError(error.message, where=f"{place} {error.where}")


def hole(call_id: str, place: str) -> LostCall:
    """Make the lost call that stands for what could not be read."""
    return LostCall(
        model_call_id=encodable(call_id), reason=f"{encodable(place)} could not be read", maybe_received=True
    )


class AttemptLines:
    """Collects one attempt.

    Attributes:
        result: what the harness handed back; None where it is not known.
    """

    def __init__(self, rollout_id: str, attempt: int, report: Report) -> None:
        self.rollout_id = rollout_id
        self.attempt = attempt
        self.result: Result | None = None
        self._report = report
        self._reader = AttemptReader(rollout_id, attempt)

    def call(self, line: JsonObject) -> None:
        """Add a call as a `call` line of ours states it; keys that are None are left out.

        Raises:
            Unexpected: a value is none that such a line may have.
        """
        stated = {key: value for key, value in line.items() if value is not None or key == "parent_call_id"}
        if self._report.completed and not {"response_status", "finish_reason"} & stated.keys():
            stated["response_status"] = "completed"
        self._reader.add_call(parse_call(stated, self.rollout_id, self.attempt))

    def exchange(self, line: ExchangeLine) -> None:
        """Add an `exchange` line that is parsed already; `Unexpected` as in `call`."""
        self._reader.add_exchange(line)

    def lose(self, calls: Iterable[LostCall]) -> None:
        """Add calls that were made and are not there."""
        self._reader.lost.extend(calls)

    def finish(self) -> CapturedRollout:
        """Make the records and their tokens."""
        for call_id in self._reader.repeated_ids():
            self._report.note(f"{self.rollout_id} call={call_id}", "this call id occurs more than once")
        return CapturedRollout(self._reader.capture(), self.result)
