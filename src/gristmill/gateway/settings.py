"""Settings from flags, environment and one TOML file: the first that says something counts.

Invariant: a key that is not a setting is an error wherever it stands, and so is a value of the wrong type; nothing is
ignored. Every setting has one name: `max_body_bytes` in TOML, `GRISTMILL_MAX_BODY_BYTES`, `--max-body-bytes`.

Not here: what the settings are (config), the flags themselves (the commands).
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from gristmill.errors import Code, ConfigError
from gristmill.gateway.config import EngineSetting, GatewayConfig, parse_model

__all__ = ["ENVIRONMENT_PREFIX", "SETTINGS", "load_settings"]

ENVIRONMENT_PREFIX: Final = "GRISTMILL_"
SETTINGS: Final = tuple(field.name for field in msgspec.structs.fields(GatewayConfig))
"""Names of all settings, in the order of `GatewayConfig`."""

_LISTS: Final = frozenset({"upstreams", "allowed_hosts", "models"})
_JSON: Final = frozenset({"overrides"})
_NOT_SETTINGS: Final = frozenset({"CONFIG", "UPSTREAM_KEY", "DEBUG", "ROLLOUT_ID", "ATTEMPT"})
"""Variables of this prefix that are no settings: where settings and the engine's key are, and what a child is told."""


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
    said: dict[str, Any] = {}
    if path is not None:
        said.update(_from_file(path))
    said.update(_from_environment(variables))
    said.update({name: _listed(name, value, name) for name, value in flags.items() if value is not None})
    try:
        return msgspec.convert(said, GatewayConfig, strict=False, dec_hook=_decode)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error), code=Code.OPTION_INVALID, where="settings") from error


def _decode(kind: type[Any], value: Any) -> Any:
    if issubclass(kind, Path) and isinstance(value, str | Path):
        return Path(value)
    raise NotImplementedError(kind)


def _from_file(path: Path) -> dict[str, Any]:
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
    return {name: _listed(name, value, str(path)) for name, value in said.items()}


def _from_environment(variables: Mapping[str, str]) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for variable, text in variables.items():
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        if name == variable or name in _NOT_SETTINGS:
            continue
        setting = name.lower()
        if setting not in SETTINGS:
            raise _unknown(setting, variable)
        if setting in _JSON:
            try:
                said[setting] = msgspec.json.decode(text)
            except msgspec.DecodeError as error:
                raise ConfigError(f"expected JSON: {error}", code=Code.OPTION_INVALID, where=variable) from error
        elif setting in _LISTS:
            said[setting] = _listed(setting, [part.strip() for part in text.split(",") if part.strip()], variable)
        else:
            said[setting] = text
    return said


def _listed(name: str, value: Any, where: str) -> Any:
    """Read the short forms of lists: an engine as its URL, a model as `NAME=ENGINE_NAME`."""
    if name not in {"upstreams", "models"} or not isinstance(value, list | tuple):
        return value
    listed = cast("list[Any]", value)
    if name == "upstreams":
        return [EngineSetting(url=each) if isinstance(each, str) else each for each in listed]
    if not all(isinstance(each, str) for each in listed):
        raise ConfigError("expected texts NAME or NAME=ENGINE_NAME", code=Code.OPTION_INVALID, where=where)
    return dict(parse_model(each) for each in listed)


def _unknown(name: str, where: str) -> ConfigError:
    return ConfigError(
        f"expected a setting, got {name!r}",
        code=Code.OPTION_INVALID,
        where=where,
        hint="settings: " + ", ".join(SETTINGS),
    )
