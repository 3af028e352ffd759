"""The shared conformance data: public faults, simulated rollouts with known truth, and dialect crossings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest

from gristmill.conformance import check, read_case, run_case

Json = dict[str, Any]

DATA = Path(__file__).parent.parent / "corpus" / "conformance"
NEVER_RUN_HERE = {"gateway", "store", "security"}


def cases(name: str) -> list[Json]:
    lines = (DATA / f"{name}.jsonl").read_bytes().splitlines()
    return [read_case(line, f"{name}:{number}") for number, line in enumerate(lines, 1)]


PUBLIC = cases("public_bugs")
SELECTION = cases("selection_sample")
DIALECTS = cases("dialect_sample")


@pytest.mark.parametrize("case", PUBLIC, ids=lambda case: case["id"])
def test_public_fault(case: Json) -> None:
    # Somebody met this fault in public; a user who changes to Gristmill must not meet it again.
    outcome = run_case(case)
    checked = check(case, outcome)
    assert checked.ok, checked.problems
    if outcome["outcome"] == "unsupported":
        assert case["input"]["kind"] in NEVER_RUN_HERE


def test_every_public_fault_is_here() -> None:
    # A file that was cut short would pass without testing anything.
    assert (len(PUBLIC), len(SELECTION), len(DIALECTS)) == (37, 160, 60)


def test_dialect_crossings_give_the_truth() -> None:
    # A harness that keeps another wire format than the engine's would lose its rollouts.
    for case in DIALECTS:
        outcome = run_case(case)
        assert outcome["outcome"] == "select", (case["id"], outcome)
        assert (outcome["calls"], outcome["terminal"]) == (case["truth"], case["terminal"]), case["id"]


@pytest.fixture(scope="module")
def outcomes() -> list[tuple[Json, Json]]:
    return [(case, run_case(case)) for case in SELECTION]


def test_no_simulated_rollout_is_selected_wrongly(outcomes: list[tuple[Json, Json]]) -> None:
    # One wrong call in a batch trains on tokens that earned nothing.
    wrong = [(case["id"], checked.problems) for case, outcome in outcomes if not (checked := check(case, outcome)).ok]
    assert wrong == []


def test_what_the_reference_selects_is_selected_alike(outcomes: list[tuple[Json, Json]]) -> None:
    # A team that comes from NVIDIA's module must find every rollout that it could train there.
    differing: list[tuple[str, Any]] = []
    for case, outcome in outcomes:
        reference = case["reference_outcome"]
        if reference.get("outcome") != "select":
            continue
        same = outcome.get("calls") == reference["calls"] and outcome.get("terminal") == reference["terminal"]
        if not same and not _two_readings(case, outcome):
            differing.append((case["id"], outcome.get("code", outcome.get("calls"))))
    assert differing == []


def test_what_only_the_reference_refuses(outcomes: list[tuple[Json, Json]]) -> None:
    # Each clean rollout that both refuse must have two readings to show: an honest ambiguity, not a weakness.
    refused: list[str] = []
    selected: list[str] = []
    for case, outcome in outcomes:
        if not case["clean"] or case["reference_outcome"].get("outcome") == "select":
            continue
        if outcome["outcome"] == "select":
            selected.append(case["id"])
        else:
            refused.append(case["id"])
            assert _two_readings(case, outcome), (case["id"], outcome["code"], outcome["message"])
    assert selected == [f"gen-7-{number}" for number in (20, 29, 44, 66, 127, 143)]
    assert refused == [f"gen-7-{number}" for number in (15, 45, 84, 114, 116, 123, 126)]


def _two_readings(case: Json, outcome: Json) -> bool:
    """Tell whether the refusal shows two different readings that the history itself bears out."""
    readings = outcome.get("evidence", {}).get("readings", [])
    if outcome.get("code") != "match_ambiguous" or len(readings) != 2 or set(readings[0]) == set(readings[1]):
        return False
    served = {record["model_call_id"]: _words(record["output_items"]) for record in case["input"]["records"]}
    histories = list(_histories(case["input"]["result"]))
    return all(
        len(set(reading)) == len(reading) and list(chain.from_iterable(served[call] for call in reading)) in histories
        for reading in readings
    )


def _words(items: list[Json]) -> list[str]:
    """What items say, in the plainest form that this data needs: nothing of the product is used here."""
    said: list[str] = []
    for item in items:
        if item.get("type") == "function_call":
            given = item["arguments"]
            said.append(f"call {item['call_id']} {item['name']} {json.dumps(json.loads(given), sort_keys=True)}")
        elif item.get("type") == "reasoning":
            said.append("think " + "".join(part["text"] for part in item.get("content") or item["summary"]))
        elif item.get("role") == "assistant":
            content = item["content"]
            said.append(content if isinstance(content, str) else "".join(part["text"] for part in content))
    return [text for text in said if text]


def _histories(result: Json) -> Iterator[list[str]]:
    """Every way of reading snapshots: the last one alone, or all of them in a row."""
    envelopes = result.get("responses") or [result["response"]]
    ways: list[list[list[str]]] = []
    for envelope in envelopes:
        output = envelope["output"]
        if envelope.get("contains_transitions"):
            ways.append([_words(output[-1]), list(chain.from_iterable(map(_words, output)))])
        else:
            ways.append([_words(output)])
    for way in product(*ways):
        yield list(chain.from_iterable(way))
