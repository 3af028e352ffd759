"""A run of NeMo Gym on disk, written by Gym's own stores and models: `python record.py FOLDER`.

Six rollouts: 7-0 captured by a proxy, with a retry, a title and prompts as suffixes; 7-1 with a lost call; 7-2 staged
by workers, with its receipt; 7-3 staged, with a failed call; 8-0 of a native agent, whose items carry the tokens; 8-1
masked. `tests/interop/nemo_gym_files` is what this writes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from nemo_gym.base_responses_api_model import CaptureStore
from nemo_gym.openai_utils import NeMoGymResponse
from nemo_gym.token_id_capture import (
    CallRecord,
    CaptureLedgerCommit,
    FileLineageStore,
    ParentResolutionStatus,
    TokenCaptureStore,
    TokenEntry,
    stamp_continuation,
    stamp_lineage,
)
from nemo_gym.token_id_capture.staging.digest import (
    EMPTY_EXTRAS_DIGEST,
    EXTRAS_DIGEST_VERSION,
    STAGING_DIGEST_VERSION,
    STAGING_SCHEMA_VERSION,
    build_staging_delta,
    compute_chain_hash,
    compute_staging_digest,
    hash_token_ids,
)
from nemo_gym.token_id_capture.staging.records import RolloutManifest, RolloutReceipt, StagedCallRecord

Json = dict[str, Any]

TASK: Json = {"role": "user", "content": "How warm is it in Oslo?"}


def message(text: str, item_id: str) -> Json:
    """A message as a Responses item."""
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"id": item_id, "type": "message", "role": "assistant", "status": "completed", "content": [part]}


def tool_call(call_id: str) -> Json:
    """A call of the one tool there is."""
    arguments = '{"place": "Oslo"}'
    return {
        "id": f"fc-{call_id}",
        "type": "function_call",
        "call_id": call_id,
        "name": "warmth",
        "arguments": arguments,
    }


def tool_result(call_id: str) -> Json:
    """What the tool said."""
    return {"type": "function_call_output", "call_id": call_id, "output": "4 degrees"}


def entry(
    rollout: str, call: str, prompt: list[int], sampled: list[int], items: list[Json], **fields: Any
) -> TokenEntry:
    """A token record as the capture middleware makes it, before it is given its lineage."""
    return TokenEntry(
        rollout_id=rollout,
        model_call_id=call,
        model="policy",
        prompt_token_ids=prompt,
        generation_token_ids=sampled,
        generation_log_probs=[-(token % 7) / 8 for token in sampled],
        output_items=items,
        token_item_index=len(items) - 1,
        response_id=f"resp-{call}",
        created_at=1_700_000_000.0 + len(call),
        **fields,
    )


def rooted(made: TokenEntry, request: list[Json]) -> TokenEntry:
    """Stamp a record that continues nothing."""
    stamp_continuation(made, request)
    return stamp_lineage(made, None, parent_resolution=ParentResolutionStatus.ROOT)


def continued(made: TokenEntry, before: list[int], parent: str, request: list[Json]) -> TokenEntry:
    """Stamp a record that continues another, and store its prompt as the suffix of it."""
    stamp_continuation(made, request)
    whole = list(made.prompt_token_ids) + list(made.generation_token_ids)
    made.prompt_token_ids = made.prompt_token_ids[len(before) :]
    made.prompt_is_delta = True
    return stamp_lineage(made, parent, parent_resolution=ParentResolutionStatus.RESOLVED, cumulative=whole)


def proxied(folder: Path) -> Json:
    """Rollout 7-0: the call that was returned, a retry of it, a title, and the answer."""
    store, exchanges = TokenCaptureStore(folder), CaptureStore(folder)
    asks, retry, answer = [tool_call("t1")], [message("Let me think.", "m2")], [message("4 degrees.", "m4")]
    title = [{"role": "user", "content": "A title, please."}]
    first = [11, 12, 13]
    later = [*first, 21, 22, 14, 15]
    request = [TASK, asks[0], tool_result("t1")]
    calls = [
        (rooted(entry("7-0", "c1", first, [21, 22], asks), [TASK]), [TASK], asks, 200),
        (rooted(entry("7-0", "c2", first, [23], retry), [TASK]), [TASK], retry, 200),
        (rooted(entry("7-0", "c3", [31], [32, 33], [message("Warmth", "m3")]), title), title, None, 200),
        (
            continued(entry("7-0", "c4", later, [24, 25, 26], answer), [*first, 21, 22], "c1", request),
            request,
            answer,
            200,
        ),
    ]
    for record, asked, served, status in calls:
        store.append(record)
        if served is not None:
            exchanges.record("7-0", exchange(record.model_call_id, asked, served, status))
    exchanges.record("7-0", exchange("c5", request, None, 500))
    return {"response": response("resp-c4", [*asks, tool_result("t1"), *answer]), "reward": 1.0}


def exchange(call: str, asked: list[Json], served: list[Json] | None, status: int) -> Json:
    """An exchange as Gym's observability keeps it."""
    answered = {**response(f"resp-{call}", served), "status": "completed"} if served is not None else {"error": "busy"}
    return {
        "model_call_id": call,
        "dialect": "responses",
        "model_ref": {"type": "responses_api_models", "name": "policy"},
        "started_at": 1_700_000_000.0,
        "completed_at": 1_700_000_000.5,
        "latency_ms": 500.0,
        "latency_ttft_ms": None,
        "status_code": status,
        "error_category": None if status < 400 else "server_error",
        "request": {"model": "policy", "input": asked, "temperature": 1.0},
        "response": answered,
    }


