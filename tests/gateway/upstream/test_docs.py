"""The pages on engines name what adapters really send."""

from __future__ import annotations

from pathlib import Path

import pytest

from gristmill.cli import main
from gristmill.gateway.upstream.adapters import engine_for
from gristmill.gateway.upstream.protocol import Capabilities, EngineKind, Support
from gristmill.records import Dialect

PAGES = Path(__file__).parents[3] / "docs" / "engines"


@pytest.mark.parametrize(("kind", "page"), [("vllm", "vllm"), ("sglang", "sglang"), ("generic", "other")])
def test_every_field_that_is_sent_is_documented(kind: str, page: str) -> None:
    """A user who looks at an engine's log must find every field explained."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    every = dict.fromkeys(("token_ids", "logprobs", "weight_versions"), Support.YES)
    engine = engine_for(Capabilities(kind=EngineKind(kind), **every))
    for route in (Dialect.CHAT, Dialect.COMPLETIONS):
        for stream in (False, True):
            body = engine.ask(route, {}, "c", stream=stream).body
            assert body is not None
            for name in set(body) - {"stream", "stream_options"}:
                assert f"`{name}`" in text
            assert ("stream_options" in body) is stream
    assert "stream_options.include_usage" in text


def test_the_report_that_is_shown_has_every_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A line that the page lacks is one that a reader does not understand."""
    from gristmill.cli.doctor import _NEEDED, _USEFUL

    text = (PAGES / "index.md").read_text(encoding="utf-8")
    for asked in (*_NEEDED, *_USEFUL):
        assert f"\n{asked.title} " in text
        assert f" {asked.purpose}\n" in text
    main(["doctor", "--help"])
    for option in ("--upstream", "--engine", "--model", "--upstream-key-env", "--json"):
        assert option in capsys.readouterr().out or option in text
