"""`gristmill serve`: a gateway in front of engines, until it is told to stop.

JSON: one line when it listens: `{"address", "base_url", "ledger", "admin_key_file", "pid", "engines": [{engine, kind,
up, measuring, epoch, version, models, max_model_len, token_ids, token_ids_streamed, logprobs_mode, weights, notes}]}`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from gristmill.cli.place import PLACE
from gristmill.errors import ConfigError

if TYPE_CHECKING:
    import asyncio

    from gristmill.gateway.config import GatewayConfig
    from gristmill.service.server import Service

__all__ = ["command", "read_overrides", "setting_option", "takes_settings"]

_HURRIED: Final = 130

_FILE = click.Path(path_type=Path, dir_okay=False)
_COUNT = click.IntRange(1)
_SECONDS = click.FloatRange(min=0, min_open=True)

_OPTIONS: Final[dict[str, tuple[tuple[str, ...], dict[str, Any]]]] = {
    "upstreams": (
        ("--upstream",),
        {"multiple": True, "metavar": "URL", "help": "Base address of an engine; may be repeated."},
    ),
    "ledger": (
        ("--ledger",),
        {
            "type": PLACE,
            "metavar": "LEDGER",
            "help": "Where calls go, a file or postgresql://HOST/DATABASE; made if not there.",
        },
    ),
    "host": (("--host",), {"help": "Address to listen on; 127.0.0.1 by default."}),
    "port": (("--port",), {"type": click.IntRange(0, 65535), "help": "Port; 0 takes a free one. 8600 by default."}),
    "public_url": (
        ("--public-url",),
        {"metavar": "URL", "help": "Address that sandboxes use, where it is not the one listened on."},
    ),
    "advertise_url": (
        ("--advertise-url",),
        {"metavar": "URL", "help": "Address that other gateways of a shared ledger send requests on to."},
    ),
    "tls_cert": (("--tls-cert",), {"type": _FILE, "metavar": "PEM", "help": "Certificate chain."}),
    "tls_key": (("--tls-key",), {"type": _FILE, "metavar": "PEM", "help": "Its private key."}),
    "insecure_http": (
        ("--insecure-http",),
        {"is_flag": True, "default": None, "help": "Listen off loopback without TLS: keys travel in the clear."},
    ),
    "admin_key_file": (
        ("--admin-key-file",),
        {"type": _FILE, "metavar": "FILE", "help": "LEDGER.admin-key by default; made if not there."},
    ),
    "models": (
        ("--model",),
        {
            "multiple": True,
            "metavar": "NAME[=ENGINE_NAME]",
            "help": "A name that harnesses may ask for, `*` for any; may be repeated.",
        },
    ),
    "overrides": (
        ("--override",),
        {"multiple": True, "metavar": "NAME=JSON", "help": "A sampling setting over what is asked for."},
    ),
    "continue": (
        ("--continue",),
        {
            "type": click.Choice(["off", "tokens"]),
            "help": "tokens: give the engine the exact tokens of the call that a request continues.",
        },
    ),
    "tokenizer": (
        ("--tokenizer",),
        {
            "type": click.Path(path_type=Path, file_okay=False),
            "metavar": "FOLDER",
            "help": "The engine's tokenizer and chat template, for engines that do not render.",
        },
    ),
    "render_timeout_s": (
        ("--render-timeout-s",),
        {"type": _SECONDS, "help": "For the renderings of a call; behind it the call is not continued."},
    ),
    "allowed_hosts": (
        ("--allowed-host",),
        {"multiple": True, "metavar": "NAME", "help": "Another name that requests may give as Host."},
    ),
    "max_body_bytes": (("--max-body-bytes",), {"type": _COUNT, "help": "Largest request body."}),
    "max_reply_bytes": (("--max-reply-bytes",), {"type": _COUNT, "help": "Largest reply of an engine."}),
    "max_calls": (("--max-calls",), {"type": _COUNT, "help": "Calls in flight."}),
    "max_attempts_in_memory": (
        ("--max-attempts-in-memory",),
        {"type": _COUNT, "help": "Attempts that stay in memory between calls."},
    ),
    "min_free_bytes": (
        ("--min-free-bytes",),
        {"type": click.IntRange(0), "help": "Free space of the ledger's disk below which no call is admitted."},
    ),
    "connect_timeout_s": (("--connect-timeout-s",), {"type": _SECONDS, "help": "To connect to an engine."}),
    "idle_timeout_s": (
        ("--idle-timeout-s",),
        {"type": _SECONDS, "help": "Silence of an engine after which its health is asked."},
    ),
    "health_timeout_s": (("--health-timeout-s",), {"type": _SECONDS, "help": "For that question."}),
    "abort_wait_s": (("--abort-wait-s",), {"type": _SECONDS, "help": "For what an aborted generation sampled."}),
    "drain_s": (("--drain-s",), {"type": _SECONDS, "help": "For calls in flight at a rollout's end and at shutdown."}),
    "abandon_after_s": (
        ("--abandon-after-s",),
        {"type": _SECONDS, "help": "Idle time after which a rollout that nobody finishes is abandoned."},
    ),
    "lease_s": (
        ("--lease-s",),
        {"type": _SECONDS, "help": "Silence after which other gateways of a shared ledger take its attempts."},
    ),
    "keep_exchanges": (
        ("--keep-exchanges/--no-keep-exchanges",),
        {"default": None, "help": "Keep requests and replies in the ledger, as by default."},
    ),
    "log_level": (
        ("--log-level",),
        {"type": click.Choice(["debug", "info", "warning", "error"]), "help": "Of the log on standard error."},
    ),
}


def setting_option(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option of one setting; a command gets it by the setting's name."""
    flags, arguments = _OPTIONS[name]
    return click.option(*flags, name, **arguments)


