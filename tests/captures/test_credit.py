"""Credit of results in capture files: what was given reads back, and anything else is refused with its path."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.captures import read_lines, write_lines
from gristmill.captures.lines import read_result
from gristmill.errors import DecodeError
from gristmill.records import Attribution, CallCredit, Capture, Failure, Result

GIVEN = Result(
    value={"messages": []},
    reward=1.0,
    advantage=-0.25,
    credits=(
        CallCredit(model_call_id="c1", reward=1.0),
        CallCredit(model_call_id="c2", start=2, end=5, reward=0.5, advantage=-1.0),
        CallCredit(model_call_id="c2", start=5, advantage=0.0),
    ),
    failure=Failure("the sandbox was gone", Attribution.MASK),
)


def written(result: Result) -> dict[str, Any]:
    [line] = write_lines(Capture(rollout_id="r"), result)
    return json.loads(line)


def read(**fields: Any) -> Result:
    [rollout] = read_lines([json.dumps({"kind": "result", "result": None, **fields}).encode()]).rollouts.values()
    assert rollout.result is not None
    return rollout.result


def back(result: Result) -> Result | None:
    [rollout] = read_lines(write_lines(Capture(rollout_id="r"), result)).rollouts.values()
    return rollout.result


def test_credit_is_written_and_read() -> None:
    """An archive that loses who earned the reward cannot be trained from."""
    line = written(GIVEN)
    assert (line["schema"], line["advantage"]) == (3, -0.25)
    assert line["credits"] == [
        {"model_call_id": "c1", "reward": 1.0},
        {"model_call_id": "c2", "start": 2, "end": 5, "reward": 0.5, "advantage": -1.0},
        {"model_call_id": "c2", "start": 5, "end": None, "advantage": 0.0},
    ]
    assert line["failure"] == {"reason": "the sandbox was gone", "attribution": "mask"}
    assert back(GIVEN) == GIVEN


def test_a_result_without_credit_is_written_as_before() -> None:
    """An older reader must go on reading what has nothing new in it."""
    plain = Result(value={"messages": []}, reward=1.0)
    assert written(plain).keys() == {"kind", "rollout_id", "attempt", "result", "reward", "group_id", "metadata"}


def test_a_file_of_a_result_holds_its_credit() -> None:
    """A harness that writes result.json has no line to put a key on."""
    told = {"messages": [], "reward": 1, "advantage": 2, "failure": {"reason": "x", "attribution": "score"}}
    result = read_result(json.dumps(told).encode())
    assert (result.reward, result.advantage, result.failure) == (1.0, 2.0, Failure("x", Attribution.SCORE))


def test_the_history_is_no_credit_where_the_result_has_none() -> None:
    """A harness whose own answer has such a key must not be credited by a copy of its file."""
    result = Result(value={"advantage": 3, "failure": {"reason": "x", "attribution": "mask"}})
    assert back(result) == result


@given(
    st.builds(
        Result,
        reward=st.none() | st.floats(allow_nan=False, allow_infinity=False),
        advantage=st.none() | st.floats(allow_nan=False, allow_infinity=False),
        credits=st.lists(
            st.builds(
                CallCredit,
                model_call_id=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
                start=st.integers(0, 9),
                end=st.none() | st.integers(10, 2**70),
                reward=st.floats(allow_nan=False, allow_infinity=False),
            ),
            unique_by=lambda credit: credit.model_call_id,
        ).map(tuple),
        failure=st.none()
        | st.builds(
            Failure, st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.sampled_from(list(Attribution))
        ),
    )
)
def test_any_credit_reads_back_equal(result: Result) -> None:
    """Numbers to the last bit, texts to the last character."""
    assert back(result) == result


@pytest.mark.parametrize(
    ("fields", "where", "got"),
    [
        ({"advantage": "1"}, "$.advantage", "string"),
        ({"advantage": True}, "$.advantage", "boolean"),
        ({"credits": {}}, "$.credits", "object"),
        ({"credits": [1]}, "$.credits[0]", "number"),
        ({"credits": [{"reward": 1}]}, "$.credits[0].model_call_id", "none"),
        ({"credits": [{"model_call_id": "", "reward": 1}]}, "$.credits[0].model_call_id", "none"),
        ({"credits": [{"model_call_id": "\ud800", "reward": 1}]}, "$.credits[0].model_call_id", "surrogate"),
        ({"credits": [{"model_call_id": "c"}]}, "$.credits[0]", "got neither"),
        ({"credits": [{"model_call_id": "c", "reward": None}]}, "$.credits[0]", "got neither"),
        ({"credits": [{"model_call_id": "c", "reward": "1"}]}, "$.credits[0].reward", "string"),
        ({"credits": [{"model_call_id": "c", "reward": 1, "start": -1}]}, "$.credits[0].start", "number"),
        ({"credits": [{"model_call_id": "c", "reward": 1, "end": 1.5}]}, "$.credits[0].end", "number"),
        ({"credits": [{"model_call_id": "c", "reward": 1, "start": 2, "end": 2}]}, "$.credits[0]", r"\[2, 2\)"),
        ({"credits": [{"model_call_id": "c", "reward": 1}] * 2}, "$.credits[1]", "overlap"),
        ({"credits": [{"model_call_id": "c", "reward": 1, "stop": 3}]}, "$.credits[0].stop", "'stop'"),
        ({"failure": "timeout"}, "$.failure", "string"),
        ({"failure": {"attribution": "mask"}}, "$.failure.reason", "none"),
        ({"failure": {"reason": "x"}}, "$.failure.attribution", "null"),
        ({"failure": {"reason": "x", "attribution": "maybe"}}, "$.failure.attribution", "'maybe'"),
        ({"failure": {"reason": "x", "attribution": "mask", "by": "me"}}, "$.failure.by", "'by'"),
    ],
)
def test_what_is_no_credit_is_refused(fields: dict[str, Any], where: str, got: str) -> None:
    """A key that is misspelt or of another type would leave the reward where it was not meant."""
    with pytest.raises(DecodeError, match=got) as caught:
        read(**fields)
    assert caught.value.where == f"line 1 {where}"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"advantage": 1e999}', "$.advantage"),
        ('{"credits": [{"model_call_id": "c", "reward": -1e999}]}', "$.credits[0].reward"),
        ('{"credits": [{"model_call_id": "c", "reward": 1, "reward": 2}]}', "$.credits[0]"),
        ('{"failure": {"reason": "x", "reason": "y", "attribution": "mask"}}', "$.failure"),
    ],
)
def test_numbers_out_of_range_and_repeated_keys(text: str, where: str) -> None:
    """Which of two values counts is anybody's guess, and an infinite reward ends a run."""
    with pytest.raises(DecodeError) as caught:
        read_result(text.encode())
    assert caught.value.where == where


def test_null_is_none() -> None:
    """As everywhere in the format."""
    assert read(advantage=None, credits=None, failure=None) == Result(value=None)
    assert msgspec.structs.replace(GIVEN, credits=()) == back(msgspec.structs.replace(GIVEN, credits=()))
