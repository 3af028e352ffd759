from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import Code, ConfigError
from gristmill.ledger import SqliteReader
from gristmill.service.client import AdminClient
from gristmill.service.server import ServiceThread
from tests.service.gateways import Gateway, config_of, request, scripted_gateway

ACTS = [
    ("POST", "/gristmill/v1/rollouts", {}),
    ("GET", "/gristmill/v1/rollouts", None),
    ("GET", "/gristmill/v1/rollouts/{own}", None),
    ("POST", "/gristmill/v1/rollouts/{own}/finish", {"reward": 1}),
    ("POST", "/gristmill/v1/rollouts/{own}/freeze", {}),
    ("POST", "/gristmill/v1/rollouts/{own}/abandon", {}),
    ("POST", "/gristmill/v1/rollouts/{own}/revoke", {}),
    ("GET", "/gristmill/v1/rollouts/{own}/calls", None),
    ("GET", "/gristmill/v1/rollouts/{own}/verdicts", None),
    ("GET", "/gristmill/v1/rollouts/{own}/rows", None),
    ("POST", "/gristmill/v1/weights", {"version": "x"}),
    ("GET", "/gristmill/v1/engines", None),
    ("GET", "/gristmill/v1/nothing", None),
    ("GET", "/metrics", None),
]
"""Every act of the administrator's, and a route that is not there."""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with scripted_gateway(
        tmp_path_factory.mktemp("gateway") / "run.gristmill", allowed_hosts=("gate.test",)
    ) as running:
        yield running


@pytest.fixture
def own(gateway: Gateway) -> dict[str, Any]:
    return gateway.mint()


@pytest.mark.parametrize(("method", "path", "body"), ACTS)
def test_only_the_admin_key_administrates(
    gateway: Gateway, own: dict[str, Any], method: str, path: str, body: Any
) -> None:
    """The agent under test holds a rollout key; with it, it must not write its own reward."""
    place = path.format(own=f"{own['rollout_id']}/{own['attempt']}")
    tries: list[tuple[dict[str, str], int, str]] = [
        ({}, 401, "key_missing"),
        ({"Authorization": f"Bearer {own['key']}"}, 403, "key_forbidden"),
        ({"x-api-key": own["key"]}, 403, "key_forbidden"),
        ({"Authorization": "Bearer gma_" + "x" * 43}, 401, "key_unknown"),
        ({"Authorization": f"Bearer {gateway.admin_key[:-1]}"}, 401, "key_unknown"),
        ({"Authorization": f"Bearer {gateway.admin_key}x"}, 401, "key_unknown"),
        ({"Authorization": f"Basic {gateway.admin_key}"}, 401, "key_missing"),
        ({"Authorization": "Bearer"}, 401, "key_missing"),
        ({"Authorization": f"Bearer {gateway.admin_key}", "x-api-key": own["key"]}, 401, "key_missing"),
        ({"Cookie": f"key={gateway.admin_key}"}, 401, "key_missing"),
    ]
    for headers, status, code in tries:
        answer = request(gateway.url, method, place, body, headers=headers)
        assert (answer.status, answer.error) == (status, code), headers
        assert own["key"] not in answer.body.decode()
        assert gateway.admin_key not in answer.body.decode()
    assert gateway.admin("GET", f"/rollouts/{own['rollout_id']}/0").json["state"] == "open"


def test_the_key_is_not_taken_from_the_query(gateway: Gateway) -> None:
    """An address ends in logs; a key in it is a key in every log."""
    for query in (f"key={gateway.admin_key}", f"api_key={gateway.admin_key}", f"access_token={gateway.admin_key}"):
        assert request(gateway.url, "GET", f"/gristmill/v1/engines?{query}").status == 401


def test_a_rollout_key_is_for_its_own_rollout(gateway: Gateway, own: dict[str, Any]) -> None:
    """One agent must not speak in another's name."""
    other = gateway.mint()
    path = f"/r/{other['rollout_id']}/0/v1/chat/completions"
    body = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
    answer = request(gateway.url, "POST", path, body, key=own["key"])
    assert (answer.status, answer.error) == (403, "key_forbidden")
    assert gateway.admin("GET", f"/rollouts/{other['rollout_id']}/0").json["calls"] == 0


def test_the_admin_key_makes_no_calls(gateway: Gateway) -> None:
    """A call has to belong to a rollout."""
    answer = gateway.chat(gateway.admin_key)
    assert (answer.status, answer.error) == (403, "key_forbidden")


@pytest.mark.parametrize(
    "rollout_id",
    [
        "..",
        ".",
        "...",
        "a/b",
        "../x",
        "a b",
        "a%2fb",
        "ä",
        "a" * 129,
        "",
        "a\n",
        "a\x00",
        "-" * 129,
        "a:b",
        "~x",
        "a\\b",
    ],
)
def test_strange_ids_are_refused_and_never_cleaned(gateway: Gateway, rollout_id: str) -> None:
    """An id that was cleaned is another rollout's id; one with a path in it is a file somewhere."""
    answer = gateway.admin("POST", "/rollouts", {"rollout_id": rollout_id})
    assert answer.status == 400
    assert answer.json["error"]["where"] == "$.rollout_id"


@pytest.mark.parametrize(
    "path",
    [
        "/rollouts/../engines",
        "/rollouts/%2e%2e/0",
        "/rollouts/..%2f..%2fetc/0/calls",
        "/rollouts/x%00/0",
        "/rollouts/x%2f0/0",
        "/rollouts/x/00",
        "/rollouts/x/-1",
        "/rollouts/x/1e1",
        "/rollouts/x/%31%20",
        "/rollouts/x/9999999999",
        "/rollouts/x/%D9%A3",
        "/rollouts//0",
        "//rollouts",
        "/./rollouts",
        "/rollouts/x/0/../../../engines",
    ],
)
def test_paths_lead_nowhere_else(gateway: Gateway, path: str) -> None:
    """A path that climbs must not reach another act, nor a file."""
    answer = gateway.admin("GET", path)
    assert answer.status in {400, 404}, answer.body
    assert answer.error in {"option_invalid", "route_unknown"}