def takes_settings(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add options of settings, and `--config`; the command gets them as `settings`, a function that reads them.

    Args:
        names: of the settings; all of them by default.
    """
    chosen = names or tuple(_OPTIONS)

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def run(*, config: Path | None, **given: Any) -> Any:
            flags = {name: given.pop(name) for name in chosen}
            return command(settings=functools.partial(_settings, flags, config), **given)

        wrapped: Any = click.option(
            "--config",
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="TOML",
            help="File of settings; flags and GRISTMILL_… variables go over it.",
        )(run)
        for name in reversed(chosen):
            wrapped = setting_option(name)(wrapped)
        return wrapped

    return add


def _settings(flags: dict[str, Any], file: Path | None, **more: Any) -> GatewayConfig:
    """Put the settings together; `more` are those that the command itself decides.

    Raises:
        ConfigError: `option_invalid`, `file_unreadable`.
    """
    from gristmill.gateway.settings import load_settings

    said = {name: value for name, value in flags.items() if value is not None and value != ()}
    if "overrides" in said:
        said["overrides"] = read_overrides(said["overrides"])
    return load_settings({**said, **more}, file=file)


def read_overrides(texts: tuple[str, ...]) -> dict[str, Any]:
    """Read `NAME=JSON` texts.

    Raises:
        ConfigError: `option_invalid`.
    """
    overrides: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            overrides[name] = json.loads(value)
        except ValueError as error:
            raise ConfigError(
                f"expected NAME=JSON, got {text!r}",
                where="--override",
                hint="for example --override temperature=1.0",
            ) from error
        if not equals or not name:
            raise ConfigError(f"expected NAME=JSON, got {text!r}", where="--override")
    return overrides


def _allow_many_connections() -> None:
    """Raise the number of open files to what the system allows: a call in flight takes two, and 1,024 is usual."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        # Where the system allows no more after all, the usual number stays.
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))


