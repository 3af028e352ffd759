"""The gateway before a real engine: `python -m tests.e2e.vllm [SUBJECT…]`, started by vllm.sh.

Invariant: what is expected of the ledger comes from a witness between gateway and engine, or from the engine itself.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.e2e import loopback
from tests.e2e.checks import Checks
from tests.e2e.evidence import check_rows
from tests.e2e.stage import gateway
from tests.e2e.vllm import dialects, harnesses, leaving, restarts, routes, turns
from tests.e2e.vllm.engine import engine
from tests.e2e.vllm.scene import Scene
from tests.e2e.witness import Witness

SETTINGS = ("--idle-timeout-s", "6", "--log-level", "debug")


SUBJECTS: dict[str, Callable[[Scene], None]] = {
    "dialects": dialects.every_request,
    "seeds": dialects.same_seed,
    "refusals": dialects.refusals,
    "at once": dialects.at_once,
    "counting": routes.counting,
    "compressed": routes.compressed,
    "by reference": routes.by_reference,
    "turns": turns.conversations,
    "leaving": leaving.clients_that_leave,
    "finishing": leaving.finish_while_running,
    "harnesses": harnesses.harnesses,
}
LAST: dict[str, Callable[[Scene], None]] = {"restarts": restarts.gateway_restarts, "engine dies": restarts.engine_dies}


def main(wanted: list[str]) -> int:
    """Run the subjects named, or all."""
    loopback.enter()
    python, model, cache = os.environ["E2E_VLLM_PYTHON"], os.environ["E2E_MODEL"], Path(os.environ["E2E_CACHE"])
    folder = Path(tempfile.mkdtemp(prefix="e2e-vllm-"))
    checks = Checks()
    with engine(python, model, cache, folder) as server, Witness(server.url) as witness:
        with gateway(witness.url, folder, *SETTINGS) as gate:
            scene = Scene(checks, server, witness, gate, folder, [])
            for name, subject in SUBJECTS.items():
                if not wanted or name in wanted:
                    with checks.subject(name):
                        subject(scene)
            with checks.subject("rows"):
                rows(scene)
        for name, subject in LAST.items():
            if not wanted or name in wanted:
                with checks.subject(name):
                    subject(scene)
    return checks.close(folder)


def rows(scene: Scene) -> None:
    """What everything so far comes to as rows."""
    seen = scene.witness.calls()
    expected = {}
    for rollout in scene.rollouts:
        capture = scene.gateway.captured(rollout)
        mine = {record.model_call_id for record in capture.records}
        expected[rollout.name] = (capture, [call for call in seen if call.call_id in mine])
    check_rows(scene.checks, scene.gateway.ledger, scene.folder / "rows", expected)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
