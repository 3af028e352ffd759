"""NeMo Gym's files, as its own stores wrote them (tests/e2e/trainers/nemo_gym/record.py), and files that are broken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gristmill.captures import CapturedRollout, read_lines, write_lines
from gristmill.errors import Code, DecodeError
from gristmill.interop import Report
from gristmill.interop.nemo_gym import NEMO_GYM
from gristmill.pipeline import RebuiltRollout, run_rollout
from gristmill.records import Attribution, Capture, LogprobsMode, ParentResolution
from gristmill.selection import AllCaptured, Rejected, ReturnedHistory
from gristmill.tokens import expand

FOLDER = Path(__file__).with_name("nemo_gym_files")
Json = dict[str, Any]

JSON_WORDS = st.sampled_from(["", "x", "\ud800", "c1", "root"])
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | JSON_WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(JSON_WORDS, inner, max_size=2),
    max_leaves=4,
)


def read(path: Path, **settings: bool) -> tuple[dict[str, CapturedRollout], Report]:
    report = Report(**settings)
    rollouts = {rollout.capture.rollout_id: rollout for rollout in NEMO_GYM.read(path, report)}
    assert set(report.losses) <= set(NEMO_GYM.losses)
    return rollouts, report


def prompt_and_generation(capture: Capture, call_id: str) -> tuple[list[int], list[int]]:
    record = next(record for record in capture.records if record.model_call_id == call_id)
    by_id = {known.model_call_id: known for known in capture.records}
    whole = expand(by_id, capture.tokens, call_id).tolist()
    return whole[: record.prompt_len], whole[record.prompt_len :]


def lines(name: str) -> list[Json]:
    return [json.loads(text) for text in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


def write(path: Path, *values: Json | str) -> Path:
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def rows(rollout: CapturedRollout, policy: Any) -> RebuiltRollout:
    assert rollout.result is not None
    outcome = run_rollout(rollout.capture, rollout.result, policy)
    assert isinstance(outcome, RebuiltRollout), outcome
    return outcome


# ---- A run, as Gym leaves it -----------------------------------------------------------------------------------------


def test_a_run_becomes_its_rollouts() -> None:
    rollouts, report = read(FOLDER)
    assert sorted(rollouts) == ["7-0", "7-1", "7-2", "7-3", "8-0", "8-1"]
    assert (report.bad, report.notes) == ([], [])
    assert dict(report.losses) == {"fingerprints": 8, "observations": 4, "items": 3}
    groups = {name: rollout.result and rollout.result.group_id for name, rollout in rollouts.items()}
    assert groups == {"7-0": "7", "7-1": "7", "7-2": None, "7-3": None, "8-0": "8", "8-1": "8"}


@pytest.mark.parametrize("completed", [False, True])
def test_what_is_imported_can_be_written_and_read(completed: bool) -> None:
    """A capture that only the importer can hold would be lost with the files that it came from."""
    for rollout in read(FOLDER, completed=completed)[0].values():
        [again] = read_lines(write_lines(rollout.capture, rollout.result)).rollouts.values()
        assert again.capture.records == rollout.capture.records
        assert again.capture.lost == rollout.capture.lost
        assert again.result == rollout.result


def test_token_records_with_their_exchanges_make_rows() -> None:
    """Prompts that are stored as suffixes come out whole, retry and title stay out, the parent link is Gym's."""
    rollout = read(FOLDER)[0]["7-0"]
    outcome = rows(rollout, ReturnedHistory())
    assert outcome.selection.calls == ("c1", "c4")
    assert outcome.selection.terminal_response_id == "resp-c4"
    [row] = outcome.rows
    assert row.token_ids.tolist() == [11, 12, 13, 21, 22, 14, 15, 24, 25, 26]
    assert row.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1, 1]
    np.testing.assert_array_equal(row.logprobs, np.float32([0, 0, 0, 0, -0.125, 0, 0, -0.375, -0.5, -0.625]))
    assert (row.reward, row.group_id) == (1.0, "7")
    records = {record.model_call_id: record for record in rollout.capture.records}
    assert [record.response_status for record in records.values()] == [
        "completed",
        "completed",
        None,
        "completed",
        "failed",
    ]
    assert records["c4"].parent_call_id == "c1"
    assert records["c1"].parent_resolution == ParentResolution.ROOT
    assert records["c5"].unusable_reason == Code.CALL_FAILED
    assert records["c1"].sampling.temperature == 1.0
    exchange = rollout.capture.exchanges["c4"]
    assert exchange.request["input"][0]["content"] == "How warm is it in Oslo?"
    assert exchange.reply["id"] == "resp-c4"


