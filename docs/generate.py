"""Write the generated pages of the documentation: `python docs/generate.py [--check]`.

- `reference/codes.md` from `gristmill.errors`, grouped as the enum groups them
- `reference/cli.md` from the commands themselves
- `reference/configuration.md` from the settings of the gateway
- `reference/continuation.md` from the reasons for which a call is not continued
- the table of `performance.md` from `bench/results.json`, if there is one (`python -m bench --json bench/results.json`)

With `--check` nothing is written; the exit code is 1 if a page is not current.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from gristmill.cli.app import COMMANDS, application
from gristmill.cli.failure import exit_code_of
from gristmill.cli.remedies import REFUSAL_REMEDIES, VERDICT_REMEDIES
from gristmill.continuation import REASON_MEANINGS, ContinuationReason
from gristmill.errors import CODE_MEANINGS, Code
from gristmill.gateway.config import EngineSetting, GatewayConfig
from gristmill.gateway.settings import ENVIRONMENT_PREFIX, SETTINGS

DOCS: Final = Path(__file__).resolve().parent
RESULTS: Final = DOCS.parent / "bench" / "results.json"
BEGIN: Final = "<!-- results: made by docs/generate.py -->"
END: Final = "<!-- end of results -->"

_END_COMMANDS: Final = ("Policies.", "The ledger.", "Files, options, environment.")
_NOTES: Final[Mapping[str, str]] = {
    "Selection refuses the rollout.": "The outcome of a rollout in `select`, `rows` and `rejected.jsonl`.",
    "The pipeline refuses what a policy selected.": "The same, after any policy, one's own included.",
    "Policies.": "The last two are outcomes of a rollout, too; the others end a command.",
    "Verdicts: why one call was included.": "One a call, in `verdicts`.",
    "Verdicts: why one call was excluded.": "One a call, in `verdicts`; `excluded` of the funnel counts by them.",
    "Tokens: why the tokens of a call may not be trained.": "`unusable_reason` of a record. `empty_generation` is no "
    "fault: it stands in the funnel.",
    "Checks of `verify` over finished rows.": "One a finding.",
    "The ledger.": "These end a command, or a write of a gateway.",
    "The gateway refuses a request, or a call fails in it.": "In the error a harness is answered with, in the log, and "
    "in `unusable_detail` of the failed call.",
    "Files, options, environment.": "These end a command.",
}


def page(title: str, introduction: str, body: Iterator[str]) -> str:
    """Put a generated page together."""
    made_by = "<!-- made by docs/generate.py: do not edit -->"
    return "\n".join([made_by, "", f"# {title}", "", introduction, "", *body]).rstrip() + "\n"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Write a table."""
    yield f"| {' | '.join(headings)} |"
    yield f"|{'---|' * len(headings)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


def groups() -> dict[str, list[Code]]:
    """Return the codes by the comment that stands over them in the enum."""
    found: dict[str, list[Code]] = {}
    heading = ""
    for line in inspect.getsource(Code).splitlines():
        if comment := re.match(r"\s+# (.+)", line):
            heading = comment[1]
        elif member := re.match(r"\s+([A-Z_]+) = ", line):
            found.setdefault(heading, []).append(Code[member[1]])
    return found


def _remedy(code: Code) -> str:
    return VERDICT_REMEDIES.get(code) or REFUSAL_REMEDIES.get(code) or ""


def _code_groups() -> Iterator[str]:
    for heading, codes in groups().items():
        yield f"## {heading.rstrip('.')}"
        yield ""
        if heading in _NOTES:
            yield _NOTES[heading]
            yield ""
        headings, columns = ["code", "meaning"], [lambda code: f"`{code}`", lambda code: CODE_MEANINGS[code]]
        if heading in _END_COMMANDS:
            headings.append("exit code")
            columns.append(lambda code: str(exit_code_of(code)))
        elif any(map(_remedy, codes)):
            headings.append("what would change it")
            columns.append(_remedy)
        yield from table(headings, [[column(code) for column in columns] for code in codes])


def codes_page() -> str:
    """Make the page of codes."""
    introduction = (
        "Every refusal, verdict, finding and error carries one code of this closed set. Codes are the same on the\n"
        "screen, in JSON and in Python (`gristmill.errors.Code`); a new one is a change of the interface.\n"
        "[Selection](selection.md) says when each refusal is made, and in which order."
    )
    return page("Codes", introduction, _code_groups())


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", inspect.cleandoc(text)).strip()


