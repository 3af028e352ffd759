"""One gateway for several harnesses at once, and one that is killed under a harness and comes back.

Invariant: every attempt is judged by itself, against what the witness saw of it.
"""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

from gristmill.scripted import ScriptedEngine
from tests.e2e.checks import Checks
from tests.e2e.evidence import check_rows, check_tokens
from tests.e2e.harness import scripts
from tests.e2e.harness.launch import MODEL, Endpoint, Folder, Harness, Ran, run
from tests.e2e.harness.played import check_attempt, check_chain, ids_of, read_played
from tests.e2e.stage import Rollout, gateway, until
from tests.e2e.witness import Witness

__all__ = ["killed", "together"]


def together(checks: Checks, harnesses: Sequence[Harness], root: Path, path: str) -> None:
    """All harnesses at the same time, each with an attempt of its own, by key alone and by address."""
    root.mkdir(parents=True)
    with (
        ScriptedEngine(scripts.for_any()).serve() as engine_url,
        Witness(engine_url) as witness,
        gateway(witness.url, root, "--model", MODEL) as gate,
    ):
        ended: dict[str, tuple[Rollout, Folder, Ran]] = {}

        def one(number: int, harness: Harness) -> None:
            rollout = gate.begin(f"together-{number}")
            folder = Folder(root / str(number)).make()
            task = f"{scripts.TASK} This is job {number}, for {harness.name}."
            base = rollout.prefixed if number % 2 else rollout.base
            ended[harness.name] = (
                rollout,
                folder,
                run(harness.launch(Endpoint(base, rollout.key, MODEL), folder, task), folder, path),
            )

        threads = [threading.Thread(target=one, args=each) for each in enumerate(harnesses)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expected = {}
        for harness in harnesses:
            rollout, folder, ran = ended[harness.name]
            checks.check(f"{harness.name} ends well", ran.status == 0, f"{ran.out[-1000:]}\n{ran.err[-1000:]}")
            gate.finish(rollout, harness.history(ran, folder))
            number = rollout.name.split("-")[1]
            seen = [call for call in witness.calls() if f"This is job {number}," in json.dumps(call.body["messages"])]
            made = read_played(gate.ledger, rollout.attempt_key, seen, engine_url, harness.options)
            check_attempt(checks, harness, made)
            main = made.of("main")
            checks.equal(f"{harness.name}: three turns", 3, len(main))
            check_chain(checks, harness.name, main)
            checks.equal(f"{harness.name}: the history selects them", ids_of(main), made.selected)
            if not harness.options:
                expected[rollout.name] = (made.capture, seen)
        check_rows(checks, gate.ledger, root / "rows", expected)


def killed(checks: Checks, harness: Harness, root: Path, path: str) -> None:
    """The gateway is killed while the engine answers, and started again; the harness asks again and goes on."""
    root.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder, ran = Folder(root).make(), list[Ran]()
    with ScriptedEngine(scripts.slow(harness)).serve() as engine_url, Witness(engine_url) as witness:
        with gateway(witness.url, root, port=port) as gate:
            rollout = gate.begin("mend")
            launch = harness.launch(Endpoint(rollout.base, rollout.key, MODEL), folder, scripts.TASK)
            thread = threading.Thread(target=lambda: ran.append(run(launch, folder, path)))
            thread.start()

            def amid() -> bool:
                told = [call for call in witness.calls() if call.body.get("tools")]
                return len(told) == 3 and len(told[-1].raw) > 2000 and told[-1].ended == "running"

            until("the third turn", amid, 120)
            gate.running.send_signal(signal.SIGKILL)
            gate.running.wait()
        with gateway(witness.url, root, port=port) as gate:
            thread.join(150)
            checks.check("the harness ends well", ran[0].status == 0, f"{ran[0].out[-1500:]}\n{ran[0].err[-1500:]}")
            gate.finish(rollout, harness.history(ran[0], folder))
            made = read_played(gate.ledger, rollout.attempt_key, witness.calls(), engine_url, harness.options)
    lost = [call.model_call_id for call in made.capture.lost]
    broken = [call.call_id for call in made.seen if call.ended == "client gone"]
    checks.equal("the call that ran is lost, and said to be", broken, lost)
    checks.equal("one call was running", 1, len(lost))
    check_tokens(checks, made.capture, [call for call in made.seen if call.call_id not in lost])
    main = made.of("main")
    # opencode may keep an empty message of the try that broke off, which the script counts as a turn.
    checks.check("all turns", len(main) in ({5, 6} if harness.name == "opencode" else {6}), len(main))
    check_chain(checks, "main agent", main)
    checks.equal("the history selects them", ids_of(main), made.selected)
