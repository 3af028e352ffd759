from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import Code, DecodeError
from gristmill.scripted import SHIPPED, read_script, script_from

OK = {"content": "ok"}

REFUSED: list[tuple[Any, str]] = [
    ([], "$"),
    ({}, "$.rules"),
    ({"rules": []}, "$.rules"),
    ({"rules": [3]}, "$.rules[0]"),
    ({"rules": [{"reply": OK}], "modell": "x"}, "$"),
    ({"rules": [{"reply": OK}], "split": 2}, "$.split"),
    ({"rules": [{"reply": OK}], "models": "x"}, "$.models"),
    ({"rules": [{"when": {}}]}, "$.rules[0]"),
    ({"rules": [{"reply": OK, "turns": [OK]}]}, "$.rules[0]"),
    ({"rules": [{"reply": OK, "then": OK}]}, "$.rules[0]"),
    ({"rules": [{"reply": OK}, {"reply": {"contents": "x"}}]}, "$.rules[1].reply"),
    ({"rules": [{"turns": []}]}, "$.rules[0].turns"),
    ({"rules": [{"turns": [OK, [OK, {"content": 3}]]}]}, "$.rules[0].turns[1][1].content"),
    ({"rules": [{"reply": []}]}, "$.rules[0].reply"),
    ({"rules": [{"when": {"turns": 1}, "reply": OK}]}, "$.rules[0].when"),
    ({"rules": [{"when": {"turn": [3, 1]}, "reply": OK}]}, "$.rules[0].when.turn"),
    ({"rules": [{"when": {"try": -1}, "reply": OK}]}, "$.rules[0].when.try"),
    ({"rules": [{"when": {"user": {"matches": "("}}, "reply": OK}]}, "$.rules[0].when.user.matches"),
    ({"rules": [{"when": {"header": {"x": {"matches": "("}}}, "reply": OK}]}, "$.rules[0].when.header.x.matches"),
    ({"rules": [{"when": {"not": {"offers": "@shell"}}, "reply": OK}]}, "$.rules[0].when.not.offers"),
    ({"rules": [{"name": 3, "reply": OK}]}, "$.rules[0].name"),
    ({"rules": [{"reply": {"reasoning": "hm"}}]}, "$.rules[0].reply"),
    ({"rules": [{"reply": {"content": "a", "json": {}}}]}, "$.rules[0].reply"),
    ({"rules": [{"reply": {"content": "a", "raw": "b"}}]}, "$.rules[0].reply"),
    ({"rules": [{"reply": {"tool_calls": [{"name": "@shell"}]}}]}, "$.rules[0].reply.tool_calls[0].name"),
    ({"rules": [{"reply": {"content": "{{turns}}"}}]}, "$.rules[0].reply"),
    ({"rules": [{"reply": {"content": "{{match.one}}"}}]}, "$.rules[0].reply"),
    ({"rules": [{"reply": {"fault": {"kind": "explode"}}}]}, "$.rules[0].reply.fault.kind"),
    ({"rules": [{"reply": {"fault": {"kind": "status", "status": 200}}}]}, "$.rules[0].reply.fault.status"),
    ({"rules": [{"reply": {"wrong": {"ids": 1}}}]}, "$.rules[0].reply.wrong"),
    ({"rules": [{"reply": {"chunks": 0}}]}, "$.rules[0].reply.chunks"),
]


@pytest.mark.parametrize(("script", "where"), REFUSED, ids=[str(number) for number in range(len(REFUSED))])
def test_what_is_not_a_script_is_refused_at_its_place(script: Any, where: str) -> None:
    """A key that is passed over is a test that tests nothing."""
    with pytest.raises(DecodeError) as refused:
        script_from(script)
    assert refused.value.where == where
    assert refused.value.code is Code.FILE_MALFORMED
    assert refused.value.hint


def test_files_of_both_kinds(tmp_path: Path) -> None:
    """Long scripts are lines, short ones one object."""
    one, lines = tmp_path / "script.json", tmp_path / "script.jsonl"
    one.write_text(json.dumps({"seed": 3, "rules": [{"reply": OK}, {"reply": OK}]}))
    lines.write_text('{"seed": 3}\n\n{"reply": {"content": "ok"}}\n{"reply": {"content": "ok"}}\n')
    assert read_script(one) == read_script(lines)
    assert read_script(str(one)).settings.seed == 3


@pytest.mark.parametrize("text", ["", "{", '{"rules": 3}', "[]"])
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_broken_files_are_refused_by_name(tmp_path: Path, text: str, suffix: str) -> None:
    """The message has to say which file is meant."""
    path = tmp_path / f"script{suffix}"
    path.write_text(text)
    with pytest.raises(DecodeError) as refused:
        read_script(path)
    assert str(path) in refused.value.message


def test_a_file_that_is_not_there() -> None:
    """The hint names the scripts that ship."""
    with pytest.raises(DecodeError) as refused:
        read_script("/nonexistent/script.json")
    assert refused.value.code is Code.FILE_UNREADABLE
    assert "agent" in str(refused.value.hint)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_scripts_are_scripts(name: str) -> None:
    """They are the first thing a user runs."""
    script = read_script(name)
    assert len({rule.name for rule in script.rules}) == len(script.rules)
