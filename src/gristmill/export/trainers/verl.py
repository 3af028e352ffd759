"""verl's `AgentLoopOutput`, one a row, and `DataProto`, the padded batch.

Invariant: prompt and response are the row cut at the prompt of its first call. All rows of a rollout have its one
reward, since verl takes the last one's for all; and their batch keys name one session, by which verl's own trainer
computes advantages over rollouts, not over rows.

Not here: verl's agent loop, its reward function (a rollout without a reward is scored by it), and its configuration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gristmill.errors import Code, ReconstructionError
from gristmill.export.trainers.layout import (
    METADATA,
    ROUTED_EXPERTS,
    PromptResponse,
    advantages_of,
    by_rollout,
    group_of,
    joined,
    metadata_of,
    one_reward,
    padded,
    prompt_response,
    refuse_media,
    rewards_of,
    rollout_number,
    routed_experts_of,
    versions_of,
)
from gristmill.export.trainers.losses import dropped, statements
from gristmill.export.trainers.objects import fields_of, trainer_module
from gristmill.export.trainers.projection import Kept, Projection, Sample, Source
from gristmill.reconstruction import Row, SpanRole
from gristmill.records import Int32Array

__all__ = ["METADATA", "VERL", "agent_loop_outputs", "data_proto"]

_DROPPED: Final = ("spans", "extras", "credits", "loss_weight")
_LOSSES: Final = statements(
    *_DROPPED,
    credits="Credits of calls and spans: an AgentLoopOutput has one reward; `data_proto` keeps them.",
    reward="Rows of rollouts without a reward: verl's own reward function scores them.",
    group="Rows of rollouts without a group: uid makes each a group of one, whose advantage is its reward in verl.",
    loss_weight="Rows of rollouts that make several: verl's loss counts tokens or rows; the weight is only carried.",
    turns="Rows whose num_turns is counted from spans: messages between two calls count as one.",
)
_INSTALL: Final = "pip install verl==0.9.1"


def _samples(source: Source, losses: Counter[str]) -> Sequence[Sample]:
    if any(row.reward is not None for row in source.rows):
        one_reward(source.rows)
    made: list[Sample] = []
    for row in source.rows:
        refuse_media(row, "verl")
        fields = _fields(row)
        losses.update(dropped(row, _DROPPED, kept_extras=(ROUTED_EXPERTS,) if "routed_experts" in fields else ()))
        losses["turns"] += 1
        losses["reward"] += row.reward is None
        losses["group"] += row.group_id is None
        made.append(Sample((row.row_id,), fields))
    return made


def _fields(row: Row) -> dict[str, Any]:
    cut = prompt_response(row)
    experts = routed_experts_of(row)
    return {
        "prompt_ids": cut.prompt_ids,
        "response_ids": cut.response_ids,
        "response_mask": cut.response_mask,
        "response_logprobs": cut.response_logprobs,
        **({} if experts is None else {"routed_experts": experts}),
        "reward_score": row.reward,
        "num_turns": _turns(row),
        "metrics": {},
        "extra_fields": {
            # verl reads it off the last output of a rollout that was scored elsewhere.
            "reward_extra_info": {},
            **_steps(row),
            METADATA: metadata_of(row),
        },
    }


def _turns(row: Row) -> int:
    """Count calls, and what stands before and between them."""
    calls = {span.call_id for span in row.spans if span.role is not SpanRole.CONTEXT}
    return len(calls) + sum(span.role is SpanRole.CONTEXT for span in row.spans)


def _steps(row: Row) -> dict[str, int]:
    """Return the versions of the weights under the names by which verl tells stale rollouts."""
    versions = versions_of(row)
    return {} if versions is None else {"min_global_steps": versions.oldest, "max_global_steps": versions.newest}


def _restore(fields: Mapping[str, Any]) -> Sequence[Kept]:
    names = ("prompt_ids", "response_ids", "response_mask", "response_logprobs")
    return (joined(*(fields[name] for name in names)),)


VERL: Final = Projection(
    name="verl",
    title="verl: one AgentLoopOutput a row; the rows of a rollout are the outputs of one session.",
    made_for="verl 0.9.1",
    losses=_LOSSES,
    samples=_samples,
    restore=_restore,
)


def agent_loop_outputs(rows: Iterable[Row]) -> list[Any]:
    """Make verl's own outputs, `verl.experimental.agent_loop.agent_loop.AgentLoopOutput`.

    Those of one rollout are what an agent loop's `run` returns: a list of them under verl's trainer since 0.9, and a
    single one under the older trainer, which takes no rollout of several rows.

    Args:
        rows: rollouts in a piece.

    Raises:
        ConfigError: `trainer_missing`.
        ReconstructionError: `not_expressible`, `rewards_differ`.
        ExportError: `row_missing`.
    """
    output_class = trainer_module("verl.experimental.agent_loop.agent_loop", _INSTALL).AgentLoopOutput
    lists = ("prompt_ids", "response_ids", "response_mask", "response_logprobs")
    made = fields_of(VERL, rows)
    return [output_class(**{**fields, **{name: fields[name].tolist() for name in lists}}) for fields in made]


def data_proto(
    rows: Iterable[Row],
    *,
    pad_token_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
    call_rewards: bool = True,
) -> Any:
    """Make verl's own batch, `verl.DataProto`, of B rows, P prompt and R response tokens.

    Args:
        rows: rollouts in a piece.
        pad_token_id: the tokenizer's; padding is told by the attention mask, never by this id.
        prompt_length: P; by default that of the longest prompt.
        response_length: R; by default that of the longest response.
        call_rewards: add the rewards of calls and spans to `rm_scores`, each on the last token of its span. verl takes
            the sum of a row for its score. With False only the rollout's reward stands there.

    Returns:
        tensors `prompts` int64[B, P] padded on the left, `responses` and `response_mask` int64[B, R] padded on the
        right, `input_ids`, `attention_mask` and `position_ids` int64[B, P + R], `rollout_log_probs` float32[B, R] nats;
        `rm_scores` float32[B, R], the reward on the last token of each response, unless no rollout has one;
        `advantages` float32[B, R] where they were given; `routed_experts` int16[B, P + R, layers, experts of a token]
        where all rows have them. Arrays `uid` (the group, or a name of its own), `batch_key` (`uid_session_index`, for
        verl's `compute_advantage_for_multi_trajectories`), `rollout_id`, `attempt`, `row_id`, `loss_weight`,
        `__num_turns__`.

    Raises:
        ConfigError: `trainer_missing`.
        ReconstructionError: `row_too_long`; `reward_missing` and `advantage_required`: some have one and some have
            none; `rewards_differ`; `not_expressible`: media, or rewards of calls in a rollout of several rows;
            `nothing_to_train`.
        ExportError: `row_missing`.
    """
    torch, proto = trainer_module("torch", _INSTALL), trainer_module("verl", _INSTALL).DataProto
    rollouts = list(by_rollout(rows))
    held = [row for rollout in rollouts for row in rollout]
    if not held:
        raise ReconstructionError(Code.NOTHING_TO_TRAIN, "expected rows to make a batch of, got none")
    for row in held:
        refuse_media(row, "verl")
    cuts = [prompt_response(row) for row in held]
    prompts = max(cut.prompt_ids.size for cut in cuts) if prompt_length is None else prompt_length
    responses = max(cut.response_ids.size for cut in cuts) if response_length is None else response_length
    tensors = _tokens(cuts, prompts, responses, pad_token_id)
    tensors |= _rewards(rollouts, responses, call_rewards)
    if any(row.advantage is not None or any(credit.advantage is not None for credit in row.credits) for row in held):
        advantages = [advantages_of(row)[row.prompt_len :] for row in held]
        tensors["advantages"] = padded(advantages, responses, 0.0, dtype=np.float32, what="response of row")
    tensors |= _experts(held, prompts, responses)
    return proto.from_dict(
        tensors={name: torch.from_numpy(array) for name, array in tensors.items()}, non_tensors=_arrays(held)
    )


def _tokens(cuts: Sequence[PromptResponse], prompts: int, responses: int, pad: int) -> dict[str, npt.NDArray[Any]]:
    prompt_ids, response_ids = [cut.prompt_ids for cut in cuts], [cut.response_ids for cut in cuts]
    what = "response of row"
    batch = {
        "prompts": padded(prompt_ids, prompts, pad, side="left", what="prompt of row"),
        "responses": padded(response_ids, responses, pad, what=what),
        "response_mask": padded([cut.response_mask for cut in cuts], responses, 0, what=what),
    }
    attention = np.concatenate(
        [
            padded([np.ones_like(ids) for ids in prompt_ids], prompts, 0, side="left"),
            padded([np.ones_like(ids) for ids in response_ids], responses, 0),
        ],
        axis=1,
    )
    logprobs = [cut.response_logprobs for cut in cuts]
    return {
        **batch,
        "input_ids": np.concatenate([batch["prompts"], batch["responses"]], axis=1),
        "attention_mask": attention,
        "position_ids": np.maximum(attention.cumsum(axis=1) - 1, 0),
        "rollout_log_probs": padded(logprobs, responses, 0.0, dtype=np.float32, what=what),
    }


def _rewards(rollouts: Sequence[Sequence[Row]], width: int, calls: bool) -> dict[str, npt.NDArray[Any]]:
    """Return `rm_scores`, as verl itself has it: not at all where no rollout has a reward."""
    if all(row.reward is None for rollout in rollouts for row in rollout):
        return {}
    rewards = [
        made[row.prompt_len :]
        for rollout in rollouts
        for row, made in zip(rollout, rewards_of(rollout, calls=calls), strict=True)
    ]
    return {"rm_scores": padded(rewards, width, 0.0, dtype=np.float32, what="response of row")}


def _experts(rows: Sequence[Row], prompts: int, responses: int) -> dict[str, npt.NDArray[Any]]:
    """Return `routed_experts`, zeros where nothing was recorded, if all rows have them in one shape."""
    held: list[Int32Array] = []
    for row in rows:
        experts = routed_experts_of(row)
        if experts is None or (held and experts.shape[1:] != held[0].shape[1:]):
            return {}
        held.append(experts)
    batch = np.zeros((len(rows), prompts + responses, *held[0].shape[1:]), np.int16)
    for index, (row, experts) in enumerate(zip(rows, held, strict=True)):
        start = prompts - row.prompt_len
        batch[index, start : start + experts.shape[0]] = experts
    return {"routed_experts": batch}


def _arrays(rows: Sequence[Row]) -> dict[str, npt.NDArray[Any]]:
    return {
        "uid": _objects(group_of(row) for row in rows),
        "batch_key": _objects(f"{group_of(row)}_{rollout_number(row)}_{row.row_index}" for row in rows),
        "rollout_id": _objects(row.rollout_id for row in rows),
        "attempt": np.array([row.attempt for row in rows], np.int64),
        "row_id": _objects(row.row_id for row in rows),
        "loss_weight": np.array([row.loss_weight for row in rows], np.float64),
        "__num_turns__": np.array([_turns(row) for row in rows], np.int32),
    }


def _objects(values: Iterable[str]) -> npt.NDArray[Any]:
    return np.array(list(values), dtype=object)