def _command(name: str, command: click.Command, parent: click.Context) -> Iterator[str]:
    context = command.context_class(command, info_name=name, parent=parent)
    yield f"## gristmill {name}"
    yield ""
    yield "```text"
    yield f"gristmill {name} {' '.join(command.collect_usage_pieces(context))}"
    yield "```"
    yield ""
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        yield _plain(paragraph)
        yield ""
    options = [param for param in command.get_params(context) if isinstance(param, click.Option)]
    records = [record for option in options if (record := option.get_help_record(context))]
    yield from table(["option", "meaning"], [[f"`{option}`", _plain(text)] for option, text in records])


def _commands() -> Iterator[str]:
    context = application.make_context("gristmill", ["select"], resilient_parsing=True)
    yield from table(["command", "does"], [[f"[`{name}`](#gristmill-{name})", does] for name, does in COMMANDS.items()])
    yield _plain(application.help.split("\n\n", 1)[1])
    yield ""
    yield "Data is on standard output, everything said to people on standard error. With `--json` standard output is"
    yield "one JSON document; `cases`, and `rows` without `--out` and `--json`, print one a line. Keys are in"
    yield "[json.md](json.md)."
    yield "Control characters in model text are shown as escapes."
    yield ""
    meanings = {
        "0": "done",
        "1": "the data failed a check: every rollout was rejected, `verify` has a finding, a case differs",
        "2": "usage: an option, argument, policy, rollout or call that is not there",
        "3": "environment: a file that cannot be read or written, a newer format, a bug",
        "130": "interrupted",
    }
    yield from table(["exit code", "meaning"], list(meanings.items()))
    variables = {
        "NO_COLOR": "no colours, whatever the terminal can",
        "GRISTMILL_DEBUG=1": "a traceback with `internal` errors",
    }
    yield from table(["variable", "meaning"], [[f"`{name}`", meaning] for name, meaning in variables.items()])
    for name in COMMANDS:
        command = application.get_command(context, name)
        assert command is not None
        yield from _command(name, command, context)


def cli_page() -> str:
    """Make the page of commands."""
    return page("Command line", "One command per stage; `gristmill COMMAND --help` says the same.", _commands())


def _meanings(documented: type[Any]) -> dict[str, str]:
    """Return what a docstring's `Attributes` say of each name; names that share a line share the meaning."""
    _, _, attributes = inspect.cleandoc(documented.__doc__ or "").partition("Attributes:")
    found: dict[str, str] = {}
    names: list[str] = []
    for line in attributes.splitlines():
        if match := re.match(r" {4}(\w+(?:, \w+)*): (.*)", line):
            names = match[1].split(", ")
            found.update(dict.fromkeys(names, match[2]))
        elif line.strip():
            found.update({name: f"{found[name]} {line.strip()}" for name in names})
    return found


def _default(value: Any) -> str:
    if value is msgspec.NODEFAULT:
        return "needed"
    if value in (None, (), {}):
        return ""
    return f"`{value.isoformat() if hasattr(value, 'isoformat') else value}`"


def _settings() -> Iterator[str]:
    options = {
        option.name: option.opts[0]
        for option in application.get_command(application.make_context("gristmill", ["serve"]), "serve").params
        if isinstance(option, click.Option)
    }
    meanings = _meanings(GatewayConfig)
    defaults = {field.encode_name: field for field in msgspec.structs.fields(GatewayConfig)}
    rows: list[list[str]] = []
    for name in SETTINGS:
        field = defaults[name]
        default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
        meaning = meanings[field.name]
        flag = f"`{options[name]}`" if name in options else ""
        if name == "upstreams":
            default = msgspec.NODEFAULT
        rows.append([f"`{name}`", flag, meaning[:1].upper() + meaning[1:], _default(default)])
    yield from table(["setting", "flag", "meaning", "default"], rows)
    yield "An engine is its address, or a table of"
    yield ""
    engine = {field.name: field for field in msgspec.structs.fields(EngineSetting)}
    told = {
        "url": "base address; a path before the engine's routes is allowed",
        "kind": "`auto` asks the engine; `vllm`, `sglang`, `generic`",
        "key_env": f"the variable that holds its key; without it `{ENVIRONMENT_PREFIX}UPSTREAM_KEY`, if that is set",
    }
    yield from table(
        ["key", "meaning", "default"], [[f"`{name}`", told[name], _default(engine[name].default)] for name in engine]
    )