@click.command("serve")
@takes_settings()
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output, when it listens.")
def command(*, settings: Callable[..., GatewayConfig], as_json: bool) -> int:
    """Capture model calls: a gateway in front of your engines.

    Every flag is a setting that a TOML file (--config) or a GRISTMILL_… variable can say too. An engine's own key is
    read from GRISTMILL_UPSTREAM_KEY. SIGTERM or Ctrl-C ends it: new calls are refused, those in flight may end; a
    second one does not wait for them.
    """
    from gristmill.service.packages import packages_of

    with packages_of("gateway"):
        from gristmill.service.server import run_loop

    config = settings()
    return run_loop(_serve(config, as_json=as_json))


async def _serve(config: GatewayConfig, *, as_json: bool) -> int:
    import asyncio

    from gristmill.cli.screen import remark
    from gristmill.service.server import Service

    signalled = asyncio.Event()
    _allow_many_connections()
    service = Service(config)
    received: list[int] = []

    def on_signal(number: int) -> None:
        received.append(number)
        signalled.set()
        if len(received) > 1:
            service.hurry()
        if service.address:
            remark("note", _ending(service, first=len(received) == 1))

    starting = asyncio.ensure_future(service.start())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    if not await _unless(signalled, starting):
        return 0
    _tell(service, as_json=as_json)
    await signalled.wait()
    stopped = await service.stop()
    if not as_json:
        from gristmill.cli.plural import counted

        remark("note", f"stopped, {counted(stopped.aborted, 'call')} aborted")
    return _HURRIED if len(received) > 1 else 0


def _ending(service: Service, *, first: bool) -> str:
    """Say what a signal has begun."""
    from gristmill.cli.plural import counted

    running = service.running()
    if not first:
        return f"not waiting any longer: {counted(running, 'call')} aborted with what was sampled"
    if not running:
        return "stopping"
    calls = counted(running, "call")
    return f"stopping: waiting for {calls}, at most {service.config.drain_s:g} s; a second Ctrl-C or SIGTERM ends it"


async def _unless(signalled: asyncio.Event, starting: asyncio.Future[None]) -> bool:
    """Wait until it has started; False where a signal came first, and nothing is left of it."""
    import asyncio
    from contextlib import suppress

    waiting = asyncio.ensure_future(signalled.wait())
    await asyncio.wait({waiting, starting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if starting.done():
        await starting
        return True
    starting.cancel()
    with suppress(asyncio.CancelledError):
        await starting
    return False


def _tell(service: Service, *, as_json: bool) -> None:
    config = service.config
    if as_json:
        from gristmill.cli.document import json_text

        told = {
            "address": service.address,
            "base_url": service.base_url,
            "ledger": str(config.ledger),
            "admin_key_file": str(config.admin_key_path),
            "pid": os.getpid(),
            "engines": service.gateway.engines(),
        }
        sys.stdout.write(json_text(told) + "\n")
        sys.stdout.flush()
        return
    import shlex

    from gristmill.cli.screen import remark, show_whole, words

    show_whole(
        words(f"gateway  {service.base_url}", "bold"),
        words(f"ledger   {config.ledger}"),
        words(f"admin    key in {config.admin_key_path}"),
    )
    engines = service.gateway.engines()
    for engine in engines:
        state = "down" if not engine["up"] else "up, measuring" if engine["measuring"] else "up"
        show_whole(words(f"engine   {engine['engine']}  {engine['kind']}  {state}"))
        for note in engine["notes"]:
            remark("note", f"{engine['engine']}: {note}")
    if not any(engine["up"] for engine in engines):
        remark("note", "no engine is up yet; calls are answered 503 until one is")
    if service.ledger.shared:
        remark("note", f"other gateways of this ledger send requests on to {service.advertised}")
    if not config.on_loopback and config.tls_cert is None:
        remark("warning", "keys travel in the clear: it listens off loopback without TLS")
    sys.stdout.flush()
    remark("next", shlex.join(["gristmill", "run", "--ledger", str(config.ledger), "--", "claude", "-p", "…"]))
