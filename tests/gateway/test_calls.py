"""What a harness gets and what is stored of it, in every dialect, streamed or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from gristmill.records import Dialect
from tests.gateway.running import DIALECTS, engine_of, gateway, run, saw_finish, spoken


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_call_is_served_and_stored(tmp_path: Path, dialect: Dialect, stream: bool) -> None:
    # The one thing that everything else stands on.
    async def main() -> None:
        engine = engine_of({"content": "Hello there."})
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            answer = await rollout.ask(dialect, stream=stream)
            assert spoken(dialect, answer) == "Hello there."
            assert saw_finish(dialect, answer)
            [record] = await rollout.settled(1)
            assert record.usable
            assert record.model_call_id == answer.call_id
            assert (record.requested_model, record.model) == ("asked-name", "m")
            rollout.sound()

    run(main())
