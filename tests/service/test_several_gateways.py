"""Two gateways that have one PostgreSQL ledger: keys, 307, and what passes from one to the other.

If one of these fails, a harness behind a load balancer is refused, or two gateways write to its rollout.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

import pytest

from gristmill.errors import CaptureError, Code, ConfigError
from gristmill.gateway.config import GatewayConfig
from gristmill.gateway.keys import read_admin_key
from gristmill.gateway.settings import load_settings
from gristmill.ledger import AttemptKey, AttemptState, PostgresAddress, open_reader, parse_address
from gristmill.ledger.postgres.instances import LOST_WITH_LEASE
from gristmill.scripted import ScriptedEngine
from gristmill.service.client import AdminClient
from gristmill.service.place import begin
from gristmill.service.server import ServiceThread
from tests.ledger.server import fresh_url
from tests.ledger.test_postgres_leases import asked, expire
from tests.service.gateways import SCRIPT, Answer, Gateway, config_of, request, two_turns, user

WITHIN_s = 30.0


@pytest.fixture
def url() -> str:
    return fresh_url()


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    slow = {"when": {"last": "take your time"}, "reply": {"content": "At last.", "delay_s": 1.5}}
    with ScriptedEngine({"rules": [slow, *SCRIPT["rules"]]}).serve() as address:
        yield address


@contextmanager
def gateway(engine: str, url: str, folder: Path, **more: Any) -> Iterator[Gateway]:
    config = config_of(engine, parse_address(url), admin_key_file=folder / "admin-key", **more)  # pyright: ignore
    with ServiceThread(config) as thread:
        yield Gateway(thread.service, read_admin_key(folder / "admin-key"))


@pytest.fixture
def pair(engine: str, url: str, tmp_path: Path) -> Iterator[tuple[Gateway, Gateway]]:
    with ExitStack() as stack:
        yield (
            stack.enter_context(gateway(engine, url, tmp_path)),
            stack.enter_context(gateway(engine, url, tmp_path)),
        )


def followed(answer: Answer, method: str, body: Any, key: str) -> Answer:
    """Ask where an answer points to."""
    assert answer.status == 307
    parts = urlsplit(answer.headers["location"])
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    return request(f"{parts.scheme}://{parts.netloc}", method, path, body, key=key)


def test_a_key_of_one_is_known_to_both(pair: tuple[Gateway, Gateway]) -> None:
    one, other = pair
    key = one.mint(rollout_id="r")["key"]
    body = {"model": "scripted", "messages": [user("hi")]}
    sent_on = other.chat(key)
    assert sent_on.status == 307
    assert sent_on.headers["location"] == f"{one.url}/v1/chat/completions"
    assert sent_on.error
    assert followed(sent_on, "POST", body, key).status == 200
    below = request(other.url, "POST", "/r/r/0/v1/chat/completions?a=b", body, key=key)
    assert below.headers["location"] == f"{one.url}/r/r/0/v1/chat/completions?a=b"
    assert request(other.url, "GET", "/v1/models", key=key).status == 200
    assert request(other.url, "POST", "/v1/chat/completions", body, key="gm_nonsense").status == 401
    # Each dialect is told in its own shape.
    messages = request(other.url, "POST", "/v1/messages", {**body, "max_tokens": 9}, key=key)
    assert (messages.status, messages.json["type"]) == (307, "error")


def test_the_administrator_is_sent_on(pair: tuple[Gateway, Gateway]) -> None:
    one, other = pair
    key = one.mint(rollout_id="r")["key"]
    history = {"result": {"messages": two_turns(one, key)}, "reward": 1.0}
    for method, path in (
        ("GET", "/rollouts/r/0"),
        ("GET", "/rollouts/r/0/calls"),
        ("GET", "/rollouts/r/0/verdicts?policy=returned_history"),
        ("GET", "/rollouts/r/0/rows"),
        ("POST", "/rollouts/r/0/revoke"),
        ("POST", "/rollouts/r/0/freeze"),
        ("POST", "/rollouts/r/0/abandon"),
        ("POST", "/rollouts/r/0/finish"),
    ):
        answer = other.admin(method, path, history if path.endswith("finish") else None)
        assert answer.status == 307, (path, answer)
        assert answer.headers["location"] == f"{one.url}/gristmill/v1{path}"
        assert answer.error == "attempt_elsewhere"
    # Lists are of the ledger, whoever answers.
    assert [each["rollout_id"] for each in other.admin("GET", "/rollouts").json["rollouts"]] == ["r"]
    assert other.admin("GET", "/rollouts/r").status == 200
    finished = followed(other.admin("POST", "/rollouts/r/0/finish", history), "POST", history, other.admin_key)
    assert finished.json["outcome"] == "selected"
    # Nothing can come any more, so that anybody may answer for it.
    assert other.admin("GET", "/rollouts/r/0").json["state"] == "finished"
    assert other.admin("GET", "/rollouts/r/0/rows").status == 200
    assert other.admin("POST", "/rollouts/r/0/freeze").status == 200
    assert other.chat(key).status == 401
    # Our own client says where; it takes the key nowhere else.
    one.mint(rollout_id="s")
    with pytest.raises(CaptureError) as caught:
        AdminClient(other.url, other.admin_key).finish(AttemptKey("s"), None, None)
    assert caught.value.code == Code.ATTEMPT_ELSEWHERE
    assert one.url in caught.value.message


def test_an_attempt_passes_on_when_its_gateway_ends(engine: str, url: str, tmp_path: Path) -> None:
    with gateway(engine, url, tmp_path) as other:
        with gateway(engine, url, tmp_path) as one:
            key = one.mint(rollout_id="r")["key"]
            messages = two_turns(one, key)
        answer = other.chat(key, *messages, user("And now?"), tools=True)
        assert answer.status == 200
        history = {"result": {"messages": messages}}
        assert other.admin("POST", "/rollouts/r/0/finish", history).json["outcome"] == "selected"
        with open_reader(parse_address(url)) as reader:
            records = reader.read(AttemptKey("r"))[0].records
    # The other one knew the conversation from the ledger.
    assert [record.parent_call_id for record in records] == [None, *(record.model_call_id for record in records[:-1])]


def test_an_attempt_passes_on_when_its_lease_has_expired(pair: tuple[Gateway, Gateway], url: str) -> None:
    one, other = pair
    key = one.mint(rollout_id="r")["key"]
    assert one.chat(key).status == 200
    expire(url, one.service.ledger.instance)
    assert other.chat(key).status == 200
    # The first finds out at its next write, refuses it, and sends on from then on.
    answers = [one.chat(key) for _ in range(2)]
    assert answers[-1].status == 307
    assert answers[-1].headers["location"].startswith(other.url)
    with open_reader(parse_address(url)) as reader:
        capture, _ = reader.read(AttemptKey("r"))
    assert len(capture.records) == 2
    assert not capture.lost
    # And opens new ones under its new lease.
    assert one.chat(one.mint()["key"]).status == 200


def test_a_call_whose_gateway_has_lost_its_lease_is_lost(pair: tuple[Gateway, Gateway], url: str) -> None:
    # The engine answered it all the same; that reply is in no record, so the harness must not get it.
    one, other = pair
    key = one.mint(rollout_id="r")["key"]
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(one.chat, key, user("take your time"))
        until = monotonic() + WITHIN_s
        while not asked(url, "SELECT 1 FROM intents"):
            assert monotonic() < until
            sleep(0.01)
        assert other.chat(key).status == 307
        expire(url, one.service.ledger.instance)
        assert other.chat(key).status == 200
        answer = slow.result(WITHIN_s)
    assert (answer.status, answer.error) == (503, "not_durable")
    with open_reader(parse_address(url)) as reader:
        capture, _ = reader.read(AttemptKey("r"))
    assert len(capture.records) == 1
    assert [call.reason for call in capture.lost] == [LOST_WITH_LEASE]


def test_next_attempts_that_are_opened_at_once_have_numbers_of_their_own(pair: tuple[Gateway, Gateway]) -> None:
    with ThreadPoolExecutor(8) as pool:
        opened = list(pool.map(lambda n: pair[n % 2].mint(rollout_id="r")["attempt"], range(16)))
    assert sorted(opened) == list(range(16))
    taken = pair[0].admin("POST", "/rollouts", {"rollout_id": "r", "attempt": 3})
    assert taken.status == 409


def test_a_revoked_key_opens_nothing_anywhere(pair: tuple[Gateway, Gateway]) -> None:
    one, other = pair
    key = one.mint(rollout_id="r")["key"]
    one.admin("POST", "/rollouts/r/0/revoke")
    assert one.chat(key).status == 401
    assert other.chat(key).status == 401


def test_each_sweeps_its_own(engine: str, url: str, tmp_path: Path) -> None:
    # Else the gateway with the shorter patience would abandon what is another's.
    with gateway(engine, url, tmp_path) as one, gateway(engine, url, tmp_path, abandon_after_s=0.2) as other:
        one.mint(rollout_id="mine")
        other.mint(rollout_id="theirs")
        until = monotonic() + WITHIN_s
        while other.admin("GET", "/rollouts/theirs/0").json["state"] != "abandoned":
            assert monotonic() < until
            sleep(0.05)
        assert one.admin("GET", "/rollouts/mine/0").json["state"] == "open"


def test_the_address_for_others_is_a_setting(engine: str, url: str, tmp_path: Path) -> None:
    with (
        gateway(engine, url, tmp_path, advertise_url="http://gateway-1.internal:8600/", public_url="http://all") as one,
        gateway(engine, url, tmp_path) as other,
    ):
        opened = one.mint(rollout_id="r")
        assert opened["base_url"] == "http://all"
        sent_on = other.chat(opened["key"])
        assert sent_on.headers["location"] == "http://gateway-1.internal:8600/v1/chat/completions"
        # It answers to that name.
        headers = {"Host": "gateway-1.internal:8600"}
        asked_there = request(one.url, "GET", "/v1/models", key=opened["key"], headers=headers)
        assert asked_there.status == 200
    with pytest.raises(ConfigError):
        GatewayConfig(upstreams=config_of(engine, tmp_path).upstreams, advertise_url="gateway-1:8600")


def test_a_run_joins_a_gateway_of_the_ledger_where_it_has_no_engine(
    engine: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = {"ledger": url, "admin_key_file": tmp_path / "admin-key"}
    with gateway(engine, url, tmp_path) as running:
        with begin(lambda **more: load_settings({**flags, **more}, environment={}), {"rollout_id": "r"}) as begun:
            assert begun.place.client.base_url == running.url
            assert str(begun.place.ledger) == str(PostgresAddress(url))
        # With one it starts a gateway of its own beside it, and waits for nobody else's rollouts.
        more = {**flags, "upstreams": [engine], "min_free_bytes": 0, "log_level": "error"}
        running.mint(rollout_id="somebody-elses")
        with begin(lambda **rest: load_settings({**more, **rest}, environment={}), {"rollout_id": "s"}) as begun:
            assert begun.place.own
            assert begun.place.client.base_url != running.url
            begun.place.client.finish(AttemptKey("s"), None, None)


def test_no_password_is_told(engine: str, url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    secret = url.replace("postgres@", "postgres:s3cret@")
    config = load_settings({"ledger": secret, "upstreams": [engine]}, environment={})
    assert "s3cret" not in repr(config)
    assert "s3cret" not in str(config.admin_key_path)
    with gateway(engine, secret, tmp_path, log_level="debug") as one:
        one.chat(one.mint()["key"])
        described = json.dumps(one.admin("GET", "/engines").json) + repr(one.service.ledger.address)
    said = capfd.readouterr()
    assert "s3cret" not in said.out + said.err + described
    for bad in (f"{secret}&schema=No", secret.replace("postgresql", "postgresql+asyncpg")):
        with pytest.raises(ConfigError) as caught:
            load_settings({"upstreams": [engine]}, environment={"GRISTMILL_LEDGER": bad})
        assert caught.value.where == "GRISTMILL_LEDGER"
        assert "s3cret" not in f"{caught.value.message} {caught.value.hint}"
    with open_reader(parse_address(url)) as reader:
        assert [summary.state for summary in reader.summaries()] == [AttemptState.OPEN]
