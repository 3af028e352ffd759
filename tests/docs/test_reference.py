"""The reference names everything that users can meet, and is what its generator makes."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from gristmill.cli import main
from gristmill.cli.app import COMMANDS
from gristmill.errors import CODE_MEANINGS, Code
from gristmill.gateway.app import Gateway
from gristmill.gateway.settings import load_settings
from gristmill.ledger import SqliteLedger
from gristmill.scripted import ScriptedEngine
from tests.cli.stories import good_story, refused_story, story, write_story
from tests.docs.pages import ROOT, anchors, prose

DOCS = ROOT / "docs"
RECORDINGS = ROOT / "src" / "gristmill" / "demo" / "data"
CORPUS = ROOT / "tests" / "corpus"


class _Key(NamedTuple):
    section: str | None
    anything: bool


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_current() -> None:
    """Run `python docs/generate.py` after a change of codes, commands or benchmark results."""
    for path, text in _generator().generated().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.relative_to(ROOT)} is stale"


def test_benchmark_results_become_a_table() -> None:
    """Numbers that are copied by hand are wrong by the next run."""
    result = {"benchmark": "rows", "name": "work | more", "seconds": 0.0012, "floor_seconds": 4e-7, "ratio": 3000.0}
    machine = {"python": "3.11.9", "system": "Linux x86_64", "cpus": 2}
    stored = {"benchmark": "ledger", "name": "bytes of tokens", "seconds": 5e4, "floor_seconds": 400.0, "ratio": 125.0}
    counted = {"benchmark": "rows", "name": "number of rows", "seconds": 1200, "floor_seconds": 48000.0, "ratio": 0.025}
    results = {"machine": machine, "quick": True, "results": [{**result, "target": 2.5, "ok": False}, stored, counted]}
    table = _generator().results_table(results)
    assert "--quick" in table
    assert r"| rows | work \| more | 1.2 ms | 400 ns | 3000.00 | 2.50 | no |" in table
    assert "| ledger | bytes of tokens | 50 kB | 400 B | 125.00 |  |  |" in table
    assert "| rows | number of rows | 1,200 | 48,000 | 0.03 |  |  |" in table


def test_every_code_is_documented() -> None:
    """People look codes up."""
    page = (DOCS / "reference" / "codes.md").read_text(encoding="utf-8")
    assert set(CODE_MEANINGS) == set(Code)
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [str(code) for code in Code]


def test_every_refusal_is_part_of_the_norm() -> None:
    """A refusal that the norm does not know cannot be judged."""
    page = (DOCS / "reference" / "selection.md").read_text(encoding="utf-8")
    groups = list(_generator().groups().values())
    missing = [str(code) for group in groups[:5] for code in group if f"`{code}`" not in page]
    assert not missing


def test_every_command_is_documented() -> None:
    """A command that the pages do not name does not exist for users."""
    reference = anchors((DOCS / "reference" / "cli.md").read_text(encoding="utf-8"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f"gristmill-{name}" in reference
        assert re.search(rf"\b{name}\b", readme), f"README does not name `{name}`"


# JSON keys


def _sections() -> dict[str, dict[str, _Key]]:
    """Read the tables of json.md: by anchor of the section, what each key path leads to."""
    sections: dict[str, dict[str, _Key]] = {}
    keys: dict[str, _Key] = {}
    for line in prose((DOCS / "reference" / "json.md").read_text(encoding="utf-8")).splitlines():
        if line.startswith("## "):
            keys = sections.setdefault(line[3:].lower().replace(" ", "-").replace(".", ""), {})
        elif line.startswith("| `"):
            first, kind, meaning = (cell.strip() for cell in line.strip("|").split("|", 2))
            link = re.search(r"\]\(#([\w-]+)\)", meaning)
            for path in re.findall(r"`([^`]+)`", first):
                keys[path] = _Key(link[1] if link else None, kind == "any")
    return sections


SECTIONS = _sections()


def _undocumented(value: Any, section: str, path: str = "", *, keys: dict[str, _Key] | None = None) -> Iterator[str]:
    keys = SECTIONS[section] if keys is None else keys
    known = keys.get(path)
    if known is not None and known.anything:
        return
    if known is not None and known.section is not None and value is None:
        return
    if known is not None and known.section is not None and not isinstance(value, dict):
        yield f"{section}: {path} is {value!r}"
    elif known is not None and known.section is not None:
        inside = [deeper.removeprefix(f"{path}.") for deeper in keys if deeper.startswith(f"{path}.")]
        rest = {name: one for name, one in value.items() if name not in inside}
        yield from _undocumented(rest, known.section)
    elif isinstance(value, dict):
        for name, one in value.items():
            inner = f"{path}.{name}" if path else name
            if not _is_known(keys, inner):
                inner = f"{path}.*" if path else "*"
            if _is_known(keys, inner):
                yield from _undocumented(one, section, inner, keys=keys)
            else:
                yield f"{section}: {path}.{name}"
    elif isinstance(value, list):
        for one in value:
            yield from _undocumented(one, section, f"{path}[]", keys=keys)
    elif known is None and value is not None:
        yield f"{section}: {path} is {value!r}"


def _is_known(keys: dict[str, _Key], path: str) -> bool:
    return path in keys or any(key.startswith((f"{path}.", f"{path}[")) for key in keys)


def _json_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    capsys.readouterr()
    main([*map(str, arguments), "--json"])
    return json.loads(capsys.readouterr().out)


def _captures(tmp_path: Path) -> list[Path]:
    """Give folders of captures: the recordings, and small ones that end in refusals."""
    calls = story()
    good_story(tmp_path / "made" / "good", "good")
    refused_story(tmp_path / "made" / "refused", "refused")
    unusable = [{**line, "rollout_id": "unusable", "generation_log_probs": []} for line in calls]
    result = {"response": {"output": [{"role": "assistant", "content": "one"}]}}
    write_story(tmp_path / "made" / "unusable", unusable, result)
    write_story(tmp_path / "made" / "nothing", [{**line, "rollout_id": "nothing"} for line in calls])
    return [RECORDINGS, tmp_path / "made"]


def _stories(tmp_path: Path) -> list[Path]:
    """Give every story of the corpus."""
    return sorted({path.parent for path in CORPUS.rglob("capture.jsonl")})


@pytest.mark.parametrize("given", [_captures, pytest.param(_stories, marks=pytest.mark.slow)])
def test_every_json_key_is_documented(
    given: Callable[[Path], list[Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program that reads our JSON needs to know what each key is."""
    missing: set[str] = set()
    for number, captures in enumerate(given(tmp_path)):
        folder = tmp_path / f"rows{number}"
        for arguments, section in (
            (["select", captures], "document-of-select"),
            (["select", captures, "--policy", "all_captured"], "document-of-select"),
            (["select", captures, "--policy", "final_context"], "document-of-select"),
            (["explain", captures], "document-of-explain"),
            (["ls", captures], "document-of-ls"),
            (["ls", captures, "--no-verdicts"], "document-of-ls"),
            (["show", captures], "document-of-show"),
            (["diff", captures, "--against", "all_captured", "--all"], "document-of-diff"),
            (["drift", captures, "--all"], "document-of-drift"),
            (["drift", captures, "--captured", "--all"], "document-of-drift"),
            (["export", captures, "--to", "parquet", "--out", tmp_path / f"parquet{number}"], "document-of-export"),
            (["export", captures, "--to", "messages", "--out", tmp_path / f"chat{number}"], "document-of-export"),
            (
                ["export", captures, "--advantage", "group_mean", "--out", tmp_path / f"advantage{number}"],
                "document-of-export",
            ),
            (["import", captures, "--into", tmp_path / f"{number}.gristmill"], "document-of-import"),
            (["rows", captures], "document-of-rows"),
            (["rows", captures, "--out", folder], "document-of-rows-with-a-folder"),
            (["verify", captures, folder], "document-of-verify"),
            (["groups", captures], "document-of-groups"),
        ):
            told = _json_of(capsys, *arguments)
            missing.update(_undocumented(told, _kind(told, section)))
        for lines, section in (
            (folder / "rejected.jsonl", "line-of-rejectedjsonl"),
            (folder / "rows.jsonl", "row"),
            (tmp_path / f"chat{number}" / "messages.jsonl", "line-of-messagesjsonl"),
        ):
            for line in lines.read_text(encoding="utf-8").splitlines() if lines.exists() else ():
                missing.update(_undocumented(json.loads(line), section))
    assert not missing


