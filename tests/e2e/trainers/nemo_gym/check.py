"""NeMo Gym's own classes: its stores read as captures, its records selected from, its responses made of rows.

nemo-gym wants Python 3.13.14; what is checked here runs from 3.11 on, so it is installed with --ignore-requires-python.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from golden import ROOT, Golden, rollouts  # isort: skip

import numpy as np
from msgspec.structs import replace
from nemo_gym.openai_utils import NeMoGymResponse, TokenIDLogProbMixin
from nemo_gym.rollout_correlation import maybe_rollout_id_from_run_body
from nemo_gym.token_id_capture import (
    CallRecord,
    ParentResolutionStatus,
    TokenCaptureStore,
    TokenEntry,
    assert_prefix_contiguity,
    project_main_chain_response,
    run_builder,
    stamp_lineage,
)
from nemo_gym.token_id_capture.staging.rebuild import verify_and_linearize
from nemo_gym.token_id_capture.staging.records import RolloutManifest, RolloutReceipt, StagedCallSnapshot
from record import entry, message, record

from gristmill.errors import Code, SelectionError
from gristmill.export.trainers import PROJECTIONS, Source
from gristmill.export.trainers.nemo_gym import responses
from gristmill.fingerprint import output_items
from gristmill.interop import Report, importer_named
from gristmill.interop.nemo import all_captured, final_context, returned_history
from gristmill.pipeline import RebuiltRollout, run_rollout
from gristmill.selection import AllCaptured, ReturnedHistory
from gristmill.tokens import expand
from tests.export.trainers.rollouts import generated

RECORDED = ROOT / "tests" / "interop" / "nemo_gym_files"


def main() -> None:
    golden = Golden("nemo-gym", "nemo-gym")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        record(folder / "run")
        recorded(golden, folder / "run")
        rebuilt(golden, folder / "run")
        stored(golden, folder / "stores")
    selected(golden)
    answered(golden)
    golden.report(TokenEntry, TokenCaptureStore, CallRecord, RolloutReceipt, RolloutManifest, NeMoGymResponse)


def recorded(golden: Golden, run: Path) -> None:
    """The files that the quick tests read are what this version of Gym writes."""
    names = {path.name for path in run.iterdir()}
    golden.is_type(names, {path.name for path in RECORDED.iterdir()}, "files")
    for name in sorted(names):
        golden.is_type((run / name).read_bytes(), (RECORDED / name).read_bytes(), name)


def imported(path: Path) -> dict[str, Any]:
    """Import a path; every call finished."""
    report = Report(completed=True)
    return {rollout.capture.rollout_id: rollout for rollout in importer_named("nemo-gym").read(path, report)}


def rows_of(rollout: Any, policy: Any) -> Any:
    """Select and rebuild."""
    outcome = run_rollout(rollout.capture, rollout.result, policy)
    if not isinstance(outcome, RebuiltRollout):
        raise AssertionError(outcome)
    return outcome.rows


def rebuilt(golden: Golden, run: Path) -> None:
    """Where Gym builds a rollout too, its tokens, mask and log-probabilities are ours."""
    rollouts_of = imported(run)
    out = run_builder(TokenCaptureStore(run).read_entries("7-0"), terminal_call_id="c4")
    [ours] = rows_of(rollouts_of["7-0"], ReturnedHistory())
    same_items(golden, project_main_chain_response("7-0", out)["output"], ours)
    calls = [StagedCallSnapshot.model_validate_json(line) for line in (run / "staged.jsonl").read_text().splitlines()]
    by_id = {call.model_call_id: call for call in calls}
    receipt = receipt_of(run)
    theirs = verify_and_linearize(receipt, [by_id[row.model_call_id] for row in receipt.manifest])
    [ours] = rows_of(rollouts_of["7-2"], AllCaptured())
    golden.same(ours.token_ids, theirs.token_ids, "ids")
    golden.same(ours.loss_mask, theirs.token_mask, "mask")
    golden.same(ours.logprobs, np.float32(theirs.logprobs), "log-probabilities")
    for line in (run / "rollouts.jsonl").read_text().splitlines():
        golden.is_type(maybe_rollout_id_from_run_body(json.loads(line)) in rollouts_of, True, "rollout id")


def receipt_of(run: Path) -> RolloutReceipt:
    """Read the one receipt of a run."""
    [receipt] = json.loads((run / "receipts.json").read_text())
    return RolloutReceipt.model_validate(receipt)


def same_items(golden: Golden, items: list[Any], row: Any) -> None:
    """Compare items with tokens with a row."""
    mask, logprobs = np.zeros(row.token_ids.size, np.uint8), np.zeros(row.token_ids.size, np.float32)
    bearers = [item for item in items if item.get("generation_token_ids")]
    for item in bearers:
        at = slice(len(item["prompt_token_ids"]), len(item["prompt_token_ids"]) + len(item["generation_token_ids"]))
        mask[at], logprobs[at] = 1, item["generation_log_probs"]
    golden.same([*bearers[-1]["prompt_token_ids"], *bearers[-1]["generation_token_ids"]], row.token_ids, "ids")
    golden.same(mask, row.loss_mask, "mask")
    golden.same(logprobs, row.logprobs, "log-probabilities")


def stored(golden: Golden, folder: Path) -> None:
    """Generated captures go through Gym's store, prompts as suffixes where it can, and come out the same."""
    store = TokenCaptureStore(folder)
    sources = {source.rows[0].rollout_id: source for source in generated(seed=12, count=60)}
    for name, source in sources.items():
        whole: dict[str, list[int]] = {}
        for call in source.capture.records:
            tokens = whole_tokens(source.capture, call)
            prompt, sampled = tokens[: call.prompt_len], tokens[call.prompt_len :]
            delta = source.capture.tokens[call.model_call_id].logprobs_T
            made = entry(name, call.model_call_id, prompt, sampled, [message("x", call.model_call_id)])
            made.generation_log_probs = delta[delta.size - len(sampled) :].tolist()
            parent = next((one for one, ids in whole.items() if prompt[: len(ids)] == ids and ids), None)
            if parent is not None:
                made.prompt_token_ids, made.prompt_is_delta = prompt[len(whole[parent]) :], True
            status = ParentResolutionStatus.ROOT if parent is None else ParentResolutionStatus.RESOLVED
            store.append(stamp_lineage(made, parent, parent_resolution=status, cumulative=tokens))
            whole[call.model_call_id] = tokens
    back = imported(folder)
    golden.is_type(set(back), set(sources), "rollouts")
    for name, source in sources.items():
        capture = back[name].capture
        for before, after in zip(source.capture.records, capture.records, strict=True):
            golden.same(whole_tokens(capture, after), whole_tokens(source.capture, before), "ids")
            golden.is_type(after.logprobs_digest, before.logprobs_digest, "log-probabilities")
            golden.is_type(after.prompt_len, before.prompt_len, "prompt")


