"""Whatever an engine does: the client is told in its dialect, the record says why, and the next call works."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gristmill.errors import Code
from gristmill.records import Delivery, Dialect
from tests.gateway.running import (
    DIALECTS,
    Answer,
    Rollout,
    engine_of,
    error_of,
    gateway,
    run,
    saw_finish,
    spoken,
)

TEXT = "One two three four five six."
SAID = {"content": TEXT}
PACED = {**SAID, "gap_s": 0.02}
"""So slow that what came before a break has arrived."""


class Fault(NamedTuple):
    """What the engine does, and what must come of it.

    Attributes:
        does: the scripted reply.
        body, stream: HTTP status for a client that asked for a body, for a stream; 200 with `told` is an error event.
        reason, reason_stream: of the record; the second is the first where it is None.
        breaks: a stream ends as a broken connection does.
        retry_after: header that the client gets.
    """

    does: dict[str, Any]
    body: int = 200
    stream: int = 200
    reason: Code | None = None
    reason_stream: Code | None = None
    breaks: bool = False
    retry_after: str | None = None


def broken(kind: str, **more: Any) -> dict[str, Any]:
    return {**PACED, "fault": {"kind": kind, **more}}


def wrong(**what: Any) -> dict[str, Any]:
    return {**SAID, "wrong": what}


FAULTS = {
    "429": Fault(broken("status", status=429, retry_after_s=7), 429, 429, Code.CALL_FAILED, retry_after="7"),
    "400": Fault(broken("status", status=400), 400, 400, Code.CALL_FAILED),
    "500": Fault(broken("status", status=500), 500, 500, Code.CALL_FAILED),
    "503": Fault(broken("status", status=503), 503, 503, Code.CALL_FAILED, retry_after="1"),
    "401": Fault(broken("status", status=401), 502, 502, Code.CALL_FAILED),
    "reset_before": Fault(broken("reset"), 502, 502, Code.CALL_FAILED),
    "reset_within": Fault(
        broken("reset", after_chunks=2), 502, 200, Code.CALL_FAILED, Code.STREAM_TRUNCATED, breaks=True
    ),
    "half": Fault(broken("eof", after_chunks=2), 502, 200, Code.REPLY_MALFORMED, Code.STREAM_TRUNCATED, breaks=True),
    "cut": Fault(broken("truncate", after_chunks=2), 502, 200, Code.CALL_FAILED, Code.STREAM_TRUNCATED, breaks=True),
    "garbage": Fault(broken("garbage"), 502, 200, Code.REPLY_MALFORMED, Code.REPLY_MALFORMED),
    "garbage_within": Fault(broken("garbage", after_chunks=2), 502, 200, Code.REPLY_MALFORMED, Code.STREAM_TRUNCATED),
    "redirect": Fault(broken("redirect", location="http://127.0.0.1:9/x"), 502, 502, Code.CALL_FAILED),
    "gzip": Fault({**SAID, "gzip": True}, 502, 502, Code.CALL_FAILED),
    "usage": Fault(wrong(usage=1), reason=Code.TOKEN_COUNT_MISMATCH),
    "ids_missing": Fault(wrong(token_ids="missing"), reason=Code.TOKEN_IDS_MISSING),
    "ids_short": Fault(wrong(token_ids="short"), reason=Code.LOGPROB_COUNT_MISMATCH),
    "ids_long": Fault(wrong(token_ids="long"), reason=Code.LOGPROB_COUNT_MISMATCH),
    "logprobs_missing": Fault(wrong(logprobs="missing"), reason=Code.LOGPROBS_MISSING),
    "logprobs_short": Fault(wrong(logprobs="short"), reason=Code.LOGPROB_COUNT_MISMATCH),
    "logprobs_nan": Fault(wrong(logprobs="nan"), reason=Code.LOGPROB_NOT_FINITE),
    "prompt_missing": Fault(wrong(prompt_ids="missing"), reason=Code.PROMPT_IDS_MISSING),
    "no_finish": Fault(wrong(finish=False), 502, 200, Code.STREAM_TRUNCATED, breaks=True),
    "no_done": Fault(wrong(done=False), 200, 200, None, Code.STREAM_TRUNCATED, breaks=True),
}


async def check(rollout: Rollout, dialect: Dialect, stream: bool, fault: Fault, answer: Answer) -> None:
    """Check what the client got, and what was stored."""
    reason = (fault.reason_stream or fault.reason) if stream else fault.reason
    failed = reason in {Code.CALL_FAILED, Code.REPLY_MALFORMED, Code.STREAM_TRUNCATED}
    assert answer.status == (fault.stream if stream else fault.body), answer.raw
    assert saw_finish(dialect, answer) is not failed
    assert answer.headers.get("retry-after") == fault.retry_after
    # A stream that breaks ends as a broken one: harnesses ask again after that, some not after an error event.
    torn = failed and answer.streamed and fault.breaks and dialect is not Dialect.RESPONSES
    assert answer.cut is torn
    assert (error_of(dialect, answer) is not None) is (failed and not torn)
    record = rollout.record(answer.call_id)
    assert record.unusable_reason == reason, record.unusable_detail
    assert record.usable is (reason is None)
    if failed:
        assert record.response_status != "completed"
    else:
        assert spoken(dialect, answer) == TEXT
        assert record.delivery is Delivery.DELIVERED
        assert record.response_id.encode() in answer.raw


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_an_engine(tmp_path: Path, name: str) -> None:
    # A fault that ends in a hung client, a torn reply taken for whole, or an attempt that takes no more calls.
    fault = FAULTS[name]

    async def main() -> None:
        rules = [{"when": {where: "Break"}, "reply": fault.does} for where in ("user", "prompt")]
        engine = engine_of(*rules, SAID)
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            for dialect, stream in product(DIALECTS, (False, True)):
                rollout = await running.begin(f"{dialect}-{stream}")
                answer = await rollout.ask(dialect, "Break", stream=stream)
                await rollout.settled(1)
                await check(rollout, dialect, stream, fault, answer)
                after = await rollout.ask(dialect, "Go on", stream=stream)
                assert spoken(dialect, after) == TEXT
                assert (await rollout.settled(2))[-1].usable
                assert rollout.capture().lost == ()
                rollout.sound()

    run(main())