def test_calls_that_gym_lost_are_lost() -> None:
    """A rollout with a hole that looked complete would be trained on a history that never was."""
    rollout = read(FOLDER, completed=True)[0]["7-1"]
    assert {call.model_call_id: call.maybe_received for call in rollout.capture.lost} == {"d2": True, "d3": True}
    assert rollout.result is not None
    refused = run_rollout(rollout.capture, rollout.result, ReturnedHistory())
    assert isinstance(refused, Rejected)
    assert refused.code == Code.CAPTURE_INCOMPLETE


def test_staged_calls_are_joined_in_the_order_of_their_manifest() -> None:
    rollout = read(FOLDER, completed=True)[0]["7-2"]
    assert rollout.result is not None
    assert (rollout.result.reward, rollout.result.value) == (0.5, {"terminal_response_id": "resp-e2"})
    [row] = rows(rollout, AllCaptured()).rows
    assert row.token_ids.tolist() == [51, 52, 53, 54, 55, 56]
    assert row.loss_mask.tolist() == [0, 0, 1, 1, 0, 1]
    np.testing.assert_array_equal(row.logprobs, np.float32([0, 0, -0.75, -1.0, 0, -0.25]))
    assert [span.weight_version for span in row.spans if span.role == "sampled"] == ["3", "3"]
    assert {span.logprobs_mode for span in row.spans if span.role == "sampled"} <= {None, LogprobsMode.UNKNOWN}
    assert rollout.capture.records[0].admitted_at == 1_700_000_000.25


def test_a_failed_capture_is_a_lost_call() -> None:
    rollout = read(FOLDER)[0]["7-3"]
    assert [(call.model_call_id, call.reason) for call in rollout.capture.lost] == [("f2", "unresolved_parent")]
    assert [record.model_call_id for record in rollout.capture.records] == ["f1"]


def test_items_with_tokens_are_calls() -> None:
    rollout = read(FOLDER, completed=True)[0]["8-0"]
    outcome = rows(rollout, ReturnedHistory())
    assert outcome.selection.calls == ("item-0", "item-2")
    [row] = outcome.rows
    assert row.token_ids.tolist() == [71, 72, 73, 74, 75, 76]
    assert row.loss_mask.tolist() == [0, 0, 1, 0, 1, 1]
    last = rollout.capture.records[1]
    assert (last.parent_call_id, last.response_status) == ("item-0", "completed")
    assert rollout.result is not None
    assert not any("generation_token_ids" in item for item in rollout.result.value["response"]["output"])


def test_what_gym_masked_stays_masked() -> None:
    rollout = read(FOLDER, completed=True)[0]["8-1"]
    assert rollout.result is not None
    assert rollout.result.failure is not None
    assert rollout.result.failure.attribution is Attribution.MASK
    assert rollout.result.failure.reason == "NeMo Gym masked it: judge is out"
    refused = run_rollout(rollout.capture, rollout.result, ReturnedHistory())
    assert isinstance(refused, Rejected)
    assert refused.code == Code.FAILURE_MASKED


def test_nothing_is_taken_for_finished_that_says_nothing() -> None:
    rollout = read(FOLDER)[0]["8-0"]
    assert rollout.result is not None
    refused = run_rollout(rollout.capture, rollout.result, ReturnedHistory())
    assert isinstance(refused, Rejected)
    assert refused.code == Code.COMPLETION_UNKNOWN


# ---- Parts of a run --------------------------------------------------------------------------------------------------


def test_a_file_of_token_records_alone() -> None:
    rollouts, report = read(FOLDER / "7-0.tokens.jsonl", completed=True)
    [rollout] = rollouts.values()
    assert rollout.result is None
    assert [record.model_call_id for record in rollout.capture.records] == ["c1", "c2", "c3", "c4"]
    assert prompt_and_generation(rollout.capture, "c4") == ([11, 12, 13, 21, 22, 14, 15], [24, 25, 26])
    assert "observations" not in report.losses


