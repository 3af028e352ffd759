"""Settings from flags, environment and one TOML file: the first that says something counts.

Invariant: a key that is not a setting is an error wherever it stands, and so is a value of the wrong type; nothing is
ignored. Every setting has one name: `max_body_bytes` in TOML, `GRISTMILL_MAX_BODY_BYTES`, `--max-body-bytes`.

Not here: what the settings are (config), the flags themselves (the commands).
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import msgspec

from gristmill.errors import Code, ConfigError
from gristmill.gateway.config import GatewayConfig, parse_model
from gristmill.ledger.address import LedgerAddress, PostgresAddress, parse_address

__all__ = ["ENVIRONMENT_PREFIX", "SETTINGS", "load_settings"]

ENVIRONMENT_PREFIX: Final = "GRISTMILL_"
SETTINGS: Final = tuple(field.encode_name for field in msgspec.structs.fields(GatewayConfig))
"""Names of all settings, in the order of `GatewayConfig`."""

_FIELDS: Final = {field.encode_name: field for field in msgspec.structs.fields(GatewayConfig)}
_EXPECTED: Final = {
    "upstreams": "a list of engines, each an address or a table of url, kind and key_env",
    "allowed_hosts": "a list of names",
    "models": "a list of NAME or NAME=ENGINE_NAME, or a table of them",
    "overrides": "a table of sampling settings",
}
_KINDS: Final[Mapping[Any, str]] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
    str | None: "a text",
    Path | None: "a path",
}
_LISTS: Final = frozenset({"upstreams", "allowed_hosts", "models"})
_JSON: Final = frozenset({"overrides"})
_NOT_SETTINGS: Final = frozenset({"CONFIG", "UPSTREAM_KEY", "DEBUG", "ROLLOUT_ID", "ATTEMPT"})
"""Variables of this prefix that are no settings: where settings and the engine's key are, and what a child is told."""


class _Said(NamedTuple):
    """A value, and where it was said: a flag's setting, a variable, or a file and its key."""

    value: Any
    where: str


def load_settings(
    flags: Mapping[str, Any],
    *,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> GatewayConfig:
    """Put the settings of a gateway together.

    Args:
        flags: by setting name, as the command line parsed them; None is unsaid.
        environment: `GRISTMILL_…` variables; lists are separated by commas, `overrides` is JSON. The process's own
            by default.
        file: a TOML file whose keys are setting names; `GRISTMILL_CONFIG` names one where this is None.

    Raises:
        ConfigError: `option_invalid` with the name of the setting and where it was said; `file_unreadable`.
    """
    variables = os.environ if environment is None else environment
    named = variables.get(f"{ENVIRONMENT_PREFIX}CONFIG")
    path = file if file is not None else Path(named) if named else None
    said: dict[str, _Said] = {}
    if path is not None:
        said.update(_from_file(path))
    said.update(_from_environment(variables))
    for name, value in flags.items():
        if name not in SETTINGS:
            raise _unknown(name, name)
        if value is not None:
            said[name] = _Said(_listed(name, value, name), name)
    read = {_FIELDS[name].name: _read(name, one) for name, one in said.items()}
    try:
        return GatewayConfig(**read)
    except ConfigError as error:
        setting, dot, rest = (error.where or "").partition(".")
        if setting not in said:
            raise
        raise ConfigError(
            error.message, code=error.code, where=f"{said[setting].where}{dot}{rest}", hint=error.hint
        ) from error


def _read(name: str, said: _Said) -> Any:
    """Bring a value into the type of its setting."""
    kind = _FIELDS[name].type
    if name == "ledger":
        return _ledger(said)
    try:
        return msgspec.convert(said.value, kind, strict=False, dec_hook=_decode)
    except msgspec.ValidationError as error:
        got = _plain(said.value)
        raise ConfigError(
            f"expected {_EXPECTED.get(name) or _KINDS[kind]}, got {got}",
            code=Code.OPTION_INVALID,
            where=said.where,
        ) from error


def _ledger(said: _Said) -> LedgerAddress:
    """Read a path or a URL; what is wrong with a URL is told without it, because it may hold a password."""
    if not isinstance(said.value, str | Path | PostgresAddress):
        raise ConfigError(
            f"expected a path, got {_plain(said.value)}",
            code=Code.OPTION_INVALID,
            where=said.where,
        )
    try:
        return parse_address(said.value)
    except ConfigError as error:
        raise ConfigError(error.message, code=error.code, where=said.where, hint=error.hint) from None


def _plain(value: object) -> str:
    """Say what was given: a short value as it is."""
    if isinstance(value, list | tuple):
        return "a list"
    return "a table" if isinstance(value, dict) else repr(value)


def _decode(kind: type[Any], value: Any) -> Any:
    if issubclass(kind, Path) and isinstance(value, str | Path):
        return Path(value)
    raise TypeError(f"expected {kind.__name__}")


def _from_file(path: Path) -> dict[str, _Said]:
    try:
        with path.open("rb") as source:
            said = tomllib.load(source)
    except OSError as error:
        raise ConfigError(
            f"expected a TOML file, got {error.strerror}", code=Code.FILE_UNREADABLE, where=str(path)
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"expected TOML: {error}", code=Code.OPTION_INVALID, where=str(path)) from error
    for name in said:
        if name not in SETTINGS:
            raise _unknown(name, str(path))
    places = {name: f"{path}: {name}" for name in said}
    return {name: _Said(_listed(name, value, places[name]), places[name]) for name, value in said.items()}


def _from_environment(variables: Mapping[str, str]) -> dict[str, _Said]:
    said: dict[str, _Said] = {}
    for variable, text in variables.items():
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        if name == variable or name in _NOT_SETTINGS:
            continue
        setting = name.lower()
        if setting not in SETTINGS:
            raise _unknown(setting, variable, ENVIRONMENT_PREFIX)
        if setting in _JSON:
            try:
                value: Any = msgspec.json.decode(text)
            except msgspec.DecodeError as error:
                raise ConfigError(f"expected JSON: {error}", code=Code.OPTION_INVALID, where=variable) from error
        elif setting in _LISTS:
            value = _listed(setting, [part.strip() for part in text.split(",") if part.strip()], variable)
        else:
            value = text
        said[setting] = _Said(value, variable)
    return said


def _listed(name: str, value: Any, where: str) -> Any:
    """Read the short forms of lists: an engine as its URL, a model as `NAME=ENGINE_NAME`."""
    if name not in {"upstreams", "models"} or not isinstance(value, list | tuple):
        return value
    listed = cast("list[Any]", value)
    if name == "upstreams":
        return [{"url": each} if isinstance(each, str) else each for each in listed]
    if not all(isinstance(each, str) for each in listed):
        raise ConfigError("expected texts NAME or NAME=ENGINE_NAME", code=Code.OPTION_INVALID, where=where)
    try:
        return dict(parse_model(each) for each in listed)
    except ConfigError as error:
        raise ConfigError(error.message, code=error.code, where=where) from error


def _unknown(name: str, where: str, prefix: str = "") -> ConfigError:
    near = difflib.get_close_matches(name, SETTINGS, n=1)
    if near:
        hint = f"did you mean {prefix}{near[0].upper() if prefix else near[0]}?"
    else:
        hint = "settings: " + ", ".join(SETTINGS)
    return ConfigError(
        f"expected a setting, got {name!r}",
        code=Code.OPTION_INVALID,
        where=where,
        hint=hint,
    )
