"""`gristmill verify`: prove captures, rows and a manifest against each other.

JSON: `{"findings": [{code, where, message, evidence}], "checked": {rollouts, calls, rows, manifest}, "funnel": {…},
"bad_lines": […]}`; `manifest` is true where a folder of rows was checked, the funnel is as in `select`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from gristmill.cli.attempts import DAMAGED, Attempt, Captures, takes_captures
from gristmill.cli.choice import Choice, takes_policy
from gristmill.cli.credit import advantages_of
from gristmill.cli.failure import DATA_FAILED
from gristmill.cli.place import PLACE
from gristmill.cli.plural import counted
from gristmill.errors import Code, ConfigError, DecodeError, GristmillError, LedgerError

if TYPE_CHECKING:
    from gristmill.cli.funnel import Tally
    from gristmill.cli.store import Stored
    from gristmill.export import FolderCheck
    from gristmill.ledger import LedgerAddress
    from gristmill.reconstruction import Finding

__all__ = ["Checked", "command", "finding_json", "findings"]

_MANIFEST = "manifest.json"


class Checked(msgspec.Struct):
    """How much was checked."""

    rollouts: int = 0
    calls: int = 0
    rows: int = 0
    manifest: bool = False

    def text(self) -> str:
        """Say how much that is."""
        told = f"{counted(self.rollouts, 'rollout')}, {counted(self.calls, 'call')}"
        return f"{told}, {counted(self.rows, 'row')} and their manifest" if self.manifest else told


@click.command("verify")
@click.argument("arguments", nargs=-1, required=True, type=PLACE, metavar="PATHS... [ROWS_DIR]")
@takes_captures(argument=False)
@takes_policy
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def command(*, arguments: tuple[Path, ...], captures: Captures, choice: Choice, as_json: bool) -> int:
    """Prove captures, rows and a manifest against each other; exit code 1 if there is a finding.

    The last argument is a folder of rows if it holds a manifest.json; the rows are then made again by the policy that
    the manifest names. A policy of your own is only run when --policy names it too.
    """
    from gristmill.cli.funnel import Tally
    from gristmill.export import FolderCheck

    if len(arguments) == 2 and _is_build(arguments[-1]):
        return _verify_build(arguments[0], arguments[1], choice, as_json=as_json)
    folder = None
    if len(arguments) > 1 and _is_rows_folder(arguments[-1]):
        *paths, last = arguments
        arguments, folder = tuple(paths), FolderCheck(last)
        manifest = folder.manifest
        choice = _as_in(manifest.policy, manifest.options, manifest.train_model, choice)
    captures.paths = arguments
    choice.load()
    tally, checked = Tally(), Checked(manifest=folder is not None)
    found = findings(captures, choice, folder, tally, checked)
    if as_json:
        return _write_json(captures, found, tally, checked)
    return _write_text(captures, choice, found, tally, checked)


def _is_build(path: Path) -> bool:
    """Say whether a path holds the rows of a build; of a URL that is asked only where no file has its name."""
    if (path / "summary.json").is_file() or any(path.glob("run=*/part=*")):
        return True
    if ":/" not in str(path) or path.exists():
        return False
    from gristmill.archive import as_url, place_of
    from gristmill.engine.check import is_build

    return as_url(path) is not None and is_build(place_of(path))


def _verify_build(archive: Path, rows: Path, choice: Choice, *, as_json: bool) -> int:
    """Check built rows, partition by partition."""
    from gristmill.archive import place_of
    from gristmill.cli.funnel import Tally
    from gristmill.cli.store import is_archive
    from gristmill.engine.check import BuildCheck
    from gristmill.engine.outcome import Decided

    if not is_archive(archive):
        raise DecodeError(
            f"expected the archive that the rows were built from, got {archive}",
            where=str(archive),
            hint="`gristmill build` takes what `gristmill archive` wrote, and so does their check",
        )
    check = BuildCheck(str(archive), place_of(rows))
    built = check.built
    choice = _as_in(built.policy, built.options, built.train_model, choice)
    choice.load()
    tally, checked = Tally(), Checked(manifest=True)

    def count(one: Decided) -> None:
        tally.add(one.capture, one.outcome)
        checked.rollouts += 1
        checked.calls += len(one.capture.records)

    def found() -> Iterator[Finding]:
        options = msgspec.structs.replace(
            built, policy=choice.policy, options=choice.options, train_model=choice.train_model
        )
        for finding in check.findings(options, count):
            yield finding
            checked.rows = check.rows_checked
        checked.rows = check.rows_checked

    captures = Captures((archive,))
    if as_json:
        return _write_json(captures, found(), tally, checked)
    return _write_text(captures, choice, found(), tally, checked)


def _is_rows_folder(path: Path) -> bool:
    return (path / _MANIFEST).exists() or ((path / "rows.jsonl").exists() and not (path / "capture.jsonl").exists())


def _as_in(policy: str, options: Mapping[str, str], train_model: str | None, choice: Choice) -> Choice:
    """Take from a manifest what the command line does not say.

    Raises:
        ConfigError: the manifest names a policy that is not built in and the command line does not.
    """
    if choice.named is None and ":" in policy:
        raise ConfigError(
            f"the rows were selected by {policy}, which is not built in",
            where="--policy",
            hint=f"if you trust that code, name it: --policy {policy}",
        )
    return Choice(
        policy if choice.named is None else choice.named,
        options if choice.settings is None else choice.settings,
        train_model if choice.train_model is None else choice.train_model,
    )


class _Ledgers:
    """The ledgers that attempts come from, each opened once, to check what they store against itself."""

    def __init__(self, stack: contextlib.ExitStack, on_damage: Callable[[DecodeError], None]) -> None:
        self._stack = stack
        self._on_damage = on_damage
        self._open: dict[LedgerAddress, Stored | None] = {}

    def check(self, attempt: Attempt) -> Iterator[Finding]:
        """Check one attempt; captures in files store nothing twice."""
        from gristmill.cli.store import is_ledger, reading
        from gristmill.ledger import AttemptKey
        from gristmill.reconstruction import Finding

        source = attempt.source
        if source not in self._open:
            opened = reading(source, self._on_damage) if is_ledger(source) else None
            self._open[source] = None if opened is None else self._stack.enter_context(opened)
        ledger = self._open[source]
        if ledger is not None:
            for sentence in ledger.check(AttemptKey(attempt.capture.rollout_id, attempt.capture.attempt)):
                yield Finding(Code.LEDGER_DAMAGED, "ledger", sentence)


def findings(
    captures: Captures, choice: Choice, folder: FolderCheck | None, tally: Tally, checked: Checked
) -> Iterator[Finding]:
    """Check attempt by attempt, then the folder as a whole; `tally` and `checked` count along."""
    captures.exchanges, captures.damaged = True, []
    if folder is not None and folder.manifest.advantage is not None:
        choice.advantages = advantages_of(captures, folder.manifest.advantage.kind)
        folder.expect(choice.advantages.note)
    try:
        yield from _of_attempts(captures, captures.damaged, choice, folder, tally, checked)
    except GristmillError:
        # What ends the check hides nothing of what it found.
        yield from _of_damage(captures.damaged)
        raise
    yield from _of_damage(captures.damaged)
    if folder is not None:
        yield from folder.finish(
            policy=choice.policy, options=choice.options, train_model=choice.train_model, whole=captures.whole
        )


def _of_damage(damaged: list[tuple[str, str]]) -> Iterator[Finding]:
    """Tell what could not be read; one attempt takes no other with it."""
    from gristmill.reconstruction import Finding

    for where, message in damaged:
        yield Finding(Code.LEDGER_DAMAGED, where, message)


def _of_attempts(
    captures: Captures,
    damaged: list[tuple[str, str]],
    choice: Choice,
    folder: FolderCheck | None,
    tally: Tally,
    checked: Checked,
) -> Iterator[Finding]:
    """Check attempt by attempt; what cannot be read is added to `damaged`."""
    from gristmill.cli.export import decide
    from gristmill.export import check_capture
    from gristmill.reconstruction import RowMode

    mode = RowMode.MERGED if folder is None else folder.manifest.mode
    needs = "rows" if folder is None else folder.needs
    with contextlib.ExitStack() as stack:
        # Reading the attempts tells the same damage.
        ledgers = _Ledgers(stack, lambda error: None)
        for attempt in captures:
            named = f"rollout={attempt.capture.rollout_id}"
            try:
                outcome = decide(attempt, choice, needs, mode)
                found = [*ledgers.check(attempt), *check_capture(attempt.capture)]
                if folder is not None:
                    found += folder.check(attempt.capture, attempt.result, outcome)
            except (LedgerError, DecodeError) as error:
                if error.code not in DAMAGED:
                    raise
                # What a ledger holds of it is read when it is looked at.
                damaged.append((named, error.message))
                continue
            tally.add(attempt.capture, outcome)
            checked.rollouts += 1
            checked.calls += len(attempt.capture.records)
            for finding in found:
                yield msgspec.structs.replace(finding, where=f"{named} {finding.where}")
            if folder is not None:
                checked.rows = folder.rows_checked


def finding_json(finding: Finding) -> dict[str, Any]:
    """Give a finding as documented in the module."""
    return {
        "code": str(finding.code),
        "where": finding.where,
        "message": finding.message,
        "evidence": finding.evidence,
    }


def _write_json(captures: Captures, found: Iterator[Finding], tally: Tally, checked: Checked) -> int:
    from gristmill.cli.document import Document
    from gristmill.cli.funnel import funnel_json

    failed = 0
    with Document("findings") as document:
        for finding in found:
            failed = DATA_FAILED
            document.add(finding_json(finding))
        rest = {"checked": msgspec.to_builtins(checked), "funnel": funnel_json(tally.funnel)}
        document.finish({**rest, "bad_lines": captures.bad_lines})
    return failed


def _write_text(captures: Captures, choice: Choice, found: Iterator[Finding], tally: Tally, checked: Checked) -> int:
    import shlex

    from gristmill.cli.funnel import funnel_text
    from gristmill.cli.screen import marks, remark, show, words

    count = 0
    for finding in found:
        count += 1
        show(words(f"{finding.code} at {finding.where}", "red"), words(f"  {finding.message}"))
    what = checked.text()
    told = counted(count, "finding") if count else "nothing found"
    show(words(f"checked {what}: {told}", "bold"))
    show(words(tally.text()), words(funnel_text(tally.funnel, marks().arrow, trained=True)))
    if not count and not checked.manifest and not tally.failed:
        arguments = [*map(str, captures.paths), "--out", "rows", *captures.arguments(), *choice.arguments()]
        remark("next", shlex.join(["gristmill", "export", *arguments]))
    return DATA_FAILED if count else 0