@pytest.mark.parametrize("name", ["7-2.lineage.jsonl", "receipts.json"])
def test_a_manifest_without_its_tokens(name: str, tmp_path: Path) -> None:
    shutil.copy(FOLDER / name, tmp_path)
    rollouts, report = read(tmp_path / name)
    [rollout] = rollouts.values()
    told = [(record.model_call_id, record.response_id, record.parent_call_id) for record in rollout.capture.records]
    assert told == [("e1", "resp-e1", None), ("e2", "resp-e2", "e1")]
    assert {record.unusable_reason for record in rollout.capture.records} == {Code.TOKEN_IDS_MISSING}
    assert report.losses["tokens"] == 2


def test_exchanges_alone_are_calls_without_tokens(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "7-0.capture.jsonl", tmp_path)
    unanswered = {**lines("7-0.capture.jsonl")[0], "model_call_id": "c9", "status_code": None, "response": None}
    with (tmp_path / "7-0.capture.jsonl").open("a") as file:
        file.write(json.dumps(unanswered) + "\n")
    [rollout] = read(tmp_path)[0].values()
    told = {record.model_call_id: (record.response_status, record.usable) for record in rollout.capture.records}
    assert told == {
        "c1": ("completed", False),
        "c2": ("completed", False),
        "c4": ("completed", False),
        "c5": ("failed", False),
        "c9": ("unknown", False),
    }
    assert rollout.capture.records[0].output_items


def test_a_poisoned_receipt_is_a_hole(tmp_path: Path) -> None:
    [receipt] = json.loads((FOLDER / "receipts.json").read_text())
    poisoned = {**receipt, "capture_poisoned": True, "failure_reason": "worker_capture_failed"}
    [rollout] = read(write(tmp_path / "receipt.json", poisoned))[0].values()
    assert [call.reason for call in rollout.capture.lost] == ["worker_capture_failed"]


def test_a_terminal_by_the_shape_of_the_conversation_is_no_evidence(tmp_path: Path) -> None:
    [receipt] = json.loads((FOLDER / "receipts.json").read_text())
    rollouts, report = read(write(tmp_path / "receipt.json", {**receipt, "terminal_selection": "heuristic"}))
    [rollout] = rollouts.values()
    assert (rollout.result and rollout.result.value, report.losses["terminal_guessed"]) == ({}, 1)


def test_rewards_that_differ_are_none(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "receipts.json", tmp_path)
    result = {"_ng_rollout_id": "7-2", "response": {"id": "x", "output": []}, "reward": 1.0}
    write(tmp_path / "rollouts.jsonl", result)
    rollouts, report = read(tmp_path)
    told = rollouts["7-2"].result
    assert told is not None
    assert (told.reward, report.losses["rewards"]) == (None, 1)
    assert told.value["terminal_response_id"] == "resp-e2"


def test_rollouts_without_tokens_say_so(tmp_path: Path) -> None:
    result = {"response": {"output": [{"type": "message", "role": "assistant", "content": "a"}]}, "reward": 1}
    rollouts, report = read(write(tmp_path / "old.jsonl", result, result))
    assert [rollout.capture.records for rollout in rollouts.values()] == [(), ()]
    assert list(rollouts) == ["old-1", "old-2"]
    assert report.losses["calls_unknown"] == 2


def test_attempts_have_the_ids_that_their_captures_have(tmp_path: Path) -> None:
    result = {**lines("rollouts.jsonl")[2], "_ng_attempt_index": 2}
    assert list(read(write(tmp_path / "r.jsonl", result))[0]) == ["8-0-a2"]


def _item(text: str, ids: list[int] | None = None, prompt: list[int] | None = None) -> Json:
    told: Json = {"type": "message", "role": "assistant", "content": text}
    return told if ids is None else told | _tokens(prompt or [], ids)


def _tokens(prompt: list[int], ids: list[int]) -> Json:
    return {"prompt_token_ids": prompt, "generation_token_ids": ids, "generation_log_probs": [-0.5] * len(ids)}