def whole_tokens(capture: Any, call: Any) -> list[int]:
    """Return all tokens of a call, prompt and generation."""
    by_id = {known.model_call_id: known for known in capture.records}
    return expand(by_id, capture.tokens, call.model_call_id).tolist()


def selected(golden: Golden) -> None:
    """Our policies on Gym's records give Gym's records back."""
    root, resolved = ParentResolutionStatus.ROOT, ParentResolutionStatus.RESOLVED
    entries = [
        stamp_lineage(entry("r", "a", [1], [2], [message("One.", "m1")]), None, parent_resolution=root),
        stamp_lineage(entry("r", "b", [1], [3], [message("Two.", "m2")]), None, parent_resolution=root),
        stamp_lineage(entry("r", "c", [1, 2, 4], [5], [message("Three.", "m3")]), "a", parent_resolution=resolved),
    ]
    first, _, third = entries
    bare = [{key: value for key, value in message(text, "").items() if key != "id"} for text in ("One.", "Three.")]
    history = {"response": {"id": "made-up", "output": [bare[0], {"role": "user", "content": "go"}, bare[1]]}}
    chosen, terminal = returned_history(entries, history)
    golden.is_type([chosen[0] is first, chosen[1] is third, len(chosen)], [True, True, 2], "objects")
    golden.is_type(terminal, "resp-c", "terminal")
    chosen, terminal = all_captured(entries, {"response": {"id": "resp-b"}})
    golden.is_type(([one.model_call_id for one in chosen], terminal), (["a", "b", "c"], "resp-b"), "all captured")
    chosen, _ = final_context(entries, history)
    golden.is_type([one.model_call_id for one in chosen], ["a", "c"], "final context")
    manifest = receipt_of(RECORDED).manifest
    turns = {"ng_trajectory": {"turns": [{"model_calls": [{"response_id": one.response_id}]} for one in manifest]}}
    chosen, terminal = returned_history(manifest, turns)
    golden.is_type([one is other for one, other in zip(chosen, manifest, strict=True)], [True, True], "references")
    golden.is_type(terminal, "resp-e2", "terminal")
    chosen, _ = final_context(manifest, {"response": {"id": "resp-e2", "output": bare}})
    golden.is_type([one.model_call_id for one in chosen], ["e1", "e2"], "final context of a manifest")
    try:
        returned_history(manifest, history)
    except SelectionError as refusal:
        golden.is_type(refusal.code, Code.ATOMS_UNAVAILABLE, "refusal")
    else:
        raise AssertionError("a manifest does not say what its calls served")


def answered(golden: Golden) -> None:
    """Rows become responses that Gym's models accept, with tokens in the classes that it trains."""
    for rows in rollouts(120):
        for row, made in zip(rows, responses(rows), strict=True):
            golden.is_type(type(made), NeMoGymResponse, "class")
            dumped = made.model_dump(mode="json", exclude_none=True)
            assert_prefix_contiguity(dumped)
            same_items(golden, dumped["output"], row)
            bearers = [item for item in made.output if isinstance(item, TokenIDLogProbMixin)]
            golden.is_type(
                len(bearers), len([item for item in dumped["output"] if "prompt_token_ids" in item]), "items"
            )
    for source in generated(seed=13, count=60):
        texts(golden, source)


def texts(golden: Golden, source: Source) -> None:
    """Responses with the text of their calls, tool calls and reasoning are accepted as well."""
    served = [
        {"role": "assistant", "reasoning_content": "Hm.", "content": "I look."},
        {"type": "function_call", "call_id": "t", "name": "f", "arguments": "{}"},
    ]
    told = tuple(replace(call, output_items=output_items(served)) for call in source.capture.records)
    lines = PROJECTIONS["nemo-gym"].samples(replace(source, capture=replace(source.capture, records=told)), Counter())
    for row, line in zip(source.rows, lines, strict=True):
        fields = {**line.fields["response"], "output": [plain(item) for item in line.fields["response"]["output"]]}
        made = NeMoGymResponse.model_validate(fields)
        same_items(golden, made.model_dump(mode="json", exclude_none=True)["output"], row)
        golden.is_type({item.type for item in made.output}, {"reasoning", "message", "function_call"}, "kinds")


def plain(item: Any) -> Any:
    """Give an item with lists instead of arrays."""
    return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in item.items()}


if __name__ == "__main__":
    main()
