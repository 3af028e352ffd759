"""Builds on Ray: the same function, the same bytes.

One instance serves all tests; it is of this machine, and reports to nobody.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill.credit import AdvantageKind
from gristmill.engine import BuildOptions, Engine, build
from gristmill.errors import Code, ConfigError, ExportError
from tests.cli.stories import run
from tests.engine.builds import DEADLY, contents, many_parts

ray = pytest.importorskip("ray", reason="Ray is not installed: the extra `ray` has it, and so does `dev`")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Ray instance of this machine; its workers import from the folder."""
    folder = tmp_path_factory.mktemp("policies")
    before = dict(os.environ)
    os.environ.pop("RAY_ADDRESS", None)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error", object_store_memory=10**8)
    yield folder
    ray.shutdown()
    os.environ.clear()
    os.environ.update(before)


def test_partitions_are_equal_to_those_of_processes(
    instance: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a partition was made must not be in it."""
    many_parts(tmp_path / "runs")
    options = BuildOptions(advantage=AdvantageKind.GROUP_MEAN)
    build(tmp_path / "runs", tmp_path / "local", options, jobs=2)
    build(tmp_path / "runs", tmp_path / "ray", options, engine=Engine.RAY, jobs=2)
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
    (tmp_path / "ray" / "run=a" / "part=00001" / "manifest.json").unlink()
    ran = run(
        capsys, "build", tmp_path / "runs", tmp_path / "ray", "--engine", "ray", "--advantage", "group_mean", "--json"
    )
    assert (ran.code, ran.json["made"]) == (0, 1)
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


def test_a_policy_of_ones_own_on_ray(instance: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers import it from the folders that the job names."""
    many_parts(tmp_path / "runs")
    (instance / "policy_on_ray.py").write_text(DEADLY.replace("00030", "nobody"), encoding="utf-8")
    monkeypatch.syspath_prepend(instance)
    options = BuildOptions(policy="policy_on_ray:deadly")
    paths = (str(instance),)
    build(tmp_path / "runs", tmp_path / "local", options, import_paths=paths)
    build(tmp_path / "runs", tmp_path / "ray", options, engine=Engine.RAY, jobs=2, import_paths=paths)
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


def test_an_error_of_a_partition_is_the_error_of_the_build(instance: Path, tmp_path: Path) -> None:
    """With its own code and place, not with Ray's traceback."""
    many_parts(tmp_path / "runs")
    path = next((tmp_path / "runs" / "run=b").glob("calls-*.parquet"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ExportError) as caught:
        build(tmp_path / "runs", tmp_path / "rows", engine=Engine.RAY, jobs=2)
    assert caught.value.code is Code.MANIFEST_DIFFERS
    assert "run=b" in caught.value.message


def test_a_worker_of_ray_that_dies_ends_the_build(
    instance: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would start the partition again, and lose the next worker."""
    many_parts(tmp_path / "runs")
    (instance / "deadly_on_ray.py").write_text(DEADLY, encoding="utf-8")
    monkeypatch.syspath_prepend(instance)
    options = BuildOptions(policy="deadly_on_ray:deadly")
    with pytest.raises(ExportError) as caught:
        build(tmp_path / "runs", tmp_path / "rows", options, engine=Engine.RAY, jobs=2, import_paths=(str(instance),))
    assert caught.value.code is Code.WORKER_LOST
    assert not (tmp_path / "rows" / "summary.json").exists()


def test_ray_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install, not a traceback."""
    import sys

    many_parts(tmp_path / "runs")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError) as caught:
        build(tmp_path / "runs", tmp_path / "rows", engine=Engine.RAY, jobs=2)
    assert "gristmill[ray]" in (caught.value.hint or "")
