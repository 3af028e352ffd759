"""NeMo Gym's records of rollouts: Responses items that carry tokens, and training traces.

Invariant: of items, each prompt begins with all tokens of the item before it, which is what Gym demands of them; of
traces, each call's generation is owned by exactly one, and its spans are exactly the mask.

Not here: message logs and train batches, which NeMo RL makes of these (nemo_rl); Gym's capture files (interop).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np

from gristmill.errors import Code, ReconstructionError
from gristmill.export.trainers.layout import (
    gym_rollout_id,
    one_reward,
    refuse_media,
    refuse_without_prompt,
    reward_of,
)
from gristmill.export.trainers.losses import dropped, statements
from gristmill.export.trainers.objects import fields_of, trainer_module
from gristmill.export.trainers.projection import Kept, Projection, Sample, Source
from gristmill.reconstruction import Row, SpanRole
from gristmill.records import Atom, CallRecord

__all__ = ["NEMO_GYM", "NEMO_GYM_TRACES", "responses", "training_traces"]

_TEXT: Final = "Calls whose items have no text, because rows alone hold none: what scores text finds it empty."
_PARTS: Final = "Parts of replies that Gym's items with tokens have no form for: calls of built-in tools, media."
_ITEMS_DROP: Final = ("spans", "loss_weight", "extras", "credits", "advantage")
_ITEM_LOSSES: Final = statements(*_ITEMS_DROP, text=_TEXT, parts=_PARTS)
_TRACES_DROP: Final = ("spans", "extras", "credits", "advantage")
_TRACE_LOSSES: Final = statements(
    *_TRACES_DROP,
    spans="Traces without weight versions, settings and certificates: only which call sampled which tokens stays.",
)
_TRACES_SCHEMA: Final = 1


class _Generation(NamedTuple):
    """Tokens [start, end) of a row that one call sampled and the row trains."""

    call_id: str
    start: int
    end: int


def _generations(row: Row) -> list[_Generation]:
    made: list[_Generation] = []
    for span in row.spans:
        if span.role is not SpanRole.SAMPLED:
            continue
        last = made[-1] if made else None
        if last is not None and last.call_id == span.call_id and last.end == span.start:
            made[-1] = last._replace(end=span.end)
        else:
            made.append(_Generation(span.call_id, span.start, span.end))
    return made


# ---- Responses items -------------------------------------------------------------------------------------------------


def _samples(source: Source, losses: Counter[str]) -> Sequence[Sample]:
    records = {} if source.capture is None else {record.model_call_id: record for record in source.capture.records}
    made: list[Sample] = []
    for row in source.rows:
        made.append(Sample((row.row_id,), _record(row, records, losses)))
        losses.update(dropped(row, _ITEMS_DROP))
    return made


def _record(row: Row, records: Mapping[str, CallRecord], losses: Counter[str]) -> dict[str, Any]:
    refuse_media(row, "nemo-gym")
    refuse_without_prompt(row, "nemo-gym")
    generations = _generations(row)
    if generations[-1].end != row.token_ids.size:
        message = f"expected row {row.row_id} to end with a generation, it goes on: items have no place for the rest"
        raise ReconstructionError(Code.NOT_EXPRESSIBLE, message, where=f"row={row.row_id}")
    output: list[dict[str, Any]] = []
    model = ""
    for generation in generations:
        record = records.get(generation.call_id)
        model = (record.model if record is not None else None) or model
        items = _items(generation.call_id, record, losses)
        # Gym's converters put a call's tokens on its last item.
        items[-1] |= {
            "prompt_token_ids": row.token_ids[: generation.start],
            "generation_token_ids": row.token_ids[generation.start : generation.end],
            "generation_log_probs": row.logprobs[generation.start : generation.end],
        }
        output += items
    return {
        "rollout_id": gym_rollout_id(row) if row.row_count == 1 else f"{gym_rollout_id(row)}.{row.row_index}",
        "group_id": row.group_id,
        "reward": reward_of(row),
        "response": {
            "id": f"resp_{row.row_id}",
            "object": "response",
            "created_at": 0,
            "model": model,
            "output": output,
            "status": "incomplete" if row.truncated else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if row.truncated else None,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        },
    }


def _items(call_id: str, record: CallRecord | None, losses: Counter[str]) -> list[dict[str, Any]]:
    """Write what a call served as items that may carry tokens; an empty message where nothing of it is at hand."""
    items: list[dict[str, Any]] = []
    for atom in (atom for item in (record.output_items if record is not None else ()) for atom in item.atoms or ()):
        written = _item(f"{call_id}.{len(items)}", atom)
        if written is None:
            losses["parts"] += 1
        else:
            items.append(written)
    if not items:
        losses["text"] += 1
        items.append(_message(f"{call_id}.0", {"type": "output_text", "text": "", "annotations": []}))
    return items


def _item(item_id: str, atom: Atom) -> dict[str, Any] | None:
    match atom.kind:
        case "text" | "empty":
            return _message(item_id, {"type": "output_text", "text": atom.text, "annotations": []})
        case "refusal":
            return _message(item_id, {"type": "refusal", "refusal": atom.text})
        case "reasoning":
            return {"id": item_id, "type": "reasoning", "summary": [{"type": "summary_text", "text": atom.text}]}
        case "tool_call" if atom.tool == "function":
            called = {"call_id": atom.call_id, "name": atom.name, "arguments": atom.text}
            return {"id": item_id, "type": "function_call", **called, "status": "completed"}
        case _:
            return None


def _message(item_id: str, part: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": item_id, "type": "message", "role": "assistant", "status": "completed", "content": [dict(part)]}


def _restore(fields: Mapping[str, Any]) -> Sequence[Kept]:
    bearers = [item for item in fields["response"]["output"] if "generation_token_ids" in item]
    ids = np.asarray([*bearers[-1]["prompt_token_ids"], *bearers[-1]["generation_token_ids"]], np.int32)
    mask, logprobs = np.zeros(ids.size, np.uint8), np.zeros(ids.size, np.float32)
    for item in bearers:
        start = len(item["prompt_token_ids"])
        end = start + len(item["generation_token_ids"])
        mask[start:end] = 1
        logprobs[start:end] = np.asarray(item["generation_log_probs"], np.float64)
    return (Kept(ids, mask, logprobs),)


NEMO_GYM: Final = Projection(
    name="nemo-gym",
    title="NeMo Gym: one response a row, whose items carry prompt and sampled ids and log-probabilities.",
    made_for="nemo-gym 0.7.0",
    losses=_ITEM_LOSSES,
    samples=_samples,
    restore=_restore,
)


def responses(rows: Iterable[Row]) -> list[Any]:
    """Make NeMo Gym's own responses, `NeMoGymResponse`, whose items carry the tokens.

    Args:
        rows: rollouts in a piece.

    Raises:
        ConfigError: `trainer_missing`.
        ReconstructionError: `reward_missing`, `not_expressible`.
        ExportError: `row_missing`.
    """
    gym = trainer_module("nemo_gym.openai_utils", "pip install nemo-gym")
    made: list[Any] = []
    for fields in fields_of(NEMO_GYM, rows):
        for item in fields["response"]["output"]:
            for key in ("prompt_token_ids", "generation_token_ids", "generation_log_probs"):
                if key in item:
                    item[key] = item[key].tolist()
        made.append(gym.NeMoGymResponse.model_validate(fields["response"]))
    return made


# ---- Training traces -------------------------------------------------------------------------------------------------


def _trace_samples(source: Source, losses: Counter[str]) -> Sequence[Sample]:
    rows = source.rows
    record = {
        "rollout_id": gym_rollout_id(rows[0]),
        "group_id": rows[0].group_id,
        "reward": one_reward(rows),
        "training_traces": {
            "schema_version": _TRACES_SCHEMA,
            "rollout_id": gym_rollout_id(rows[0]),
            "builder": "per_request" if all(len(_generations(row)) == 1 for row in rows) else "prefix_merging",
            "traces": [_trace(row) for row in rows],
        },
    }
    for row in rows:
        losses.update(dropped(row, _TRACES_DROP))
    return (Sample(tuple(row.row_id for row in rows), record),)


def _trace(row: Row) -> dict[str, Any]:
    refuse_media(row, "nemo-gym-traces")
    refuse_without_prompt(row, "nemo-gym-traces")
    generations = _generations(row)
    calls = dict.fromkeys(span.call_id for span in row.spans if span.role is not SpanRole.CONTEXT)
    return {
        "trace_id": row.row_id,
        "model_call_ids": list(calls),
        "token_ids": row.token_ids,
        "generation_logprobs": row.logprobs,
        "loss_mask": row.loss_mask,
        "sampled_spans": [{"model_call_id": one.call_id, "start": one.start, "end": one.end} for one in generations],
    }


def _traces_kept(record: Mapping[str, Any]) -> Iterator[Kept]:
    for trace in cast("list[Mapping[str, Any]]", record["training_traces"]["traces"]):
        logprobs = np.asarray(trace["generation_logprobs"], np.float64).astype(np.float32)
        yield Kept(np.asarray(trace["token_ids"], np.int32), np.asarray(trace["loss_mask"], np.uint8), logprobs)


def _restore_traces(record: Mapping[str, Any]) -> Sequence[Kept]:
    return tuple(_traces_kept(record))


NEMO_GYM_TRACES: Final = Projection(
    name="nemo-gym-traces",
    title="NeMo Gym: the training traces of a rollout, in one record with its reward.",
    made_for="nemo-gym training_traces, schema 1",
    losses=_TRACE_LOSSES,
    samples=_trace_samples,
    restore=_restore_traces,
)


def training_traces(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Make the `training_traces` of rollouts as NeMo RL's `parse_gym_training_traces` reads them: lists and numbers.

    Args:
        rows: rollouts in a piece.

    Raises:
        ReconstructionError: `reward_missing`, `rewards_differ`, `not_expressible`.
        ExportError: `row_missing`.
    """
    made: list[dict[str, Any]] = []
    for record in fields_of(NEMO_GYM_TRACES, rows):
        for trace in record["training_traces"]["traces"]:
            for key in ("token_ids", "generation_logprobs", "loss_mask"):
                trace[key] = trace[key].tolist()
        made.append(record["training_traces"])
    return made
