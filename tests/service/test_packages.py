"""What people are told whose install lacks an extra."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_WITHOUT = """
import sys
for name in sys.argv.pop(1).split(","):
    sys.modules[name] = None
from gristmill.cli import main
sys.exit(main(sys.argv[1:]))
"""
_GATEWAY = "aiohttp,httptools,prometheus_client,starlette,uvicorn,uvloop,zstandard"
_ROLLOUT = """
import sys
for name in sys.argv.pop(1).split(","):
    sys.modules[name] = None
import gristmill
with gristmill.rollout(ledger="run.gristmill", upstream="http://127.0.0.1:1"):
    pass
"""


@pytest.mark.parametrize(
    ("program", "arguments", "lacking", "extras"),
    [
        (_WITHOUT, ["run", "--upstream", "http://127.0.0.1:1", "--", "true"], _GATEWAY, "gateway"),
        (_WITHOUT, ["doctor", "--upstream", "http://127.0.0.1:1"], _GATEWAY, "gateway"),
        (_WITHOUT, ["serve", "--upstream", "http://127.0.0.1:1"], _GATEWAY, "gateway"),
        (_WITHOUT, ["engine", "--script", "demo"], f"tiktoken,{_GATEWAY}", "engine"),
        (_WITHOUT, ["demo"], "tiktoken", "engine,gateway"),
        (_WITHOUT, ["demo"], "aiohttp", "engine,gateway"),
        (_ROLLOUT, [], _GATEWAY, "gateway"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, program: str, arguments: list[str], lacking: str, extras: str
) -> None:
    """The base install has no server: whoever tries one is told what adds it, and nothing is left behind."""
    done = subprocess.run(
        [sys.executable, "-c", program, lacking, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (1 if program is _ROLLOUT else 2), done.stderr
    assert f"expected the packages of gristmill[{extras}]" in done.stderr
    assert f"hint: pip install 'gristmill[{extras}]', in a clone pip install -e '.[{extras}]'\n" in done.stderr
    assert list(tmp_path.iterdir()) == []