def configuration_page() -> str:
    """Make the page of settings."""
    introduction = (
        "A setting of the gateway is said on the command line, in the environment, or in a TOML file; the first that\n"
        "says something counts. Each has one name: `max_body_bytes` in the file, `GRISTMILL_MAX_BODY_BYTES` in the\n"
        "environment. The file is named by `--config` or `GRISTMILL_CONFIG`. A name that is no setting is an error\n"
        "wherever it stands. Secrets are never settings: the key of an engine is in a variable of its own, the\n"
        "administrator's in a file.\n\n"
        "```toml\n"
        'upstreams = ["http://127.0.0.1:8000"]\n'
        'ledger = "run.gristmill"\n'
        'models = ["*=policy"]\n'
        "idle_timeout_s = 60\n\n"
        "[overrides]\n"
        "temperature = 1.0\n"
        "```\n\n"
        "An engine that needs more than its address is a table:\n\n"
        "```toml\n"
        "[[upstreams]]\n"
        'url = "http://127.0.0.1:8000"\n'
        'kind = "vllm"\n'
        'key_env = "ENGINE_KEY"\n'
        "```\n\n"
        "In the environment lists are separated by commas and `overrides` is JSON. On the command line, lists are\n"
        "options that are repeated."
    )
    return page("Configuration", introduction, _settings())


def continuation_page() -> str:
    """Make the page of reasons."""
    introduction = (
        "With `--continue tokens` every call says whether the engine was given the exact tokens of its parent\n"
        "(`continued`), or why it was served as an ordinary one (`refused`): the first of these reasons that\n"
        "holds, in the order of the table. They stand in `continuation.reason` of a call, and label the counter\n"
        "`gristmill_continuations_total`. [Continuation](../concepts/continuation.md) says what it is about."
    )
    rows = [[f"`{reason}`", REASON_MEANINGS[reason]] for reason in ContinuationReason]
    return page("Reasons not to continue", introduction, table(["reason", "meaning"], rows))


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def _amount(name: str) -> Callable[[float], str]:
    """Choose how to write the two figures of a benchmark: stored bytes and counts are not seconds."""
    if name.startswith("number of "):
        return "{:,.0f}".format
    return _bytes if name.startswith("bytes of ") else _time


