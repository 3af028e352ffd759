from __future__ import annotations

import json
import stat
import tomllib
from pathlib import Path

import pytest

from gristmill.service.harnesses import HARNESSES, Ran, Reach, harness_of
from gristmill.service.harnesses.harness import option_value

REACH = Reach(
    openai_base_url="http://127.0.0.1:8600/v1",
    anthropic_base_url="http://127.0.0.1:8600",
    key="gm_key",
    model='odd "name"',
    max_model_len=1000,
)


def ran(folder: Path, *command: str, **environment: str) -> Ran:
    return Ran(command=command, environment=environment, folder=folder, working_directory=folder, sessions={"s" * 36})


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("claude", "claude-code"),
        ("/usr/local/bin/codex", "codex"),
        ("opencode", "opencode"),
        ("pi", "pi"),
        ("mini", "mini-swe-agent"),
        ("python", "openai"),
        ("claude.sh", "openai"),
    ],
)
def test_a_harness_is_known_by_its_program(program: str, name: str) -> None:
    """Nobody should have to say what the command line says already."""
    assert harness_of([program, "-p", "x"]).name == name


@pytest.mark.parametrize("name", HARNESSES)
def test_every_harness_gets_the_key_and_nothing_else_of_ours(tmp_path: Path, name: str) -> None:
    """A harness without the key makes no calls; files with it are its owner's alone."""
    setup = HARNESSES[name].prepare(REACH, tmp_path)
    assert "gm_key" in setup.variables.values()
    assert not set(setup.variables) & set(setup.removed)
    for file in tmp_path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert "gm_key" not in file.read_text()
    bare = HARNESSES[name].prepare(
        Reach(openai_base_url="http://x/v1", anthropic_base_url="http://x", key="gm_key"), tmp_path
    )
    assert "gm_key" in bare.variables.values()


def test_claude_code_asks_nobody_and_nowhere_else(tmp_path: Path) -> None:
    """A vendor's token in the environment would send the calls to the vendor."""
    setup = HARNESSES["claude-code"].prepare(REACH, tmp_path)
    assert setup.variables["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8600"
    assert setup.variables["ANTHROPIC_AUTH_TOKEN"] == "gm_key"
    assert setup.variables["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == 'odd "name"'
    assert {"ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_OAUTH_TOKEN"} <= set(setup.removed)
    assert not any("NONESSENTIAL" in variable for variable in setup.variables)


def test_codex_configuration_is_toml(tmp_path: Path) -> None:
    """Codex ignores the usual variables; a provider of its own is the only way."""
    setup = HARNESSES["codex"].prepare(REACH, tmp_path)
    config = tomllib.loads((tmp_path / "config.toml").read_text())
    assert config["model"] == 'odd "name"'
    assert config["model_context_window"] == 1000
    provider = config["model_providers"][config["model_provider"]]
    assert provider["base_url"] == "http://127.0.0.1:8600/v1"
    assert provider["wire_api"] == "responses"
    assert setup.variables[provider["env_key"]] == "gm_key"
    assert setup.variables["CODEX_HOME"] == str(tmp_path)


def test_opencode_adds_a_provider_for_both_models(tmp_path: Path) -> None:
    """Titles asked elsewhere are calls that are not captured."""
    setup = HARNESSES["opencode"].prepare(REACH, tmp_path)
    config = json.loads(setup.variables["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == config["small_model"] == 'gristmill/odd "name"'
    provider = config["provider"]["gristmill"]
    assert provider["options"]["baseURL"] == "http://127.0.0.1:8600/v1"
    assert provider["models"]['odd "name"']["limit"] == {"context": 1000, "output": 250}
    assert "permission" not in config


def test_pi_has_a_default_model(tmp_path: Path) -> None:
    """Without one the command line would have to name the provider."""
    setup = HARNESSES["pi"].prepare(REACH, tmp_path)
    settings = json.loads((tmp_path / "settings.json").read_text())
    models = json.loads((tmp_path / "models.json").read_text())["providers"][settings["defaultProvider"]]
    assert models["models"][0]["id"] == settings["defaultModel"]
    assert setup.variables[models["apiKey"]] == "gm_key"
    assert setup.variables["PI_CODING_AGENT_DIR"] == str(tmp_path)


def test_mini_swe_agent_finds_its_model(tmp_path: Path) -> None:
    """LiteLLM wants the provider in the name."""
    variables = HARNESSES["mini-swe-agent"].prepare(REACH, tmp_path).variables
    assert variables["MSWEA_MODEL_NAME"] == 'openai/odd "name"'
    assert variables["OPENAI_BASE_URL"] == variables["OPENAI_API_BASE"] == "http://127.0.0.1:8600/v1"


def test_where_records_are_looked_for(tmp_path: Path) -> None:
    """A file that the command line names elsewhere is there, and not where it would be by default."""
    missing = {
        name: str(HARNESSES[name].history(ran(tmp_path, name, HOME=str(tmp_path))).missing) for name in HARNESSES
    }
    assert str(tmp_path / ".claude") in missing["claude-code"]
    assert str(tmp_path / ".local" / "share" / "opencode" / "opencode.db") in missing["opencode"]
    assert "--result-file" in missing["openai"]
    elsewhere = ran(tmp_path, "claude", HOME="/nowhere", CLAUDE_CONFIG_DIR=str(tmp_path / "conf"))
    assert str(tmp_path / "conf") in str(HARNESSES["claude-code"].history(elsewhere).missing)
    data = ran(tmp_path, "opencode", HOME="/nowhere", XDG_DATA_HOME=str(tmp_path))
    assert str(tmp_path / "opencode" / "opencode.db") in str(HARNESSES["opencode"].history(data).missing)
    trajectory = tmp_path / "t.json"
    trajectory.write_text('{"messages": [{"role": "assistant", "content": "x"}]}')
    found = HARNESSES["mini-swe-agent"].history(ran(tmp_path, "mini", "-o", "t.json", "-t", "x"))
    assert found.sources == (str(trajectory),)


def test_options_of_a_command_line() -> None:
    """The last one counts, as for the program itself."""
    words = ["mini", "-o", "a", "--output=b", "-t", "--output"]
    assert option_value(words, "-o", "--output") == "b"
    assert option_value(words, "-x") is None
    assert option_value(["mini", "-o"], "-o") is None