def response(response_id: str, items: list[Json]) -> Json:
    """A response that Gym's own model accepts."""
    made = {
        "id": response_id,
        "created_at": 1_700_000_000.0,
        "model": "policy",
        "object": "response",
        "output": items,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
    return NeMoGymResponse.model_validate(made).model_dump(mode="json", exclude_none=True)


def with_hole(folder: Path) -> Json:
    """Rollout 7-1: a call that was begun and never recorded, and one that Gym marked as lost."""
    store = TokenCaptureStore(folder)
    store.append(rooted(entry("7-1", "d1", [11, 12], [41], [message("Warm.", "m5")]), [TASK]))
    store.intents_path_for("7-1").write_text("d1\nd2\n")
    store.incomplete_path_for("7-1").write_text("d3\n")
    return {"response": response("resp-d1", [message("Warm.", "m5")]), "reward": 0.0}


def staged(folder: Path) -> tuple[Json, Json, list[StagedCallRecord]]:
    """Rollouts 7-2 and 7-3: ledgers of what workers staged; gives manifest, receipt and the staged calls."""
    root, child = delta("7-2", "e1", None, [51, 52], [53, 54]), None
    child = delta("7-2", "e2", root, [51, 52, 53, 54, 55], [56])
    alone = delta("7-3", "f1", None, [61], [62])

    async def commit() -> tuple[Json, Json]:
        ledger = FileLineageStore(folder)
        for made, asked, served in ((root, [TASK], "One."), (child, [TASK, TASK], "Two."), (alone, [TASK], "Three.")):
            items = [message(served, "m")]
            await ledger.record(
                CaptureLedgerCommit(
                    rollout_id=made.rollout_id, record=row(made), request_items=asked, response_items=items
                )
            )
        await ledger.record_failure("7-3", "f2", "unresolved_parent")
        return await ledger.manifest("7-2"), await ledger.manifest("7-3")

    kept, failed = asyncio.run(commit())
    receipt = RolloutReceipt(
        rollout_id="7-2",
        reward=0.5,
        terminal_model_call_id="e2",
        terminal_selection="response_id",
        manifest=RolloutManifest.model_validate(kept).records,
    )
    return failed, receipt.model_dump(mode="json"), [child, root, alone]


def delta(rollout: str, call: str, parent: StagedCallRecord | None, prompt: list[int], sampled: list[int]) -> Any:
    """A staged call as a worker makes it."""
    before = 0 if parent is None else parent.cum_len
    ids, mask, logprobs = build_staging_delta(
        prompt_token_ids=prompt,
        generated_token_ids=sampled,
        generated_log_probs=[-(token % 5) / 4 for token in sampled],
        prev_len=before,
    )
    fields = {
        "schema_version": STAGING_SCHEMA_VERSION,
        "digest_version": STAGING_DIGEST_VERSION,
        "extras_digest_version": EXTRAS_DIGEST_VERSION,
        "rollout_id": rollout,
        "model_call_id": call,
        "parent_call_id": None if parent is None else parent.model_call_id,
        "mode": "text" if parent is None else "token_in",
        "prev_len": before,
        "delta_len": len(ids),
        "cum_len": before + len(ids),
        "weight_version": 3,
        "token_ids_delta": ids,
        "token_mask_delta": mask,
        "generation_log_probs_delta": logprobs,
        "extras_digest": EMPTY_EXTRAS_DIGEST,
        "chain_hash": compute_chain_hash(None if parent is None else parent.chain_hash, ids),
        "cumulative_hash": hash_token_ids([*prompt, *sampled]),
    }
    return StagedCallRecord(**fields, digest=compute_staging_digest(**fields))


def row(made: StagedCallRecord) -> CallRecord:
    """The line of a manifest for a staged call."""
    return CallRecord(
        model_call_id=made.model_call_id,
        parent_call_id=made.parent_call_id,
        prev_len=made.prev_len,
        delta_len=made.delta_len,
        cum_len=made.cum_len,
        weight_version=made.weight_version,
        digest=made.digest,
        extras_digest=made.extras_digest,
        staging_key=made.staging_key,
        mode=made.mode,
        chain_hash=made.chain_hash,
        cumulative_hash=made.cumulative_hash,
        response_id=f"resp-{made.model_call_id}",
        admitted_at=1_700_000_000.25,
        fingerprint_version=2,
        output_fingerprint="ab" * 32,
    )


def native() -> Json:
    """Rollout 8-0: two calls, each with its tokens on its last item."""
    asks, answer = tool_call("t2"), message("Cold.", "m7")
    asks |= {"prompt_token_ids": [71, 72], "generation_token_ids": [73], "generation_log_probs": [-0.25]}
    prompt = [71, 72, 73, 74]
    answer |= {"prompt_token_ids": prompt, "generation_token_ids": [75, 76], "generation_log_probs": [-0.5, -0.75]}
    made = response("resp-8", [asks, tool_result("t2"), answer])
    return {"response": {**made, "status": "completed"}, "reward": 0.0}


def record(folder: Path) -> None:
    """Write the run."""
    folder.mkdir(parents=True, exist_ok=True)
    results = [
        {**proxied(folder), "_ng_task_index": 7, "_ng_rollout_index": 0},
        {**with_hole(folder), "_ng_task_index": 7, "_ng_rollout_index": 1},
        {**native(), "_ng_task_index": 8, "_ng_rollout_index": 0},
        {
            **native(),
            "_ng_task_index": 8,
            "_ng_rollout_index": 1,
            "mask_sample": True,
            "failure_reason": "judge is out",
        },
    ]
    failed, receipt, calls = staged(folder)
    lines = [call.model_dump_json() for call in calls]
    (folder / "staged.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "receipts.json").write_text(json.dumps([receipt], indent=1) + "\n")
    (folder / "manifest-7-3.json").write_text(json.dumps(failed, indent=1) + "\n")
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(result) + "\n" for result in results))
    for left in (*folder.glob("*.lock"), *folder.glob("*.state.json")):
        left.unlink()


if __name__ == "__main__":
    record(Path(sys.argv[1]))