def test_items_are_cut_behind_those_that_carry_tokens(tmp_path: Path) -> None:
    result = {"type": "function_call_output", "call_id": "t", "output": "ok"}
    output = [
        _item("a"),
        _item("b", [2], [1]),
        _item("c", [3], [1, 2]),
        result,
        _item("d", [4], [9]),
        _item("e"),
        result,
        _item("f"),
    ]
    path = write(tmp_path / "r.jsonl", {"_ng_rollout_id": "r", "response": {"output": output}, "reward": 1})
    [rollout] = read(path)[0].values()
    told = {
        record.model_call_id: (
            [item.atoms and item.atoms[0].text for item in record.output_items],
            record.parent_call_id,
        )
        for record in rollout.capture.records
    }
    assert told == {
        "item-1": (["a", "b"], None),
        "item-2": (["c"], "item-1"),
        "item-4": (["d", "e"], None),
        "item-7": (["f"], None),
    }
    resolutions = [record.parent_resolution for record in rollout.capture.records]
    assert resolutions == ["root", "resolved", "unresolved", "unresolved"]
    assert rollout.capture.records[-1].unusable_reason == Code.TOKEN_IDS_MISSING


def test_a_folder_may_hold_other_things(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(FOLDER, folder)
    write(folder / "inputs.jsonl", {"responses_create_params": {"input": "x"}})
    write(folder / "config.json", {"seed": 1})
    write(folder / "rollouts_failures.jsonl", "not json at all")
    (folder / "7-0.tokens.state.json").write_text("{")
    (folder / "notes.txt").write_text("x")
    rollouts, report = read(folder)
    assert sorted(rollouts) == sorted(read(FOLDER)[0])
    assert sorted(Path(note.where).name for note in report.notes) == [
        "config.json",
        "inputs.jsonl",
        "rollouts_failures.jsonl",
    ]


def test_a_mark_without_a_name_is_a_hole(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "7-1.tokens.jsonl", tmp_path)
    (tmp_path / "7-1.tokens.incomplete").write_text("")
    [rollout] = read(tmp_path)[0].values()
    assert [call.model_call_id for call in rollout.capture.lost] == ["unnamed"]


def test_a_rollout_that_lost_every_call_is_there(tmp_path: Path) -> None:
    """Left out, it would be missing from its group without a word."""
    (tmp_path / "7-9.tokens.intents").write_text("c1\n")
    write(tmp_path / "7-8.tokens.jsonl")
    rollouts, _ = read(tmp_path)
    assert {name: [call.model_call_id for call in one.capture.lost] for name, one in rollouts.items()} == {
        "7-9": ["c1"]
    }
    assert not read(tmp_path / "7-8.tokens.jsonl")[0]
    (tmp_path / "7-8.tokens.incomplete").write_text("c2\n")
    assert list(read(tmp_path / "7-8.tokens.jsonl")[0]) == ["7-8"]


def test_what_has_no_place_is_counted(tmp_path: Path) -> None:
    first, *_ = lines("7-0.tokens.jsonl")
    write(tmp_path / "7-0.tokens.jsonl", {**first, "routed_experts": [[[1]]]})
    _, root, _ = lines("staged.jsonl")
    write(tmp_path / "staged.jsonl", {**root, "extras": {"a": 1}})
    finder = {"model_call_id": "e1", "fingerprint": "ab", "context_len": 1, "context_digest": "cd"}
    write(tmp_path / "7-2.lineage.jsonl", finder)
    rollouts, report = read(tmp_path)
    assert dict(report.losses) == {"routed_experts": 1, "extras": 1, "fingerprints": 2, "items": 1}
    assert [len(rollout.capture.records) for rollout in rollouts.values()] == [1, 1]


def test_fingerprints_of_items_are_no_items(tmp_path: Path) -> None:
    """Compared with ours they would match nothing, and the refusal would blame the history."""
    first, _ = lines("7-2.lineage.jsonl")
    evidence = {**first, "output_items": [{"id": "m", "fingerprint": "ab" * 32}], "response_status": "completed"}
    rollouts, report = read(write(tmp_path / "7-2.lineage.jsonl", evidence))
    [record] = rollouts["7-2"].capture.records
    assert (record.output_items, record.response_status, report.losses["items"]) == ((), "completed", 1)


def test_a_reason_of_the_capture_for_masking(tmp_path: Path) -> None:
    result = {
        **lines("rollouts.jsonl")[2],
        "instance_config": {"mask_sample": True},
        "_ng_token_capture": {"error": "x"},
    }
    [rollout] = read(write(tmp_path / "r.jsonl", result))[0].values()
    assert rollout.result is not None
    assert rollout.result.failure is not None
    assert rollout.result.failure.reason == "NeMo Gym masked it: x"


def test_envelopes_of_every_kind_lose_their_token_arrays(tmp_path: Path) -> None:
    item = _item("a", [2], [1])
    result = {"_ng_rollout_id": "r", "responses": [{"output": [[item], item, "x"]}, {"output": None}, "y"], "reward": 1}
    [rollout] = read(write(tmp_path / "r.jsonl", result))[0].values()
    assert rollout.result is not None
    assert rollout.result.value["responses"] == [{"output": [[_item("a")], _item("a"), "x"]}, {"output": None}, "y"]


def test_an_item_that_nobody_can_read_stays_with_its_call(tmp_path: Path) -> None:
    output = [{"type": "web_search_call", "id": "w"}, _item("a", [2], [1])]
    path = write(tmp_path / "r.jsonl", {"_ng_rollout_id": "r", "response": {"output": output}, "reward": 1})
    [rollout] = read(path)[0].values()
    assert [item.kind for item in rollout.capture.records[0].output_items] == ["unsupported", "text"]


# ---- Broken files ----------------------------------------------------------------------------------------------------


def _changed(key: str, value: Any) -> Callable[[Json], Json]:
    return lambda line: {**line, key: value}


ENTRY_FAULTS = {
    "another token": (_changed("prompt_token_ids", [14, 16]), "$.digest"),
    "another length": (_changed("cum_len", 9), "$.cum_len"),
    "no such parent": (_changed("parent_call_id", "c0"), "$.parent_call_id"),
    "no parent": (_changed("parent_call_id", None), "$.parent_call_id"),
    "no id": (_changed("model_call_id", ""), "$.model_call_id"),
    "ids of another type": (_changed("generation_token_ids", "21"), "$.generation_token_ids"),
    "a parent in a way that is not known": (_changed("parent_resolution", "guessed"), "$.parent_resolution"),
}


@pytest.mark.parametrize("fault", ENTRY_FAULTS)
def test_a_token_record_that_contradicts_itself(fault: str, tmp_path: Path) -> None:
    change, where = ENTRY_FAULTS[fault]
    *before, last = lines("7-0.tokens.jsonl")
    path = write(tmp_path / "7-0.tokens.jsonl", *before, change(last))
    with pytest.raises(DecodeError) as caught:
        read(path)
    assert caught.value.code == Code.FILE_MALFORMED
    assert caught.value.where == f"{path} line 4 {where}"
    rollouts, report = read(path, skip_bad=True)
    [rollout] = rollouts.values()
    assert [error.where for error in report.bad] == [caught.value.where]
    assert [record.model_call_id for record in rollout.capture.records] == ["c1", "c2", "c3"]
    assert [call.model_call_id for call in rollout.capture.lost] == ["line-4" if fault == "no id" else "c4"]


STAGED_FAULTS = {
    "another token": (_changed("token_ids_delta", [55, 57]), "$.cumulative_hash"),
    "another log-probability": (_changed("generation_log_probs_delta", [0.0, -0.5]), "$.digest"),
    "another order": (_changed("token_mask_delta", [1.0, 0.0]), "$.token_mask_delta"),
    "another mask": (_changed("token_mask_delta", [0.0, 0.5]), "$.token_mask_delta"),
    "a mask too short": (_changed("token_mask_delta", [1.0]), "$.token_ids_delta"),
    "another prefix": (_changed("prev_len", 3), "$.prev_len"),
    "another version of the digest": (_changed("digest_version", 300), "$"),
    "no digest": (_changed("extras_digest", "xyz"), "$.extras_digest"),
}


@pytest.mark.parametrize("fault", STAGED_FAULTS)
def test_a_staged_call_that_contradicts_itself(fault: str, tmp_path: Path) -> None:
    change, where = STAGED_FAULTS[fault]
    child, root, _ = lines("staged.jsonl")
    path = write(tmp_path / "staged.jsonl", root, change(child))
    with pytest.raises(DecodeError) as caught:
        read(path)
    assert caught.value.where == f"{path} line 2 {where}"


def test_a_staged_call_that_its_manifest_contradicts(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "staged.jsonl", tmp_path)
    first, second = lines("7-2.lineage.jsonl")
    write(tmp_path / "7-2.lineage.jsonl", first, {**second, "staging_digest": "0" * 64})
    with pytest.raises(DecodeError) as caught:
        read(tmp_path)
    assert caught.value.where == f"{tmp_path / 'staged.jsonl'} line 1 $.digest"


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("generation_token_ids", None, Code.TOKEN_IDS_MISSING),
        ("prompt_token_ids", None, Code.PROMPT_IDS_MISSING),
        ("prompt_token_ids", [], Code.PROMPT_IDS_MISSING),
        ("generation_log_probs", None, Code.LOGPROBS_MISSING),
        ("generation_log_probs", [-0.5], Code.LOGPROB_COUNT_MISMATCH),
        ("generation_token_ids", [1, -2], Code.TOKEN_ID_INVALID),
        ("generation_token_ids", [1, 2.5], Code.TOKEN_ID_INVALID),
        ("generation_token_ids", [1, 2**70], Code.TOKEN_ID_INVALID),
    ],
)
def test_tokens_that_may_not_be_trained(key: str, value: Any, reason: Code, tmp_path: Path) -> None:
    first = {**lines("7-0.tokens.jsonl")[0], "digest": None, "cum_len": None}
    [rollout] = read(write(tmp_path / "7-0.tokens.jsonl", {**first, key: value}))[0].values()
    assert rollout.capture.records[0].unusable_reason == reason


