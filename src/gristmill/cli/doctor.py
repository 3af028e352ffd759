"""`gristmill doctor`: ask an engine what it returns, and say what capture lacks.

JSON: `{"upstream", "fit", "lacking": [NAME], "engine": {kind, version, models, max_model_len, prompt_ids, token_ids,
token_ids_streamed, logprobs, stop_token_included, logprobs_mode, weight_versions, routed_experts, abort_by_id,
token_in, render, tokenize, notes}}`; what was measured is `yes`, `no` or `unknown`, `lacking` names what of it training
needs.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from gristmill.cli.failure import DATA_FAILED
from gristmill.errors import CaptureError, Code, ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from gristmill.gateway.upstream.client import Client
    from gristmill.gateway.upstream.protocol import Capabilities
    from gristmill.gateway.upstream.spec import UpstreamSpec

__all__ = ["command"]

_KINDS: Final = ("auto", "vllm", "sglang", "generic")
_KEY: Final = "GRISTMILL_UPSTREAM_KEY"
_TIMEOUT_s: Final = 60.0


class _Asked(NamedTuple):
    """A thing that is measured: its name in the JSON, what people call it, and what it is for."""

    name: str
    title: str
    purpose: str


_NEEDED: Final = (
    _Asked("prompt_ids", "prompt ids", "rows: the context"),
    _Asked("token_ids", "sampled ids", "rows: what is trained"),
    _Asked("token_ids_streamed", "both, in streams", "rows of harnesses that stream, which most do"),
    _Asked("logprobs", "log-probabilities", "rows: the behaviour policy"),
)
_USEFUL: Final = (
    _Asked("stop_token_included", "stop token", "the end of a turn is trained"),
    _Asked("logprobs_mode", "log-probability mode", "whether of the distribution that was sampled"),
    _Asked("weight_versions", "weight versions", "which weights sampled a token"),
    _Asked("routed_experts", "routed experts", "replay of expert choices"),
    _Asked("abort_by_id", "abort by id", "tokens of calls that were given up"),
    _Asked("token_in", "prompt as ids", "turns that extend what was sampled"),
    _Asked("render", "rendering", "prompt ids without sampling"),
    _Asked("tokenize", "tokenizing", "the same, by the tokenizer's route"),
)

_MODES: Final = {
    "processed": "those of the distribution that was sampled",
    "raw": "those of the model, not of what was sampled",
}
"""What a mode that was measured means."""


@click.command("doctor")
@click.option("--upstream", "url", required=True, metavar="URL", help="Base address of the engine: http://HOST:PORT.")
@click.option(
    "--engine",
    type=click.Choice(_KINDS),
    default="auto",
    show_default=True,
    help="What it is; auto finds out.",
)
@click.option("--model", metavar="NAME", help="The engine's own name of the model to sample; else the first it lists.")
@click.option(
    "--upstream-key-env",
    "key_env",
    metavar="VARIABLE",
    help=f"The variable that holds the engine's key; by default {_KEY}, if it is set.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def command(*, url: str, engine: str, model: str | None, key_env: str | None, as_json: bool) -> int:
    """Ask an engine what it returns, and say what capture lacks.

    A dozen requests sample a few tokens each. Ends with 1 if what training needs is not returned, with 3 if the engine
    cannot be reached, or refuses the key.
    """
    from gristmill.service.packages import packages_of

    with packages_of("gateway"):
        from gristmill.gateway.upstream.protocol import EngineKind
        from gristmill.gateway.upstream.spec import UpstreamSpec

        importlib.import_module("gristmill.gateway.upstream.client")

    spec = UpstreamSpec(
        url,
        kind=None if engine == "auto" else EngineKind(engine),
        models=() if model is None else (model,),
        api_key=_key(key_env),
    )
    found = asyncio.run(_examined(spec))
    lacking = [asked for asked in _NEEDED if getattr(found, asked.name) != "yes"]
    if as_json:
        return _write(spec, found, lacking)
    return _tell(spec, found, lacking)


def _key(variable: str | None) -> str | None:
    if variable is None:
        return os.environ.get(_KEY) or None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(
            f"expected the engine's key in the variable {variable}, got nothing", where="--upstream-key-env"
        )
    return key


async def _examined(spec: UpstreamSpec) -> Capabilities:
    from gristmill.gateway.upstream.client import Client
    from gristmill.gateway.upstream.probe import probe
    from gristmill.gateway.upstream.protocol import UpstreamError
    from gristmill.gateway.upstream.spec import UpstreamSettings

    async with Client(UpstreamSettings()) as client:
        try:
            await _check_address(client, spec)
            return await probe(client, spec, _TIMEOUT_s)
        except UpstreamError as error:
            raise CaptureError(
                error.message,
                code=Code.ENGINE_UNREACHABLE,
                where=spec.label,
                hint="start the engine, or give the address that it prints when it starts",
            ) from error


async def _check_address(client: Client, spec: UpstreamSpec) -> None:
    """Refuse an address that has none of an engine's routes, and a key that the engine refuses.

    Raises:
        CaptureError: `engine_unreachable`; `key_missing`, `key_unknown`.
        UpstreamError: nobody answers.
    """
    from gristmill.gateway.upstream.protocol import Ask
    from gristmill.gateway.upstream.routes import MODELS, SAMPLING
    from gristmill.records import Dialect

    chat = SAMPLING[Dialect.CHAT]
    body: dict[str, Any] = {"messages": [], "max_tokens": 1}
    if spec.models:
        body["model"] = spec.models[0]
    there = False
    # A server of Chat Completions need not list its models, and some list them to everybody.
    for ask in (Ask(MODELS, method="GET"), Ask(chat, body)):
        answer = await client.answer(spec, ask, _TIMEOUT_s)
        if answer.status in {401, 403}:
            raise _key_refused(spec, answer.status)
        # One that is broken is there.
        there = there or answer.status >= 500 or (answer.status not in {404, 405} and _is_object(answer.body))
    if there:
        return
    raise CaptureError(
        f"{spec.label}{MODELS} and {chat}: no such route: is the address right?",
        code=Code.ENGINE_UNREACHABLE,
        where=spec.label,
        hint="give the address that the engine prints when it starts, without a route: http://HOST:PORT",
    )


def _key_refused(spec: UpstreamSpec, status: int) -> CaptureError:
    code, got = (Code.KEY_MISSING, "missing") if spec.api_key is None else (Code.KEY_UNKNOWN, "wrong")
    return CaptureError(
        f"the engine answered {status}: its key is {got}",
        code=code,
        where=spec.label,
        hint=f"put it into {_KEY}, or name the variable that holds it with --upstream-key-env",
    )


def _is_object(body: bytes) -> bool:
    try:
        return isinstance(json.loads(body), dict)
    except ValueError:
        return False


def _write(spec: UpstreamSpec, found: Capabilities, lacking: list[_Asked]) -> int:
    import msgspec

    from gristmill.cli.document import json_text

    told = {
        "upstream": spec.label,
        "fit": not lacking,
        "lacking": [asked.name for asked in lacking],
        "engine": {name: value for name, value in msgspec.to_builtins(found).items() if name != "question_ids"},
    }
    sys.stdout.write(json_text(told) + "\n")
    return DATA_FAILED if lacking else 0


def _tell(spec: UpstreamSpec, found: Capabilities, lacking: list[_Asked]) -> int:
    from gristmill.cli.screen import remark, show, words

    names = {"vllm": "vLLM", "sglang": "SGLang", "generic": "a server of Chat Completions"}
    version = f" {found.version}" if found.version is not None else ""
    show(words(f"{spec.label}  {names[found.kind]}{version}", "bold"))
    models = ", ".join(found.models) or "none"
    length = f", {found.max_model_len:,} tokens" if found.max_model_len is not None else ""
    show(words(f"models: {models}{length}"), words(""))
    show(_table(found), words(""))
    for note in found.notes:
        show(words(f"- {note}"))
    if found.notes:
        show(words(""))
    if not lacking:
        show(words("Fit for training capture.", "bold"))
        remark("next", f"gristmill serve --upstream {spec.label}")
        return 0
    titles = ", ".join(asked.title for asked in lacking)
    show(words(f"Not fit for training capture ({Code.ENGINE_UNFIT}): {titles}.", "bold"))
    show(words("Calls are captured all the same: they can be selected and exported as messages, but make no rows."))
    return DATA_FAILED


def _table(found: Capabilities) -> Table:
    from gristmill.cli.screen import columns, words

    styles = {"yes": "green", "processed": "green", "no": "yellow", "raw": "yellow"}
    table = columns(["", "returned", "for"], fold=["for"])
    for asked in (*_NEEDED, *_USEFUL):
        value = str(getattr(found, asked.name))
        shown = "not measured" if value == "unknown" else value
        purpose = _MODES.get(value, asked.purpose) if asked.name == "logprobs_mode" else asked.purpose
        table.add_row(words(asked.title), words(shown, styles.get(value, "")), words(purpose, "dim"))
    return table