def _kind(told: Any, section: str) -> str:
    """Name the table for a document: an error is a document of its own."""
    return "error" if set(told) == {"error"} else section


def test_keys_of_single_documents_are_documented(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same for what is not one of many rollouts."""
    told = _json_of(capsys, "demo", "--out", tmp_path / "demo")
    missing = list(_undocumented(told, "document-of-demo"))
    captures = tmp_path / "demo" / "captures"
    told = _json_of(capsys, "explain", captures / "mend-the-mill", "c06")
    missing += _undocumented(told, "document-of-explain-with-a-call")
    told = _json_of(capsys, "show", captures / "mend-the-mill", "--call", "c03")
    calls = SECTIONS["call-of-show"] | SECTIONS["document-of-show-with-a-call"]
    missing += _undocumented(told, "document-of-show-with-a-call", keys=calls)
    folder = tmp_path / "rows"
    _json_of(capsys, "rows", captures, "--out", folder)
    rows = (folder / "rows.jsonl").read_text(encoding="utf-8")
    changed = rows.replace('"loss_mask":[0,', '"loss_mask":[1,')
    (folder / "rows.jsonl").write_text(changed, encoding="utf-8")
    told = _json_of(capsys, "verify", captures, folder)
    assert told["findings"]
    missing += _undocumented(told, "document-of-verify")
    missing += _undocumented(_json_of(capsys, "select", tmp_path / "nothing"), "error")
    assert not missing


def test_keys_of_the_gateways_commands_are_documented(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A launcher reads them."""
    agent = tmp_path / "agent.py"
    agent.write_text("print()\n", encoding="utf-8")
    with ScriptedEngine("agent").serve() as engine:
        told = _json_of(capfd, "doctor", "--upstream", engine)
        missing = list(_undocumented(told, "document-of-doctor"))
        command = [sys.executable, agent]
        places = ["--ledger", tmp_path / "run.gristmill", "--upstream", engine]
        told = _json_of(capfd, "run", *places, "--json", "--", *command)
        missing += _undocumented(told, "document-of-run")
        config = load_settings({"upstreams": [engine], "ledger": tmp_path / "other.gristmill"}, environment={})
        with SqliteLedger(config.ledger) as ledger:
            described = asyncio.run(_engines(Gateway(config, ledger)))
        serve = {"address": "", "base_url": "", "ledger": "", "admin_key_file": "", "pid": 1, "engines": described}
        missing += _undocumented(serve, "document-of-serve")
    assert not missing


async def _engines(gateway: Gateway) -> list[Any]:
    await gateway.start()
    try:
        return gateway.engines()
    finally:
        await gateway.close(drain_s=0.1)


def test_keys_of_ledger_commands_are_documented(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever looks after a ledger does it with a script."""
    ledger = tmp_path / "run.gristmill"
    _json_of(capsys, "import", RECORDINGS, "--into", ledger)
    with SqliteLedger(ledger):
        told = _json_of(capsys, "ledger", "info", ledger)
    assert told["writer"]
    missing = list(_undocumented(told, "document-of-ledger-info"))
    missing += _undocumented(_json_of(capsys, "ledger", "migrate", ledger), "document-of-ledger-migrate")
    told = _json_of(capsys, "ledger", "freeze", ledger, "two-tries")
    missing += _undocumented(told, "document-of-ledger-freeze")
    copied = _json_of(capsys, "ledger", "copy", ledger, tmp_path / "copy.gristmill")
    missing += _undocumented(copied, "document-of-ledger-copy")
    snapshot = told["frozen"][0]["snapshot_id"]
    told = _json_of(capsys, "ledger", "retire", ledger, "two-tries", "--snapshot", snapshot)
    missing += _undocumented(told, "document-of-ledger-retire")
    assert not missing


def test_keys_of_archives_and_builds_are_documented(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever runs these over night does it with a script."""
    runs, rows = tmp_path / "runs", tmp_path / "rows"
    told = _json_of(capsys, "archive", *_captures(tmp_path), runs, "--partition", "a")
    missing = list(_undocumented(told, "document-of-archive"))
    manifest = json.loads((runs / "run=a" / "manifest.json").read_bytes())
    missing += _undocumented(manifest, "manifest-of-an-archive")
    told = _json_of(capsys, "build", runs, rows, "--set", "reasoning=optional")
    assert told["summary"]["rejected"]
    stamp = json.loads((rows / "run=a" / "part=00000" / "build.json").read_bytes())
    missing += _undocumented(stamp, "stamp")
    missing += _undocumented(told, "document-of-build")
    missing += _undocumented(_json_of(capsys, "verify", runs, rows), "document-of-verify")
    assert not missing


def test_keys_of_cases_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    """The conformance runner is part of the product."""
    missing: set[str] = set()
    paths = sorted((CORPUS / "conformance").glob("*.jsonl"))
    assert paths
    for path in paths:
        capsys.readouterr()
        main(["cases", "--check", str(path)])
        for line in capsys.readouterr().out.splitlines():
            missing.update(_undocumented(json.loads(line), "line-of-cases"))
    assert not missing


def _dictionary_keys(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Dict):
            for key in inner.keys:
                if key is not None:
                    yield from _constant(key)


def _constant(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def _evidence_keys(path: Path) -> Iterator[str]:
    """Yield the keys that a module writes into evidence, as far as they stand there literally."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg == "evidence":
                    yield from _dictionary_keys(keyword.value)
            if isinstance(node.func, ast.Name) and node.func.id in {"Reason", "Verdict", "Finding"}:
                for argument in node.args:
                    yield from _dictionary_keys(argument)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and target.id == "evidence":
                    yield from _dictionary_keys(node.value)
                elif isinstance(target, ast.Subscript) and ast.unparse(target.value) == "evidence":
                    yield from _constant(target.slice)


def test_every_evidence_key_in_the_source_is_documented() -> None:
    """The corpus cannot show every refusal; the source can."""
    known = {re.split(r"[.\[]", part)[0] for path in SECTIONS["evidence"] for part in [path, *path.split(".")]}
    missing = {
        f"{path.name}: {key}"
        for path in sorted((ROOT / "src" / "gristmill").rglob("*.py"))
        for key in _evidence_keys(path)
        if key not in known
    }
    assert not missing