@pytest.mark.parametrize("value", [float("nan"), 1e300, -1e300])
def test_log_probabilities_that_are_no_finite_numbers(value: float, tmp_path: Path) -> None:
    child, root, _ = lines("staged.jsonl")
    logprobs = [0.0, value]
    path = write(tmp_path / "staged.jsonl", root, {**child, "generation_log_probs_delta": logprobs})
    [rollout] = read(path)[0].values()
    assert rollout.capture.records[1].unusable_reason == Code.LOGPROB_NOT_FINITE


@pytest.mark.parametrize(
    ("name", "line"), [("7-0.tokens.jsonl", {"schema_version": 2}), ("staged.jsonl", {"schema_version": 3})]
)
def test_newer_records_are_refused(name: str, line: Json, tmp_path: Path) -> None:
    first = lines(name)[1]
    with pytest.raises(DecodeError) as caught:
        read(write(tmp_path / name, {**first, **line}))
    assert caught.value.code == Code.SCHEMA_UNSUPPORTED


BAD_LINES = {
    "no JSON": "{",
    "no object": "[]",
    "a key twice": '{"model_call_id": "a", "model_call_id": "b", "generation_token_ids": [], "rollout_id": "7-0"}',
    "nothing of Gym's": '{"seed": 1}',
    "of another rollout": json.dumps({"rollout_id": "7-9", "model_call_id": "c", "generation_token_ids": []}),
    "an attempt that is no number": json.dumps({"response": {}, "_ng_rollout_id": "7-0", "_ng_attempt_index": "1"}),
}


