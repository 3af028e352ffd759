"""Settings from flags, environment and a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gristmill.errors import Code, ConfigError
from gristmill.gateway.config import EngineSetting, GatewayConfig, parse_model
from gristmill.gateway.settings import SETTINGS, load_settings

URL = "http://127.0.0.1:8000"


def test_flags_come_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    # Whoever debugs a run overrides on the command line what a shared file says.
    file = tmp_path / "gristmill.toml"
    file.write_text(f'upstreams = ["{URL}"]\nport = 1\nmax_calls = 2\nidle_timeout_s = 3\n')
    environment = {"GRISTMILL_MAX_CALLS": "20", "GRISTMILL_IDLE_TIMEOUT_S": "30.5", "HOME": "/", "GRISTMILL_DEBUG": "1"}
    config = load_settings({"idle_timeout_s": 300.0, "host": None}, environment=environment, file=file)
    assert (config.port, config.max_calls, config.idle_timeout_s) == (1, 20, 300.0)
    assert config.upstreams == (EngineSetting(url=URL),)
    assert load_settings({}, environment={"GRISTMILL_CONFIG": str(file)}).port == 1


def test_every_form_of_lists_and_tables(tmp_path: Path) -> None:
    # One that is read in one place and not in the other would be a trap.
    file = tmp_path / "gristmill.toml"
    file.write_text(
        f'models = ["a", "b=c", "*=d"]\nallowed_hosts = ["box"]\nledger = "x.ledger"\n'
        f'[[upstreams]]\nurl = "{URL}"\nkind = "vllm"\nkey_env = "ENGINE_KEY"\n[overrides]\ntemperature = 1\n'
    )
    said = load_settings({}, environment={}, file=file)
    assert said.models == {"a": None, "b": "c", "*": "d"}
    assert said.upstreams == (EngineSetting(url=URL, kind="vllm", key_env="ENGINE_KEY"),)
    assert said.overrides == {"temperature": 1}
    assert said.admin_key_path == Path("x.ledger.admin-key")
    environment = {
        "GRISTMILL_UPSTREAMS": f"{URL}, http://127.0.0.1:8001",
        "GRISTMILL_MODELS": "a,b=c,*=d",
        "GRISTMILL_OVERRIDES": '{"temperature": 1}',
    }
    also = load_settings({}, environment=environment)
    assert len(also.upstreams) == 2
    assert (also.models, also.overrides) == (said.models, said.overrides)


@pytest.mark.parametrize(
    ("said", "mentioned"),
    [
        ({}, "upstreams"),
        ({"upstreams": []}, "upstreams"),
        ({"upstreams": [URL], "port": 70_000}, "port"),
        ({"upstreams": [URL], "port": "many"}, "port"),
        ({"upstreams": [URL], "max_calls": 0}, "max_calls"),
        ({"upstreams": [URL], "drain_s": 0}, "drain_s"),
        ({"upstreams": [URL], "tls_cert": "a.pem"}, "tls_cert"),
        ({"upstreams": [URL], "public_url": "ftp://x"}, "public_url"),
        ({"upstreams": [URL], "public_url": "http://me:pw@x"}, "public_url"),
        ({"upstreams": [URL], "log_level": "loud"}, "log_level"),
        ({"upstreams": [URL], "overrides": {"n": 2}}, "overrides.n"),
        ({"upstreams": [URL], "overrides": {"seed": 1.5}}, "overrides.seed"),
        ({"upstreams": [URL], "overrides": {"temperature": "hot"}}, "overrides.temperature"),
        ({"upstreams": [URL], "overrides": {"temperature": float("nan")}}, "overrides.temperature"),
        ({"upstreams": [URL], "max_body": 1}, "max_body"),
    ],
)
def test_what_is_wrong_is_named(said: dict[str, Any], mentioned: str) -> None:
    # A misspelt limit that is ignored protects nobody.
    with pytest.raises(ConfigError) as raised:
        load_settings(said, environment={})
    assert raised.value.code is Code.OPTION_INVALID
    assert mentioned in f"{raised.value.where} {raised.value.message}"


@pytest.mark.parametrize(
    "environment",
    [{"GRISTMILL_MAX_BODY": "1"}, {"GRISTMILL_PORT": "x"}, {"GRISTMILL_OVERRIDES": "{"}, {"GRISTMILL_MODELS": "=x"}],
)
def test_variables_are_checked_like_everything_else(environment: dict[str, str]) -> None:
    # The same trap in another place.
    with pytest.raises(ConfigError) as raised:
        load_settings({"upstreams": [URL]}, environment=environment)
    assert raised.value.code is Code.OPTION_INVALID


@pytest.mark.parametrize(
    ("variable", "text", "told"),
    [
        ("GRISTMILL_PORT", "many", "expected a whole number, got 'many'"),
        ("GRISTMILL_PORT", "70000", "expected 0 to 65535, got 70000"),
        ("GRISTMILL_DRAIN_S", "soon", "expected a number, got 'soon'"),
        ("GRISTMILL_KEEP_EXCHANGES", "perhaps", "expected true or false, got 'perhaps'"),
        ("GRISTMILL_OVERRIDES", "[1]", "expected a table of sampling settings, got a list"),
        ("GRISTMILL_MODELS", "=x", "expected NAME or NAME=ENGINE_NAME, got '=x'"),
        ("GRISTMILL_LOG_LEVEL", "loud", "expected debug, info, warning or error, got 'loud'"),
    ],
)
def test_a_bad_value_names_its_variable(variable: str, text: str, told: str) -> None:
    # Whoever reads it did not set it on this command line, and has to find out where.
    with pytest.raises(ConfigError) as raised:
        load_settings({"upstreams": [URL]}, environment={variable: text})
    assert (raised.value.message, raised.value.where) == (told, variable)


@pytest.mark.parametrize(
    ("line", "where", "told"),
    [
        ('port = "many"', ": port", "expected a whole number, got 'many'"),
        ("port = 70000", ": port", "expected 0 to 65535, got 70000"),
        ("host = 5", ": host", "expected a text, got 5"),
        ("ledger = [1]", ": ledger", "expected a path, got a list"),
        ("upstreams = 5", ": upstreams", "expected a list of engines"),
        ('upstreams = [{address = "x"}]', ": upstreams", "expected a list of engines"),
        ("overrides = {seed = 1.5}", ": overrides.seed", "expected an integer of 64 bits"),
        ('models = ["=x"]', ": models", "expected NAME or NAME=ENGINE_NAME"),
    ],
)
def test_a_bad_value_names_its_file_and_key(tmp_path: Path, line: str, where: str, told: str) -> None:
    # The same of a file, which may be long and somebody else's.
    file = tmp_path / "gristmill.toml"
    file.write_text(line)
    with pytest.raises(ConfigError) as raised:
        load_settings({} if "upstreams" in line else {"upstreams": [URL]}, environment={}, file=file)
    assert raised.value.where == f"{file}{where}"
    assert raised.value.message.startswith(told)


def test_the_nearest_name_is_suggested(tmp_path: Path) -> None:
    # A list of twenty names is no answer to a missing letter.
    for variable, meant in (
        ("GRISTMILL_UPSTREAM", "GRISTMILL_UPSTREAMS"),
        ("GRISTMILL_MAX_BODY", "GRISTMILL_MAX_BODY_BYTES"),
        ("GRISTMILL_PROT", "GRISTMILL_PORT"),
    ):
        with pytest.raises(ConfigError) as raised:
            load_settings({"upstreams": [URL]}, environment={variable: "1"})
        assert (raised.value.where, raised.value.hint) == (variable, f"did you mean {meant}?")
    file = tmp_path / "gristmill.toml"
    file.write_text("prot = 1\n")
    with pytest.raises(ConfigError) as raised:
        load_settings({}, environment={}, file=file)
    assert raised.value.hint == "did you mean port?"


def test_a_file_that_is_none(tmp_path: Path) -> None:
    # Settings that are silently not there would be the defaults.
    with pytest.raises(ConfigError) as raised:
        load_settings({}, environment={}, file=tmp_path / "missing.toml")
    assert raised.value.code is Code.FILE_UNREADABLE
    bad = tmp_path / "bad.toml"
    for text in ("upstreams = [", "nonsense = 1\n", "upstreams = 5\n", "models = [1]\n"):
        bad.write_text(text)
        with pytest.raises(ConfigError):
            load_settings({"upstreams": [URL]} if "upstreams" not in text else {}, environment={}, file=bad)


def test_every_setting_is_documented() -> None:
    # The configuration page is written from this docstring.
    text = GatewayConfig.__doc__ or ""
    assert all(name in text for name in SETTINGS)
    assert len(SETTINGS) == len(msgspec.structs.fields(GatewayConfig))


def test_names_of_models() -> None:
    # A typo in a mapping would send calls to another model.
    assert parse_model("a=b/c=d") == ("a", "b/c=d")
    for text in ("", "=a", "a="):
        with pytest.raises(ConfigError):
            parse_model(text)