def test_a_web_page_cannot_administrate(gateway: Gateway) -> None:
    """A page in the trainer's browser reaches loopback; with a leaked key it must still get nowhere."""
    for headers in (
        {"Origin": "https://evil.example"},
        {"Origin": gateway.url},
        {"Origin": "null"},
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": ""},
    ):
        answer = gateway.admin("GET", "/engines", headers=headers)
        assert (answer.status, answer.error) == (403, "host_refused"), headers
        assert not [name for name in answer.headers if name.startswith("access-control")]
    preflight = request(
        gateway.url, "OPTIONS", "/gristmill/v1/rollouts", headers={"Access-Control-Request-Method": "POST"}
    )
    assert preflight.status == 401
    assert gateway.admin("GET", "/engines", headers={"Host": "gate.test:1"}).status == 200


def test_the_host_that_a_client_claims_is_not_told_on(gateway: Gateway) -> None:
    """A forged host in the answer to `open` would send the harness, with its key, to somebody else."""
    answer = gateway.admin("POST", "/rollouts", {}, headers={"X-Forwarded-Host": "evil.example", "Forwarded": "host=e"})
    assert answer.json["base_url"] == gateway.url


@pytest.mark.parametrize("name", ["os:system", "tests.corpus.policies:everything", ":", "a.b:c"])
def test_code_is_never_named_over_http(gateway: Gateway, own: dict[str, Any], name: str) -> None:
    """Whoever has the admin key administrates rollouts; it must not run code on the trainer's machine."""
    below = f"/rollouts/{own['rollout_id']}/0"
    answers = [gateway.admin("GET", f"{below}/{act}?policy={name}") for act in ("verdicts", "rows")]
    answers.append(gateway.admin("POST", f"{below}/finish", {"policy": name}))
    for answer in answers:
        assert (answer.status, answer.error) == (400, "policy_option_invalid")
    unknown = gateway.admin("GET", f"{below}/rows?policy=os.system")
    assert (unknown.status, unknown.error) == (400, "policy_unknown")


def test_secrets_are_written_nowhere(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger and a log are handed around; a key in them is a key that everybody has."""
    engine_key = "sk-engine-0123456789abcdef"
    monkeypatch.setenv("GRISTMILL_UPSTREAM_KEY", engine_key)
    with scripted_gateway(tmp_path / "run.gristmill", log_level="debug") as gateway:
        minted = gateway.mint()
        gateway.chat(minted["key"])
        gateway.chat("gm_" + "wrong" * 9)
        gateway.admin("GET", "/engines", key="gma_" + "wrong" * 9)
        gateway.admin("POST", "/rollouts", data=b"{")
        gateway.admin("POST", f"/rollouts/{minted['rollout_id']}/0/finish", {"policy": "final_context"})
        metrics = request(gateway.url, "GET", "/metrics", key=gateway.admin_key)
        with SqliteReader(gateway.ledger) as ledger:
            assert sum(1 for _ in ledger.attempts()) == 1
        told = metrics.body.decode() + gateway.admin("GET", "/engines").body.decode()
        secrets = [minted["key"], gateway.admin_key, engine_key, "wrong" * 9]
        files = [path for path in tmp_path.iterdir() if path != gateway.service.config.admin_key_path]
        for path in files:
            data = path.read_bytes()
            assert not [secret for secret in secrets if secret.encode() in data], path
    written = "".join(capfd.readouterr()) + told
    assert '"event":"served"' in written
    assert not [secret for secret in secrets if secret in written]


def test_the_admin_key_is_its_owners_alone(tmp_path: Path) -> None:
    """Another user of the machine must not become the administrator."""
    with scripted_gateway(tmp_path / "run.gristmill") as gateway:
        about = gateway.service.config.admin_key_path.stat()
        assert stat.S_IMODE(about.st_mode) == 0o600
        assert about.st_uid == os.geteuid()
        assert repr(AdminClient(gateway.url, gateway.admin_key)) == f"AdminClient({gateway.url!r})"


@pytest.mark.parametrize("kind", ["readable", "link", "folder", "nonsense"])
def test_a_key_file_that_is_not_private_stops_the_gateway(tmp_path: Path, kind: str) -> None:
    """A key that others could read or have put there is no key."""
    path = tmp_path / "run.gristmill.admin-key"
    good = "gma_" + "k" * 43
    if kind == "readable":
        path.write_text(good)
        path.chmod(0o644)
    elif kind == "link":
        (tmp_path / "target").write_text(good)
        (tmp_path / "target").chmod(0o600)
        path.symlink_to(tmp_path / "target")
    elif kind == "folder":
        path.mkdir(mode=0o700)
    else:
        path.write_text("short")
        path.chmod(0o600)
    with pytest.raises(ConfigError) as caught:
        ServiceThread(config_of("http://127.0.0.1:1", tmp_path / "run.gristmill"))
    assert caught.value.code == Code.FILE_UNREADABLE
    assert good not in str(caught.value)


def test_errors_do_not_repeat_what_was_sent(gateway: Gateway) -> None:
    """An error that echoes a body puts prompts and keys into logs."""
    answer = gateway.admin("POST", "/rollouts", {"group_id": {"secret": "hunter2"}})
    assert answer.status == 400
    assert "hunter2" not in json.dumps(answer.json)