@pytest.mark.parametrize("bad", BAD_LINES)
def test_lines_that_cannot_be_read(bad: str, tmp_path: Path) -> None:
    *before, last = lines("7-0.tokens.jsonl")
    path = write(tmp_path / "7-0.tokens.jsonl", *before, BAD_LINES[bad], last)
    with pytest.raises(DecodeError) as caught:
        read(path)
    assert caught.value.where.startswith(f"{path} line 4")
    [rollout] = read(path, skip_bad=True)[0].values()
    assert [record.model_call_id for record in rollout.capture.records] == ["c1", "c2", "c3", "c4"]
    assert [call.model_call_id for call in rollout.capture.lost] == ["line-4"]


def test_a_file_in_which_nothing_can_be_read_is_a_rollout_with_a_hole(tmp_path: Path) -> None:
    path = write(tmp_path / "7-5.tokens.jsonl", "{")
    [rollout] = read(path, skip_bad=True)[0].values()
    assert (rollout.capture.rollout_id, len(rollout.capture.lost)) == ("7-5", 1)


def test_a_bad_line_among_rollouts_is_nobody_elses(tmp_path: Path) -> None:
    """A hole in each of a million rollouts because of one line would refuse them all."""
    first, second, *_ = lines("rollouts.jsonl")
    path = write(tmp_path / "rollouts.jsonl", first, "{", {**second, "reward": "high"}, second)
    rollouts, report = read(path, skip_bad=True)
    assert rollouts["7-0"].capture.lost == ()
    assert [error.where.removeprefix(f"{path} ") for error in report.bad] == ["line 2", "line 4 $", "line 3 $.reward"]


