"""AReaL: shapes, types and weight versions of a trajectory."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest

from gristmill.errors import Code, ConfigError, ReconstructionError
from gristmill.export.trainers import Source
from gristmill.export.trainers.areal import AREAL, trajectories
from gristmill.records import WeightSpan
from tests.export.trainers.rollouts import source_of
from tests.reconstruction.attempts import Call, chain

# Type and number of axes, as AReaL's own workflows return them.
SCHEMA = {
    "input_ids": ("int32", 2),
    "loss_mask": ("int32", 2),
    "logprobs": ("float32", 2),
    "versions": ("int32", 2),
    "attention_mask": ("bool", 2),
    "rewards": ("float32", 1),
}


def versioned(*versions: WeightSpan) -> Source:
    return source_of([Call("c0", [1, 2], [3, 4, 5], fields={"weight_versions": versions})])


def made(source: Source, losses: Counter[str] | None = None) -> Any:
    [sample] = AREAL.samples(source, Counter() if losses is None else losses)
    return sample.fields


def test_a_trajectory_is_a_batch_of_one() -> None:
    """AReaL concatenates trajectories along their first axis."""
    fields = made(source_of(chain(2)))
    assert {name: (array.dtype.name, array.ndim) for name, array in fields.items()} == SCHEMA
    assert {array.shape for name, array in fields.items() if name != "rewards"} == {(1, 12)}
    assert fields["rewards"].tolist() == [1.0]
    assert fields["attention_mask"].all()


def test_trained_tokens_have_the_version_that_sampled_them() -> None:
    """Staleness, and the approximation of proximal log-probabilities, are computed of it."""
    losses = Counter[str]()
    fields = made(versioned(WeightSpan("v7", 0, 2), WeightSpan("step-8", 2, 3)), losses)
    assert fields["versions"].tolist() == [[-1, -1, 7, 7, 8]]
    assert losses["versions"] == 0


def test_a_version_that_nobody_recorded_is_none() -> None:
    """It is no version of 0."""
    losses = Counter[str]()
    fields = made(versioned(WeightSpan("7", 0, 2)), losses)
    assert fields["versions"].tolist() == [[-1, -1, 7, 7, -1]]
    assert losses["versions"] == 1


def test_tokens_trained_elsewhere_have_no_version() -> None:
    """They are context here."""
    versions = (WeightSpan("3", 0, 2),)
    calls = [
        Call("c0", [1], [2, 3], fields={"weight_versions": versions}),
        Call("c1", [1, 2, 3, 4], [5, 6], parent="c0", fields={"weight_versions": versions}),
        Call("c2", [1, 2, 3, 9], [7, 8], parent="c0", fields={"weight_versions": versions}),
    ]
    second = AREAL.samples(source_of(calls), Counter())[1].fields
    assert second["versions"].tolist() == [[-1, -1, -1, -1, 3, 3]]


@pytest.mark.parametrize("version", ["default", "", "-1", "7b", "v1.2", "99999999999", str(2**31)])
def test_a_version_that_is_no_number_is_refused(version: str) -> None:
    """A hash, or a name, has no distance to the current version."""
    with pytest.raises(ReconstructionError) as raised:
        made(versioned(WeightSpan(version, 0, 3)))
    assert raised.value.code is Code.NOT_EXPRESSIBLE


def test_the_largest_version_is_taken() -> None:
    """Versions are 32 bits in AReaL."""
    assert made(versioned(WeightSpan(str(2**31 - 1), 0, 3)))["versions"].max() == np.iinfo(np.int32).max


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors are PyTorch's."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError) as raised:
        trajectories(source_of(chain(1)).rows)
    assert raised.value.code is Code.TRAINER_MISSING
