"""The importer of NeMo Gym's files: everything that they say of one rollout, put together.

Invariant: a call comes from the one place that holds its tokens: a token record, else a staged call with its line of
the manifest, else a manifest alone (without tokens), else an exchange, else an item of the result. Whatever Gym marked
as lost, failed or poisoned leaves a lost call.

Not here: finding files and lines (files), making tokens whole (tokens), the line of a rollout (rollout).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, cast

import msgspec

from gristmill.canonical import JsonValue
from gristmill.captures import CapturedRollout
from gristmill.captures.decode import decode_value
from gristmill.captures.exchange_line import parse_exchange
from gristmill.captures.fields import JsonObject, count_at, kind_of, list_at, name_at, text_at
from gristmill.captures.reply import Unexpected, encodable
from gristmill.errors import DecodeError
from gristmill.interop.attempt import AttemptLines, hole, refused
from gristmill.interop.foreign import kept, objects_at
from gristmill.interop.importer import Importer, Report
from gristmill.interop.lines import Line
from gristmill.interop.nemo_gym.files import Files, Kind, is_certain
from gristmill.interop.nemo_gym.rollout import bears_tokens, item_calls, result_of
from gristmill.interop.nemo_gym.tokens import Sequences, Tokens, check_schema
from gristmill.interop.reward import reward_at
from gristmill.records import Dialect, LostCall, Result

__all__ = ["NEMO_GYM"]

_ROUTES: Final = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "completions": "/v1/completions",
}
_STAGED_SCHEMA: Final = 2
_LOSSES: Final = {
    "routed_experts": "Routed experts of calls: their place among the tokens is not told.",
    "fingerprints": "Gym's fingerprints and digests of conversations: made by rules of its own.",
    "items": "Calls whose records do not say what they served: no returned history can be compared with them.",
    "tokens": "Calls of a manifest whose tokens are stored elsewhere: they make no rows.",
    "extras": "Extras of staged calls.",
    "exchanges": "Exchanges beside calls that items of the result tell: which is which is not known.",
    "rewards": "Rollouts whose receipt and result state rewards that differ: none of them is taken.",
    "observations": "Measurements and transport facts of exchanges.",
    "calls_unknown": "Rollouts without token ids and without captures: which calls they made is not known.",
    "terminal_guessed": "Scored calls that a receipt names by the shape of the conversation alone.",
}
_THEIR_DIGESTS: Final = frozenset(
    {"continuation_fingerprint", "continuation_context_digest", "output_fingerprint", "fingerprint", "context_digest"}
)


def _read(path: Path, report: Report) -> Iterator[CapturedRollout]:
    files = Files(path, report)
    for rollout_id in files.rollout_ids():
        rollout = _Rollout(rollout_id, report)
        for kind, line in files.lines(rollout_id):
            rollout.take(kind, line)
        rollout.lose(files.unread(rollout_id))
        yield rollout.finish(files)


class _Rollout:
    """Collects the lines of one rollout."""

    def __init__(self, rollout_id: str, report: Report) -> None:
        self._id = rollout_id
        self._report = report
        self._attempt = AttemptLines(rollout_id, 0, report)
        self._held: dict[Kind, list[Line]] = {kind: [] for kind in Kind}
        self._rows: dict[str, Line] = {}
        self._calls: dict[str, JsonObject] = {}
        self._sequences = Sequences()
        self._exchanges: dict[str, Line] = {}
        self._lost: dict[str, LostCall] = {}

    def take(self, kind: Kind, line: Line) -> None:
        """Take a line; refusals as `Report.refuse` says."""
        try:
            if kind is Kind.LEDGER:
                self._row(line.value, line)
            elif kind in {Kind.MANIFEST, Kind.RECEIPT}:
                self._manifest(kind, line)
            elif kind is Kind.EXCHANGE:
                self._exchanges[_call_id(line.value)] = line
            elif kind is Kind.RESULT and self._held[kind]:
                raise Unexpected("one line for each rollout", "a second one", "$")
            else:
                self._held[kind].append(line)
        except (DecodeError, Unexpected) as error:
            self._report.refuse(refused(error, line.place))
            if kind is not Kind.RESULT:
                self.lose([hole(_named(line), line.place)])

    def lose(self, calls: Iterable[LostCall]) -> None:
        """Take calls that are not there; ledger and manifest may both tell of one."""
        for call in calls:
            self._lost.setdefault(call.model_call_id, call)

    def finish(self, files: Files) -> CapturedRollout:
        """Put everything together."""
        for line in self._held[Kind.ENTRY]:
            self._add(line, self._entry)
        staged = {_named(line): line for line in self._held[Kind.STAGED]}
        # A manifest says in which order the calls were admitted; staged calls come in any.
        order = [name for name in self._rows if name in staged] + [name for name in staged if name not in self._rows]
        for name in order:
            self._add(staged[name], self._staged)
        for name, row in self._rows.items():
            if name not in staged and name not in self._calls:
                self._add(row, self._row_alone)
        by_items = self._results()
        alone = [line for name, line in self._exchanges.items() if name not in self._calls]
        if by_items:
            self._report.lose("exchanges", len(alone))
        else:
            for line in alone:
                self._add(line, self._exchange)
        self.lose(files.missing(self._id, frozenset(self._calls)))
        self._attempt.lose(self._lost.values())
        return self._attempt.finish()

    # Calls

    def _add(self, line: Line, make: Callable[[Line, str], None]) -> None:
        name = _named(line)
        try:
            call_id = _call_id(line.value)
            if call_id in self._calls and self._calls[call_id] == line.value:
                self._report.note(line.place, "the same record once more: passed over")
                return
            make(line, call_id)
            self._calls[call_id] = line.value
        except (DecodeError, Unexpected) as error:
            self._report.refuse(refused(error, line.place))
            self.lose([hole(name, line.place)])

    def _entry(self, line: Line, call_id: str) -> None:
        value = line.value
        tokens = self._sequences.entry(value, call_id, line.place)
        if value.get("routed_experts") is not None:
            self._report.lose("routed_experts")
        self._call(value, call_id, tokens, value)

    def _staged(self, line: Line, call_id: str) -> None:
        row = self._rows[call_id].value if call_id in self._rows else {}
        tokens = self._sequences.staged(line.value, row or None, call_id, line.place)
        if line.value.get("extras") is not None:
            self._report.lose("extras")
        self._call({**row, **line.value}, call_id, tokens, row)

    def _row_alone(self, line: Line, call_id: str) -> None:
        self._report.lose("tokens")
        self._call(line.value, call_id, None, line.value)

    def _call(self, value: JsonObject, call_id: str, tokens: Tokens | None, told: JsonObject) -> None:
        """Add a call that a record states; `told` is the part of it that says what was served, and how it ended."""
        if _THEIR_DIGESTS & {key for key, held in value.items() if held}:
            self._report.lose("fingerprints")
        items = list_at(told, "output_items", "$")
        if items is not None and any(isinstance(item, dict) and "fingerprint" in item for item in items):
            items = None
        if items is None:
            self._report.lose("items")
        parent = name_at(value, "parent_call_id", "$")
        version = count_at(value, "weight_version", "$")
        generated = 0 if tokens is None else len(tokens.generation or ())
        created = _kept(value, "created_at")
        self._attempt.call(
            {
                "model_call_id": call_id,
                "response_id": name_at(value, "response_id", "$"),
                **_parent(value, parent),
                "model": name_at(value, "model", "$") or None,
                "response_status": text_at(told, "response_status", "$"),
                "finish_reason": text_at(told, "finish_reason", "$"),
                "output_items": items,
                "prompt_token_ids": None if tokens is None else tokens.prompt,
                "generation_token_ids": None if tokens is None else tokens.generation,
                "generation_log_probs": None if tokens is None else tokens.logprobs,
                "weight_versions": None
                if version is None or not generated
                else [{"version": version, "start": 0, "end": generated}],
                "admitted_at": _kept(value, "admitted_at"),
                # An entry that was written without a clock says 0.
                "completed_at": created if created else None,
                **self._exchanged(call_id, told),
            }
        )

    def _exchanged(self, call_id: str, told: JsonObject) -> JsonObject:
        """Give what a captured exchange adds to a call whose tokens came from elsewhere."""
        line = self._exchanges.get(call_id)
        if line is None:
            return {}
        value = line.value
        self._report.lose("observations")
        status = count_at(value, "status_code", "$")
        added: JsonObject = {
            "request": _kept(value, "request"),
            "reply": _kept(value, "response"),
            "http_status": status,
            "admitted_at": _kept(value, "started_at"),
            "completed_at": _kept(value, "completed_at"),
        }
        dialect = text_at(value, "dialect", "$")
        if dialect in _ROUTES and value.get("response") is not None and told.get("response_status") is None:
            choices = decode_value(Dialect(dialect), status or 200, value["response"]).choices
            added["dialect"] = dialect
            added["response_status"] = str(choices[0].response_status)
            added["finish_reason"] = choices[0].finish_reason
        return added

    def _exchange(self, line: Line, call_id: str) -> None:
        """Add a call of which only the exchange was captured."""
        value = line.value
        dialect = text_at(value, "dialect", "$") or "chat"
        if dialect not in _ROUTES:
            raise Unexpected(f"one of {', '.join(_ROUTES)}", repr(dialect), "$.dialect")
        self._report.lose("observations")
        status, body = count_at(value, "status_code", "$"), _kept(value, "response")
        asked = _kept(value, "request")
        if body is None and (status or 0) < 400:
            self._attempt.call({"model_call_id": call_id, "request": asked, "response_status": "unknown"})
            return
        request = {"path": _ROUTES[dialect], "body": asked}
        stated: JsonObject = {
            "model_call_id": call_id,
            "request": request,
            "status": 200 if status is None else status,
            "body": body,
            "admitted_at": _kept(value, "started_at"),
            "completed_at": _kept(value, "completed_at"),
            "session_id": value.get("client_session_id"),
        }
        parsed = parse_exchange(stated, self._id, 0, call_id)
        assert not isinstance(parsed, str)
        self._attempt.exchange(parsed)

    # Ledgers, manifests, receipts

    def _row(self, row: JsonObject, line: Line) -> None:
        call_id = _call_id(row)
        failure = text_at(row, "failure_reason", "$")
        if failure is not None:
            self.lose([LostCall(model_call_id=call_id, reason=encodable(failure), maybe_received=True)])
        elif row.get("staging_key") is None:
            # It only served to find parents by Gym's own fingerprints.
            self._report.lose("fingerprints")
        else:
            # A ledger calls the digest of a staged call by another name than a manifest, and keeps its own beside it.
            stated = {**row, "digest": row["staging_digest"]} if "staging_digest" in row else row
            self._rows.setdefault(call_id, line._replace(value=stated))

    def _manifest(self, kind: Kind, line: Line) -> None:
        value = line.value
        check_schema(value, _STAGED_SCHEMA, line.place)
        for row, _ in objects_at(value, "records" if kind is Kind.MANIFEST else "manifest", "$"):
            self._row(row, line)
        for failed, place in objects_at(value, "failures", "$"):
            reason = text_at(failed, "reason", place) or "its capture failed"
            self.lose([LostCall(model_call_id=_call_id(failed), reason=encodable(reason), maybe_received=True)])
        if kind is Kind.RECEIPT:
            self._receipt(value)

    def _receipt(self, value: JsonObject) -> None:
        poisoned, reason = value.get("capture_poisoned"), text_at(value, "failure_reason", "$")
        if poisoned is not None and not isinstance(poisoned, bool):
            raise Unexpected("true or false", kind_of(poisoned), "$.capture_poisoned")
        if poisoned or reason is not None:
            why = encodable(reason or "its receipt says that the capture is poisoned")
            self.lose([LostCall(model_call_id="unnamed", reason=why, maybe_received=True)])
        terminal = name_at(value, "terminal_model_call_id", "$")
        handed: JsonObject = {}
        if terminal is not None:
            if value.get("terminal_selection") == "heuristic":
                self._report.lose("terminal_guessed")
            elif terminal in self._rows:
                handed["terminal_response_id"] = name_at(self._rows[terminal].value, "response_id", "$")
        if self._attempt.result is None:
            self._attempt.result = Result(value=handed, reward=reward_at(value.get("reward"), "$.reward"))

    # Results

    def _results(self) -> bool:
        """Take the result; return whether its items told the calls."""
        by_items = False
        for line in self._held[Kind.RESULT]:
            try:
                self._attempt.result = self._with_receipt(result_of(line.value))
                if self._calls:
                    continue
                by_items = bears_tokens(line.value)
                for stated in list(item_calls(line.value)) if by_items else ():
                    self._attempt.call(stated)
                    self._calls[cast(str, stated["model_call_id"])] = stated
                if not by_items and not self._exchanges:
                    self._report.lose("calls_unknown")
            except (DecodeError, Unexpected) as error:
                self._report.refuse(refused(error, line.place))
                self.lose([hole(f"line-{line.number}", line.place)])
        return by_items

    def _with_receipt(self, result: Result) -> Result:
        """Add what a receipt said of the rollout."""
        receipt = self._attempt.result
        if receipt is None:
            return result
        rewards = {reward for reward in (receipt.reward, result.reward) if reward is not None}
        self._report.lose("rewards", len(rewards) > 1)
        reward = rewards.pop() if len(rewards) == 1 else None
        value = {**cast(JsonObject, receipt.value), **cast(JsonObject, result.value)}
        return msgspec.structs.replace(result, value=value, reward=reward)


def _parent(value: JsonObject, parent: str | None) -> JsonObject:
    """Read the parent; a record that speaks of none leaves it to be worked out from the request."""
    resolution = text_at(value, "parent_resolution", "$")
    if resolution is not None:
        return {"parent_call_id": parent, "parent_resolution": resolution}
    if parent is not None:
        return {"parent_call_id": parent, "parent_resolution": "resolved"}
    return {"parent_resolution": "root"} if value.get("mode") == "text" else {}


def _kept(holder: JsonObject, key: str) -> JsonValue:
    """Return a value that is kept as it stands, None where there is none; `Unexpected` as `kept`."""
    return kept(holder.get(key), f"$.{key}")


def _call_id(holder: Mapping[str, object]) -> str:
    named = name_at(holder, "model_call_id", "$")
    if not named:
        raise Unexpected("an id", "none", "$.model_call_id")
    return named


def _named(line: Line) -> str:
    """Name the call of a line for the hole that it leaves."""
    named = line.value.get("model_call_id")
    return named if isinstance(named, str) and named else f"line-{line.number}"


NEMO_GYM: Final = Importer(
    name="nemo-gym",
    title="NeMo Gym: token records, ledgers, manifests, receipts, exchanges and rollout files; a file, or the folder.",
    made_for="nemo-gym 0.7.0",
    losses=_LOSSES,
    read=_read,
    certain=is_certain,
)