@pytest.mark.parametrize("fault", [{"reward": True}, {"reward": float("inf")}, {"mask_sample": "yes"}])
def test_results_of_another_type_are_refused(fault: Json, tmp_path: Path) -> None:
    path = write(tmp_path / "rollouts.jsonl", {**lines("rollouts.jsonl")[2], **fault})
    with pytest.raises(DecodeError) as caught:
        read(path)
    assert caught.value.where.startswith(f"{path} line 1 $.")
    [rollout] = read(path, skip_bad=True)[0].values()
    assert (rollout.result, len(rollout.capture.lost)) == (None, 1)


def test_the_same_record_once_more_is_passed_over(tmp_path: Path) -> None:
    """Gym's transports may deliver a record twice."""
    first, *_ = lines("7-0.tokens.jsonl")
    rollouts, report = read(write(tmp_path / "7-0.tokens.jsonl", first, first))
    assert [len(rollout.capture.records) for rollout in rollouts.values()] == [1]
    assert [note.message for note in report.notes] == ["the same record once more: passed over"]
    other = {**first, "generation_log_probs": [-9.0, -9.0]}
    rollouts, report = read(write(tmp_path / "7-0.tokens.jsonl", first, other))
    assert [len(rollout.capture.records) for rollout in rollouts.values()] == [2]
    assert [note.message for note in report.notes] == ["this call id occurs more than once"]


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.iterdir() if path.suffix in {".json", ".jsonl"}))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(choose=st.randoms(use_true_random=False), value=JSON_VALUES)
def test_no_value_anywhere_is_an_error_of_ours(name: str, choose: Any, value: Any, tmp_path: Path) -> None:
    """One strange line among millions must not end an import that was asked to pass over bad lines."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    document = json.loads(text) if name.endswith(".json") else [json.loads(line) for line in text.splitlines()]
    holder, key = choose.choice(list(_places(document)))
    holder[key] = value
    path = tmp_path / name
    written = [document] if name.endswith(".json") else document
    path.write_text("".join(json.dumps(line) + "\n" for line in written), encoding="utf-8")
    for rollout in read(path, skip_bad=True, completed=True)[0].values():
        [again] = read_lines(write_lines(rollout.capture, rollout.result)).rollouts.values()
        assert again.capture.records == rollout.capture.records


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Give every place of a JSON document: what holds it, and its key or index."""
    if isinstance(value, dict | list):
        for key, held in value.items() if isinstance(value, dict) else enumerate(value):
            yield value, key
            yield from _places(held)


def test_it_is_certain_of_its_own_files_only(tmp_path: Path) -> None:
    certain = [path.name for path in sorted(FOLDER.iterdir()) if NEMO_GYM.certain(path)]
    assert certain == ["7-0.tokens.jsonl", "7-1.tokens.jsonl", "rollouts.jsonl", "staged.jsonl"]
    assert NEMO_GYM.certain(FOLDER)
    assert not NEMO_GYM.certain(tmp_path)
    assert not NEMO_GYM.certain(tmp_path / "none.jsonl")
    assert not NEMO_GYM.certain(write(tmp_path / "own.jsonl", {"model_call_id": "c1", "generation_token_ids": [1]}))


def test_what_is_not_there_cannot_be_read(tmp_path: Path) -> None:
    for name in ("none.jsonl", "none.json"):
        with pytest.raises(DecodeError) as caught:
            read(tmp_path / name)
        assert caught.value.code == Code.FILE_UNREADABLE
