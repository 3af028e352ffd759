"""prime-rl: the order of fields that its transport types have in 0.9.0, and what they cannot hold."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import msgspec
import numpy as np
import pytest

from gristmill.errors import Code, ConfigError, ReconstructionError
from gristmill.export.trainers import Source
from gristmill.export.trainers.prime_rl import FIELDS, PRIME_RL, to_bytes, training_samples
from gristmill.records import LogprobsMode, Sampling
from tests.export.trainers.rollouts import source_of
from tests.export.trainers.trainer_page import export_demo, run_page
from tests.reconstruction.attempts import Call, chain


class TrainingSample(msgspec.Struct, array_like=True):
    """The documented schema of 0.9.0; its last two fields are left out on the wire."""

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    env_name: str
    ref_logprobs: list[float] | None = None
    mm_kwargs: dict[str, list[object]] | None = None
    routed_experts: list[object] | None = None
    mm_token_type_ids: list[int] | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None
    advantages: list[float] | None = None
    trace_id: str | None = None
    branch_index: int | None = None


def sampled(temperature: float | None, mode: LogprobsMode = LogprobsMode.UNKNOWN) -> Source:
    sampling = Sampling(temperature=temperature, logprobs_mode=mode)
    return source_of([Call("c0", [1, 2], [3, 4], fields={"sampling": sampling})])


def test_the_order_is_that_of_the_schema() -> None:
    """A field in another place is read as another field, without an error where the types agree."""
    assert TrainingSample.__struct_fields__[: len(FIELDS)] == FIELDS


def test_bytes_decode_as_samples() -> None:
    """The trainer's own decoder is the reader."""
    [row] = source_of(chain(2)).rows
    data = to_bytes([row], env_name="mill")
    [sample] = msgspec.msgpack.decode(data, type=list[TrainingSample])
    assert sample.token_ids == row.token_ids.tolist()
    assert sample.mask == [bool(bit) for bit in row.loss_mask]
    np.testing.assert_array_equal(np.array(sample.logprobs, np.float32), row.logprobs)
    assert sample.temperatures == [1.0] * row.token_ids.size
    assert sample.advantages == [0.5 * bit for bit in row.loss_mask]
    assert (sample.env_name, sample.rl_weights, sample.trace_id) == ("mill", None, None)
    assert {len(array) for array in (sample.mask, sample.logprobs, sample.temperatures, sample.advantages)} == {12}


def test_the_record_is_the_list() -> None:
    """A file that is read with another library gives the same places."""
    source = source_of(chain(2))
    [made] = PRIME_RL.samples(source, Counter())
    decoded = msgspec.msgpack.decode(to_bytes(source.rows))
    assert [value.tolist() if isinstance(value, np.ndarray) else value for value in made.fields] == decoded[0]


@pytest.mark.parametrize(
    ("source", "stated", "temperature"),
    [
        (sampled(0.7), None, 0.7),
        (sampled(0.7, LogprobsMode.PROCESSED), None, 0.7),
        (sampled(0.7), 0.2, 0.7),
        (sampled(None), 0.25, 0.25),
        (sampled(1.0, LogprobsMode.RAW), None, 1.0),
        (sampled(None), None, None),
        (sampled(0.0), None, None),
        (sampled(0.7, LogprobsMode.RAW), None, None),
    ],
)
def test_temperatures_are_known_or_refused(source: Source, stated: float | None, temperature: float | None) -> None:
    """The trainer divides logits by it: a wrong one makes every ratio wrong."""
    if temperature is None:
        with pytest.raises(ReconstructionError) as raised:
            to_bytes(source.rows, temperature=stated)
        assert raised.value.code is Code.NOT_EXPRESSIBLE
        return
    [sample] = msgspec.msgpack.decode(to_bytes(source.rows, temperature=stated), type=list[TrainingSample])
    assert np.float32(sample.temperatures).tolist() == np.float32([1.0, 1.0, temperature, temperature]).tolist()


def test_all_is_no_environment() -> None:
    """prime-rl's packer asserts on it, after the rollouts were made."""
    with pytest.raises(ConfigError):
        to_bytes(source_of(chain(1)).rows, env_name="all")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for prime-rl, which no registry has; the class is found where 0.9.0 has it."""
    for name in ("prime_rl", "prime_rl.transports", "prime_rl.transports.batch", "prime_rl.transports.batch.types"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["prime_rl.transports.batch.types"].__dict__["TrainingSample"] = TrainingSample


@pytest.mark.usefixtures("installed")
def test_samples_are_made_by_prime_rls_class() -> None:
    """Packing wants its own class."""
    [sample] = training_samples(source_of(chain(1)).rows, env_name="mill")
    assert isinstance(sample, TrainingSample)
    assert sample.env_name == "mill"


def test_without_prime_rl_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """No registry has it."""
    monkeypatch.setitem(sys.modules, "prime_rl", None)
    with pytest.raises(ConfigError) as raised:
        training_samples(source_of(chain(1)).rows)
    assert raised.value.code is Code.TRAINER_MISSING


@pytest.mark.usefixtures("installed")
def test_the_page_can_be_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are pasted from it, or bytes."""
    monkeypatch.chdir(tmp_path)
    rows = export_demo(Path("rows"))
    page = run_page("prime-rl.md")
    assert len(page["samples"]) == sum(map(len, rows))
    assert msgspec.msgpack.decode(page["data"], type=list[TrainingSample]) == page["samples"]
