"""Tinker: what a Datum's arrays hold."""

from __future__ import annotations

import sys
from collections import Counter

import msgspec
import numpy as np
import pytest

from gristmill.errors import Code, ConfigError, ReconstructionError
from gristmill.export.trainers import Source
from gristmill.export.trainers.tinker import TINKER, datums
from gristmill.reconstruction import Row, TokenCredit
from tests.export.trainers.rollouts import source_of
from tests.reconstruction.attempts import chain


def fields(row: Row) -> dict[str, object]:
    [sample] = TINKER.samples(Source([row]), Counter())
    assert isinstance(sample.fields, dict)
    return sample.fields


def test_position_t_predicts_token_t_plus_one() -> None:
    """Shifted by one too many or too few, every token is trained against its neighbour."""
    [row] = source_of(chain(2)).rows
    made = fields(row)
    inputs = made["loss_fn_inputs"]
    assert list(made["model_input"]) == [0, 1, 2, 1000, 1001, 1002, 10, 11, 12, 1010, 1011]
    assert list(inputs["target_tokens"]) == [1, 2, 1000, 1001, 1002, 10, 11, 12, 1010, 1011, 1012]
    assert list(inputs["mask"]) == [0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1]
    assert list(inputs["advantages"]) == [0, 0, 0.5, 0.5, 0.5, 0, 0, 0, 0.5, 0.5, 0.5]
    np.testing.assert_array_equal(inputs["logprobs"], row.logprobs[1:])


def test_credits_stand_before_the_rollouts_advantage() -> None:
    """A call that was worth less than its rollout must not get the rollout's advantage."""
    [row] = source_of(chain(2)).rows
    credits = (TokenCredit("c0", 3, 5, reward=1.0, advantage=-2.0), TokenCredit("c1", 9, 12, reward=7.0))
    source = Source([msgspec.structs.replace(row, credits=credits)])
    losses = Counter[str]()
    [sample] = TINKER.samples(source, losses)
    assert list(sample.fields["loss_fn_inputs"]["advantages"]) == [0, 0, -2, -2, 0.5, 0, 0, 0, 0.5, 0.5, 0.5]
    assert losses["credit_rewards"] == 2


@pytest.mark.parametrize(("end", "code"), [(12, None), (11, Code.ADVANTAGE_REQUIRED)])
def test_every_trained_token_needs_an_advantage(end: int, code: Code | None) -> None:
    """Half an advantage is none: the other tokens would be trained with 0, which says that they do not matter."""
    [row] = source_of(chain(2), advantage=None).rows
    credits = (TokenCredit("c0", 3, 6, advantage=1.0), TokenCredit("c1", 9, end, advantage=1.0))
    row = msgspec.structs.replace(row, credits=credits)
    if code is None:
        assert list(fields(row)["loss_fn_inputs"]["advantages"]) == [0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1]
        return
    with pytest.raises(ReconstructionError) as raised:
        fields(row)
    assert raised.value.code is code


def test_a_token_without_a_predictor_is_refused() -> None:
    """The first token of a row has no position before it that could predict it."""
    [row] = source_of(chain(1)).rows
    mask = np.ones_like(row.loss_mask)
    with pytest.raises(ReconstructionError) as raised:
        fields(msgspec.structs.replace(row, loss_mask=mask))
    assert raised.value.code is Code.NOT_EXPRESSIBLE


def test_without_tinker_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first thing a user meets is a package that is not there."""
    monkeypatch.setitem(sys.modules, "tinker", None)
    with pytest.raises(ConfigError) as raised:
        datums(source_of(chain(1)).rows)
    assert raised.value.code is Code.TRAINER_MISSING
    assert raised.value.hint == "pip install tinker"
