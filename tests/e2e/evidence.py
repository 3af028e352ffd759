"""What the ledger holds against what the engine said: id by id, for every call of an attempt.

Invariant: an expectation is worked out from the witness's bytes alone.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.captures import choice_call_id
from gristmill.records import CallRecord, Capture
from gristmill.tokens import expand
from tests.e2e.checks import Checks
from tests.e2e.stage import gristmill
from tests.e2e.witness import Sampled, Seen, sampled

__all__ = ["check_all_captured", "check_rows", "check_tokens", "records_of"]


def records_of(capture: Capture, seen: Iterable[Seen]) -> list[CallRecord]:
    """Return the records of choice 0 of some requests, in their order; a request without a record is left out."""
    by_id = {record.model_call_id: record for record in capture.records}
    return [by_id[call.call_id] for call in seen if call.call_id in by_id]


def check_all_captured(checks: Checks, capture: Capture, seen: Iterable[Seen]) -> None:
    """Every request that reached the engine is a call of this attempt, and there is no other call."""
    asked = {choice_call_id(call.call_id or "", index) for call in seen for index in range(call.choices)}
    held = {record.model_call_id for record in capture.records}
    checks.equal("every request of the engine is a captured call, and no other", sorted(asked), sorted(held))
    checks.equal("no call is lost", [], [call.model_call_id for call in capture.lost])


def check_tokens(checks: Checks, capture: Capture, seen: Iterable[Seen], *, unusable: Iterable[str] = ()) -> None:
    """The ids and log-probabilities of every usable call are the engine's; only those named are unusable."""
    by_id = {record.model_call_id: record for record in capture.records}
    wrong: list[str] = []
    counted = 0
    expected = sorted(unusable)
    for call in seen:
        if call.status != 200 or call.call_id in expected:
            continue
        for index, said in sampled(call).items():
            record = by_id.get(choice_call_id(call.call_id or "", index))
            if record is None:
                wrong.append(f"{call.call_id}#{index}: no record")
            elif record.usable:
                counted += 1
                wrong += [f"{record.model_call_id}: {what}" for what in _differences(capture, by_id, record, said)]
    checks.check(f"ids and log-probabilities of {counted} calls are the engine's", not wrong, "\n".join(wrong))
    got = {
        record.model_call_id: f"{record.unusable_reason}: {record.unusable_detail}"
        for record in capture.records
        if not record.usable
    }
    checks.check(
        f"{len(expected) or 'no'} calls are unusable", sorted(got) == expected, f"expected {expected}\ngot {got}"
    )


def _differences(capture: Capture, by_id: Mapping[str, CallRecord], record: CallRecord, said: Sampled) -> list[str]:
    whole = expand(by_id, capture.tokens, record.model_call_id).tolist()
    delta = capture.tokens[record.model_call_id]
    sampled_len = record.cum_len - record.prompt_len
    probs = delta.logprobs_T[len(delta.logprobs_T) - sampled_len :]
    found = {
        "prompt ids": (said.prompt_ids, whole[: record.prompt_len]),
        "sampled ids": (said.token_ids, whole[record.prompt_len :]),
        "log-probabilities": (np.asarray(said.logprobs, np.float32).tolist(), probs.tolist()),
        "finish reason": (said.finish_reason, record.finish_reason),
        "mask": ([0] * (len(delta.mask_T) - sampled_len) + [1] * sampled_len, delta.mask_T.tolist()),
    }
    return [f"{name}: engine {a!s:.200}, ledger {b!s:.200}" for name, (a, b) in found.items() if a != b]


def check_rows(
    checks: Checks,
    ledger: Path,
    folder: Path,
    expected: Mapping[str, tuple[Capture, list[Seen]]],
    policy: Sequence[str] = ("--policy", "all_captured"),
    selected: Container[str] | None = None,
) -> None:
    """Rows hold exactly what the engine sampled: each call once, on its own prompt.

    `expected` is by rollout; a call counts where the ledger calls it usable, and the policy selected it.
    """
    done = gristmill("rows", str(ledger), *policy, "--out", str(folder), check=False)
    if not checks.check("rows can be made", done.returncode == 0, done.stdout + done.stderr):
        return
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    trained: dict[tuple[str, str], list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for row in rows:
        for span in row["spans"]:
            if span["role"] == "sampled":
                trained.setdefault((row["rollout_id"], span["call_id"]), []).append((row, span))
    wrong: list[str] = []
    tokens = calls = 0
    for rollout, (capture, seen) in expected.items():
        usable = {record.model_call_id for record in capture.records if record.usable}
        usable = {name for name in usable if selected is None or name in selected}
        for call in seen:
            if not any(choice_call_id(call.call_id or "", index) in usable for index in range(call.choices)):
                continue
            for index, said in sampled(call).items():
                name = choice_call_id(call.call_id or "", index)
                calls += 1
                tokens += len(said.token_ids)
                places = trained.get((rollout, name), [])
                if [_holds(row, span, said) for row, span in places] != [True]:
                    wrong.append(f"{rollout} {name}: trained in {len(places)} places")
    mask = sum(sum(row["loss_mask"]) for row in rows if row["rollout_id"] in expected)
    checks.check(f"each of {calls} calls is trained in exactly one row, on its own prompt", not wrong, "\n".join(wrong))
    checks.equal("rows train exactly the sampled tokens", tokens, mask)
    checks.equal(
        "gristmill verify finds nothing",
        0,
        gristmill("verify", str(ledger), str(folder), *policy, check=False).returncode,
    )


def _holds(row: Mapping[str, Any], span: Mapping[str, Any], said: Sampled) -> bool:
    prompt, ids = said.prompt_ids or [], said.token_ids
    start, end = len(prompt), len(prompt) + len(ids)
    probs = np.asarray(said.logprobs, np.float32).tolist()
    return (
        (span["start"], span["end"]) == (start, end)
        and row["token_ids"][:end] == prompt + ids
        and row["loss_mask"][start:end] == [1] * len(ids)
        and np.asarray(row["logprobs"][start:end], np.float32).tolist() == probs
    )