def _bytes(count: float) -> str:
    for unit, size in (("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def results_table(results: Mapping[str, Any] | None) -> str:
    """Write the numbers of a benchmark run, or that there are none."""
    if results is None:
        return "No numbers are recorded here yet: `make bench` prints them for your machine."
    machine = results["machine"]
    quick = ", with `--quick`: fewer rounds and smaller sizes" if results.get("quick") else ""
    head = f"Python {machine['python']}, {machine['system']}, {machine['cpus']} CPUs{quick}."
    rows = [
        [
            one["benchmark"],
            one["name"],
            *(_amount(one["name"])(one[key]) for key in ("seconds", "floor_seconds")),
            f"{one['ratio']:.2f}",
            "" if one.get("target") is None else f"{one['target']:.2f}",
            "" if one.get("target") is None else ("yes" if one["ok"] else "no"),
        ]
        for one in results["results"]
    ]
    headings = ["benchmark", "work", "time, bytes or number", "floor", "ratio", "target", "met"]
    return "\n".join([head, "", *table(headings, rows)]).rstrip()


def performance_page(text: str) -> str:
    """Put the numbers into the page on performance."""
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else None
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"expected {BEGIN!r} and {END!r} in performance.md")
    return f"{before}{BEGIN}\n\n{results_table(results)}\n\n{END}{after}"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size < 1e12 else f"{size / 1e12:,.2f} TB"


def scale_text(results: Mapping[str, Any] | None) -> Iterator[str]:
    """Write what was measured at scale, and what a hundred million calls come to."""
    builds = [one for one in (results or {}).get("results", ()) if one["benchmark"] == "build"]
    if builds:
        yield "Against the bare cost: reading the same files with pyarrow, and writing the same rows."
        yield ""
        rows = [
            [
                one["name"],
                f"{one['rows_per_second']:,.0f}",
                f"{one['calls_per_second']:,.0f}",
                f"{one['megabytes_per_second']:,.0f}",
                f"{one['ratio']:.1f}",
            ]
            for one in builds
        ]
        yield from table(["work", "rows/s", "calls/s", "MB/s of rows in memory", "× the bare cost"], rows)
    scale = (results or {}).get("scale")
    if scale is None:
        yield "The long run has no numbers yet."
        return
    calls, rollouts, stages = scale["calls"], scale["rollouts"], scale["stages"]
    yield (
        f"{rollouts:,} rollouts end to end: {calls:,} calls, {scale['row_tokens']:,} tokens in rows, "
        f"{scale['partitions']} partitions."
    )
    yield ""
    rows = [
        [
            stage["name"],
            f"{stage['seconds']:,.0f} s",
            f"{calls / stage['seconds']:,.0f}",
            f"{stage['peak_bytes'] / 1e6:,.0f} MB",
            f"{stage['growth_bytes'] / 1e6:+,.0f} MB",
            "yes" if stage["growth_bytes"] < 0.1 * stage["peak_bytes"] else "no",
        ]
        for stage in stages
    ]
    headings = [
        "stage",
        "time",
        "calls/s",
        "peak of all processes",
        "growth",
        "flat (target: growth below a tenth of it)",
    ]
    yield from table(headings, rows)
    yield from _extrapolated(scale)


def _extrapolated(scale: Mapping[str, Any]) -> Iterator[str]:
    calls, rollouts = scale["calls"], scale["rollouts"]
    seconds = scale["stages"][-1]["seconds"]
    many = 10**8
    per_core = calls / seconds / 2
    hours = many / per_core / 3600
    yield "## A hundred million calls"
    yield ""
    yield f"- One processor builds {calls:,} calls / {seconds:,.0f} s / 2 = {per_core:,.0f} calls a second."
    yield f"- 10⁸ calls / {per_core:,.0f} calls/s = {many / per_core:,.0f} s = {hours:,.1f} processor hours."
    yield f"- On 64 processors, as parts are independent: {hours:,.1f} h / 64 = {hours / 64 * 60:,.0f} minutes."
    for name, what in (("archive_bytes", "The archive"), ("rows_bytes", "The rows")):
        size = scale[name]
        yield (
            f"- {what}: {size:,} bytes / {calls:,} calls × 10⁸ = {size / calls:,.0f} bytes × 10⁸ = "
            f"{_gigabytes(size / calls * many)}."
        )
    attempts = many * rollouts / calls
    parts = attempts / rollouts * scale["partitions"]
    yield (
        f"- Rollouts: 10⁸ / {calls / rollouts:.0f} = {attempts:,.0f}; at 240 bytes each, the first process keeps "
        f"{_gigabytes(attempts * 240)} of them."
    )
    yield f"- Partitions of this size: {scale['partitions']} × 10⁸ / {calls:,} = {parts:,.0f}."
    yield ""


def scale_page(text: str) -> str:
    """Put the numbers into the page on scale."""
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else None
    begin, end = "<!-- scale: made by docs/generate.py -->", "<!-- end of scale -->"
    before, first, rest = text.partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last:
        raise SystemExit(f"expected {begin!r} and {end!r} in scale.md")
    held = "\n".join(scale_text(results)).rstrip()
    return f"{before}{begin}\n\n{held}\n\n{end}{after}"


def generated() -> dict[Path, str]:
    """Return every generated page as it should be."""
    performance, scale = DOCS / "performance.md", DOCS / "scale.md"
    return {
        DOCS / "reference" / "codes.md": codes_page(),
        DOCS / "reference" / "cli.md": cli_page(),
        DOCS / "reference" / "configuration.md": configuration_page(),
        DOCS / "reference" / "continuation.md": continuation_page(),
        performance: performance_page(performance.read_text(encoding="utf-8")),
        scale: scale_page(scale.read_text(encoding="utf-8")),
    }


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or check them."""
    stale = [
        path for path, text in generated().items() if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    for path in stale:
        if "--check" not in arguments:
            path.write_text(generated()[path], encoding="utf-8")
        sys.stdout.write(f"{'stale' if '--check' in arguments else 'written'}: {path.relative_to(DOCS.parent)}\n")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
