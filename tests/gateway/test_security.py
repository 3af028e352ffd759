"""What a harness, a web page or whoever reaches the port must not be able to do."""

from __future__ import annotations

import asyncio
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import Code
from gristmill.gateway.keys import mint_key
from gristmill.records import Dialect
from tests.gateway.running import (
    DIALECTS,
    DONE,
    PATHS,
    Answer,
    Asked,
    HandEngine,
    Rollout,
    Running,
    Wire,
    body_of,
    engine_of,
    error_of,
    gateway,
    piece,
    run,
    sampled,
    saw_finish,
    spoken,
    usage,
)

HELLO = {"content": "Hello there."}
PNG = "data:image/png;base64,iVBORw0KGgo="


async def said_to(running: Running, raw: bytes, *, whole: bool = True) -> bytes:
    """Send bytes and return everything that comes back until the connection ends; else up to the first head's end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    got = b""
    try:
        writer.write(raw)
        async with asyncio.timeout(20.0):
            while data := await reader.read(65536):
                got += data
                if not whole and b"\r\n\r\n" in got:
                    break
    except ConnectionError:
        pass
    finally:
        writer.close()
    return got


def raw_call(rollout: Rollout, *lines: str, host: str | None = None, path: str = "/v1/chat/completions") -> bytes:
    """Write a Chat call, with more lines of header."""
    body = json.dumps(body_of(Dialect.CHAT)).encode()
    head = [f"POST {path} HTTP/1.1", *([] if host is None else [f"host: {host}"]), *lines]
    head += [f"authorization: Bearer {rollout.secret}", f"content-length: {len(body)}", "connection: close"]
    return "\r\n".join([*head, "", ""]).encode("latin-1") + body


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


@pytest.mark.parametrize("dialect", DIALECTS)
def test_calls_need_the_key_of_a_rollout(tmp_path: Path, dialect: Dialect) -> None:
    # A call without a rollout would be recorded nowhere, or under somebody else's reward.
    async def main() -> None:
        engine = engine_of(HELLO)
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout, other = await running.begin("a"), await running.begin("b")
            gone = await running.begin("gone")
            await running.gateway.attempts.revoke(gone.key)
            admin = running.gateway.admin_key.path.read_text().strip()
            mine, path = rollout.secret, PATHS[dialect]
            refused: list[tuple[dict[str, str], str, int, Code]] = [
                ({"authorization": ""}, path, 401, Code.KEY_MISSING),
                ({"authorization": "Bearer"}, path, 401, Code.KEY_MISSING),
                ({"authorization": f"Basic {mine}"}, path, 401, Code.KEY_MISSING),
                ({"authorization": mine}, path, 401, Code.KEY_MISSING),
                ({"authorization": f"Bearer {mint_key()}"}, path, 401, Code.KEY_UNKNOWN),
                ({"authorization": f"Bearer {mine}x"}, path, 401, Code.KEY_UNKNOWN),
                ({"authorization": f"Bearer {mine[:-1]}"}, path, 401, Code.KEY_UNKNOWN),
                ({"authorization": f"Bearer {gone.secret}"}, path, 401, Code.KEY_UNKNOWN),
                ({"authorization": f"Bearer {admin}"}, path, 403, Code.KEY_FORBIDDEN),
                ({"authorization": f"Bearer {mine}", "x-api-key": other.secret}, path, 401, Code.KEY_MISSING),
                ({}, f"/r/b{path}", 403, Code.KEY_FORBIDDEN),
                ({}, f"/r/a/1{path}", 403, Code.KEY_FORBIDDEN),
                ({}, f"/r/unheard-of{path}", 403, Code.KEY_FORBIDDEN),
            ]
            for headers, where, status, code in refused:
                answer = await rollout.post(where, body_of(dialect), headers=headers)
                assert (answer.status, str(code) in answer.raw.decode()) == (status, True), (headers, answer)
                assert error_of(dialect, answer) is not None
                assert ("www-authenticate" in answer.headers) is (status == 401)
                for secret in (mine, other.secret, gone.secret, admin):
                    assert secret.encode() not in answer.raw
            assert sampled(engine) == []
            assert all(who.capture().records == who.capture().lost == () for who in (rollout, other, gone))
            for headers in ({"authorization": "", "x-api-key": mine}, {"authorization": f"bearer  {mine} "}):
                assert saw_finish(dialect, await rollout.post(path, body_of(dialect), headers=headers))
            for prefix in ("/r/a", "/r/a/0"):
                assert saw_finish(dialect, await rollout.post(prefix + path, body_of(dialect)))
            await rollout.settled(4)

    run(main())


def test_what_a_rollout_key_never_opens(tmp_path: Path) -> None:
    # The agent under test holds it: it must not read what an administrator reads.
    async def main() -> None:
        engine = engine_of(HELLO)
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            admin = running.gateway.admin_key.path.read_text().strip()
            assert (await running.get("/metrics")).status == 401
            assert (await running.get("/metrics", rollout.headers())).status == 403
            assert (await running.get("/r/r/metrics", {"authorization": f"Bearer {admin}"})).status == 404
            assert (await running.get("/metrics", {"authorization": f"Bearer {admin}"})).status == 200
            assert (await running.get("/v1/models")).status == 401
            assert (await running.get("/v1/models", {"authorization": f"Bearer {admin}"})).status == 403
            for path in ("/tokenize", "/v1/messages/count_tokens"):
                answer = await rollout.post(path, {"model": "m", "prompt": "x"}, headers={"authorization": "Bearer x"})
                assert answer.status == 401

    run(main())


HOSTS_OF_OURS = ["127.0.0.1", "127.0.0.1:8600", "localhost", "LocalHost.:80", "[::1]", "[::1]:8600", "mill.internal:1"]
HOSTS_OF_OTHERS = [
    "evil.example",
    "evil.example:8600",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "127.0.0.1.nip.io:8600",
    "evil.example.localhost",
    "127.0.0.2",
    "127.1",
    "2130706433",
    "0.0.0.0",
    "[::]",
    "[::ffff:127.0.0.1]",
    "mill.internal.evil.example",
    "internal",
    "",
    " ",
    ".",
]


def test_hosts_that_are_not_ours(tmp_path: Path) -> None:
    # A web page whose name is made to resolve to this machine would use the gateway as its own origin.
    async def main() -> None:
        engine = engine_of(HELLO)
        async with engine.serve() as url, gateway(tmp_path, url, allowed_hosts=["mill.internal"]) as running:
            rollout = await running.begin()
            for host in HOSTS_OF_OURS:
                answer = await said_to(running, raw_call(rollout, host=host))
                assert status_of(answer) == 200, (host, answer)
            for host in HOSTS_OF_OTHERS:
                answer = await said_to(running, raw_call(rollout, host=host))
                assert status_of(answer) == 403, (host, answer)
                assert b"host_refused" in answer
            for lines in (["host: 127.0.0.1", "Host: evil.example"], ["host: evil.example", "Host: 127.0.0.1"], []):
                assert status_of(await said_to(running, raw_call(rollout, *lines))) in {400, 403}
            await rollout.settled(len(HOSTS_OF_OURS))
            assert len(sampled(engine)) == len(HOSTS_OF_OURS)
            for path in ("/", "/healthz", "/v1/models", "/nothing"):
                refused = await running.get(path, {"host": "evil.example", **rollout.headers()})
                assert refused.status == 403

    run(main())


@pytest.mark.parametrize("host", ["[::1", "[::1]evil.example", "[::1].evil.example:80", "127.0.0.1:80@evil.example"])
def test_hosts_that_are_none(tmp_path: Path, host: str) -> None:
    # A proxy that reads such a name otherwise would send what is meant for another host here.
    async def main() -> None:
        engine = engine_of(HELLO)
        async with engine.serve() as url, gateway(tmp_path, url, measured=False) as running:
            rollout = await running.begin()
            assert status_of(await said_to(running, raw_call(rollout, host=host))) in {400, 403}

    run(main())


def test_requests_of_web_pages(tmp_path: Path) -> None:
    # A page that the user looks at must not make calls, nor learn that there is a gateway.
    async def main() -> None:
        engine = engine_of(HELLO)
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            for dialect, origin in product(DIALECTS, ("http://evil.example", "null", "http://127.0.0.1", "")):
                answer = await rollout.ask(dialect, headers={"origin": origin})
                assert answer.status == 403
                assert error_of(dialect, answer) is not None
                assert not any(name.startswith("access-control-") for name in answer.headers)
            preflight = {"origin": "http://evil.example", "access-control-request-method": "POST"}
            for headers in (preflight, {"access-control-request-method": "POST"}):
                answer = await running.get("/v1/chat/completions", headers, "OPTIONS")
                assert answer.status in {403, 405}
                assert not any(name.startswith("access-control-") for name in answer.headers)
            served = await rollout.ask(Dialect.CHAT)
            assert not any(name.startswith("access-control-") for name in served.headers)
            await rollout.settled(1)

    run(main())


UNKNOWN_PATHS = [
    "/v1/batches",
    "/v1/files",
    "/v1/embeddings",
    "/v1/messages/batches",
    "/v1/messages/batches/x/results",
    "/v1/responses/resp_1",
    "/v1/responses/resp_1/cancel",
    "/v1/completions/",
    "/v1/chat/completions/",
    "/v1/chat/completions/render",
    "/v1/chat",
    "/V1/chat/completions",
    "//v1/chat/completions",
    "/v1//chat/completions",
    "/v1/./chat/completions",
    "/v1/x/../chat/completions",
    "/v1/chat%2fcompletions",
    "/v1/chat/completion%73",
    "/%76%31/chat/completions",
    "/v1/chat/completions%00",
    "/v1/chat/completions%0d%0ax: y",
    "/v1/chat/completions;v=1",
    "/..%2fv1/chat/completions",
    "/r/v1/chat/completions",
    "/r//v1/chat/completions",
    "/r/../v1/chat/completions",
    "/r/./v1/chat/completions",
    "/r/r%2f0/v1/chat/completions",
    "/r/r/00/v1/chat/completions",
    "/r/r/-1/v1/chat/completions",
    "/r/r/0x0/v1/chat/completions",
    "/r/r/0/0/v1/chat/completions",
    "/r/r/0//v1/chat/completions",
    "/r/r/r/r/v1/chat/completions",
    "/r/r/metrics",
    "/r/r/0/healthz",
    "/r/" + "x" * 129 + "/v1/chat/completions",
    "/r/r/99999999999/v1/chat/completions",
    "/inference/v1/abort_requests",
    "/abort_request",
    "/generate",
    "/detokenize",
    "/load_lora_adapter",
    "/v1/load_lora_adapter",
    "/collective_rpc",
    "/sleep",
    "/update_weights",
    "/script/state",
    "/version",
    "/server_info",
    "/invocations",
    "/docs",
    "/openapi.json",
    "/gristmill/v1/rollouts",
    "/v1/chat/completions\u00e9",
]


def test_paths_that_are_no_routes(tmp_path: Path) -> None:
    # An engine has routes that load weights and run code; none may be reached through the gateway.
    async def main() -> None:
        async def play(seen: Asked, wire: Wire) -> None:
            raise AssertionError(seen)

        async with HandEngine(play) as engine, gateway(tmp_path, engine.url, measured=False) as running:
            rollout = await running.begin()
            await running.gateway.drained(1.0)
            for path in UNKNOWN_PATHS:
                head = f"{path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {rollout.secret}\r\n"
                for method in ("GET", "POST", "DELETE", "PUT"):
                    raw = f"{method} {head}content-length: 2\r\nconnection: close\r\n\r\n{{}}".encode()
                    status = status_of(await said_to(running, raw))
                    # 400: the server's own, for what is no path at all.
                    assert status == 404 or ((not path.isascii() or " " in path) and status == 400), (
                        method,
                        path,
                        status,
                    )
            for path in ("/v1/messages/batches", "/r/r/v1/messages/x"):
                assert error_of(Dialect.MESSAGES, await rollout.post(path, {})) is not None
            for path in ("/v1/batches", "/v1/responses/x"):
                error = error_of(Dialect.CHAT, await rollout.post(path, {}))
                assert error is not None
                assert error["code"] == Code.ROUTE_UNKNOWN
            assert engine.calls == []
            asked = {seen.path for seen in engine.seen}
            assert asked <= OWN_QUESTIONS, asked
            assert rollout.capture().records == rollout.capture().lost == ()

    run(main())


OWN_QUESTIONS = {
    "/v1/models",
    "/version",
    "/health",
    "/metrics",
    "/server_info",
    "/get_server_info",
    "/v1/chat/completions",
    "/v1/completions",
    "/inference/v1/abort_requests",
    "/abort_request",
    "/tokenize",
}
"""What the probe asks of an engine by itself."""


def test_methods(tmp_path: Path) -> None:
    # A method that nobody thought of must not fall through to the engine.
    async def main() -> None:
        engine = engine_of(HELLO)
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            for path, method in product(PATHS.values(), ("GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")):
                answer = await rollout.post(path, b"", method=method)
                assert answer.status == 405, (method, path)
            assert sampled(engine) == []
            for path in ("/", "/healthz"):
                assert (await running.get(path, method="HEAD")).status == 200

    run(main())


NASTY = [
    "x\r\nset-cookie: stolen=1",
    "x\nset-cookie: stolen=1",
    "x\r\n\r\nHTTP/1.1 200 OK",
    "a,removed:model",
    'a;b="c"',
    "mühle → 🌾",
    "nul\x00esc\x1b[31m",
    "y" * 20_000,
]


def nasty_bodies(dialect: Dialect) -> list[dict[str, Any]]:
    """Return requests whose names the gateway makes notes of."""
    bodies = [body_of(dialect, **{name: 1}) for name in NASTY]
    bodies.append(body_of(dialect, **{f"field {n}, with\r\nmore": 1 for n in range(500)}))
    if dialect is Dialect.MESSAGES:
        bodies += [body_of(dialect, tools=[{"type": name, "name": "t"}]) for name in NASTY]
        bodies += [body_of(dialect, output_config={name: 1}) for name in NASTY]
        bodies += [body_of(dialect, thinking={"type": "disabled", name: 1}) for name in NASTY]
    if dialect is Dialect.RESPONSES:
        bodies += [body_of(dialect, tools=[{"type": "web_search", name: 1}]) for name in NASTY]
        bodies += [body_of(dialect, include=[name]) for name in NASTY]
        bodies += [body_of(dialect, text={name: 1}, reasoning={name: 1}) for name in NASTY]
    return bodies


@pytest.mark.parametrize("dialect", DIALECTS)
def test_names_of_fields_do_not_become_headers(tmp_path: Path, dialect: Dialect) -> None:
    # A field name with a line break in it would write headers of its own, or split the answer in two.
    async def main() -> None:
        engine = engine_of(HELLO)
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            noted = 0
            for body in nasty_bodies(dialect):
                data = json.dumps(body).encode()
                head = (
                    f"POST {PATHS[dialect]} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {rollout.secret}\r\n"
                    f"content-length: {len(data)}\r\nconnection: close\r\n\r\n"
                )
                answer = await said_to(running, head.encode() + data)
                assert answer.count(b"HTTP/1.1 ") == 1 + answer.count(b"\\nHTTP/1.1 "), answer
                lines = answer.partition(b"\r\n\r\n")[0].split(b"\r\n")
                assert status_of(answer) in {200, 400}, answer
                names = [line.partition(b":")[0].lower() for line in lines[1:]]
                assert len(names) == len(set(names)), names
                assert set(names) <= OURS, names
                for line in lines:
                    assert line.isascii()
                    assert len(line) < 8000
                    assert all(32 <= byte < 127 for byte in line), line
                    if line.startswith(b"x-gristmill-notes:"):
                        noted += 1
                        notes = line.partition(b": ")[2].split(b",")
                        assert all(b":" in note for note in notes), notes
                        assert b"removed:model" not in notes
            assert noted > 0 or dialect in {Dialect.CHAT, Dialect.COMPLETIONS}
            await running.idle()
            for record in rollout.records():
                assert all("," not in note and note.isprintable() for note in record.changes), record.changes
            rollout.sound()

    run(main())


OURS = {
    b"date",
    b"content-type",
    b"content-length",
    b"transfer-encoding",
    b"cache-control",
    b"connection",
    b"x-gristmill-call-id",
    b"x-gristmill-notes",
    b"retry-after",
}
"""Headers that a client may get."""

SMUGGLED = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 2\r\n\r\n{}"


def smuggling(rollout: Rollout) -> dict[str, bytes]:
    """Return requests that two servers may take for different ones; each hides a second call of the rollout."""
    body = json.dumps(body_of(Dialect.CHAT, "visible")).encode()
    inner = json.dumps(body_of(Dialect.CHAT, "hidden")).encode()
    key = f"authorization: Bearer {rollout.secret}\r\n".encode()
    start = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n" + key
    hidden = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n" + key
    hidden += b"content-length: %d\r\n\r\n" % len(inner) + inner
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    return {
        "length and chunks": start + b"content-length: %d\r\ntransfer-encoding: chunked\r\n\r\n" % 4 + chunked + hidden,
        "chunks and length": start + b"transfer-encoding: chunked\r\ncontent-length: %d\r\n\r\n" % 4 + chunked + hidden,
        "two lengths": start
        + b"content-length: %d\r\ncontent-length: %d\r\n\r\n" % (len(body), len(body) + len(hidden))
        + body
        + hidden,
        "list of lengths": start + b"content-length: %d, 4\r\n\r\n" % len(body) + body + hidden,
        "signed length": start + b"content-length: +%d\r\n\r\n" % len(body) + body + hidden,
        "hex length": start + b"content-length: 0x%x\r\n\r\n" % len(body) + body + hidden,
        "negative length": start + b"content-length: -1\r\n\r\n" + body + hidden,
        "other coding": start + b"transfer-encoding: xchunked\r\n\r\n" + chunked + hidden,
        "chunked not last": start + b"transfer-encoding: chunked, identity\r\n\r\n" + chunked + hidden,
        "two codings": start + b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n" + chunked + hidden,
        "space before colon": start + b"content-length : %d\r\n\r\n" % len(body) + body + hidden,
        "folded": start + b"x: y\r\n content-length: 4\r\ncontent-length: %d\r\n\r\n" % len(body) + body + hidden,
        "control in a name": start + b"content\x01-length: 4\r\ncontent-length: %d\r\n\r\n" % len(body) + body + hidden,
        "nul in a value": start + b"x: a\x00b\r\ncontent-length: %d\r\n\r\n" % len(body) + body + hidden,
        "bad chunk size": start + b"transfer-encoding: chunked\r\n\r\n-1\r\n" + body + b"\r\n0\r\n\r\n" + hidden,
        "huge chunk size": start + b"transfer-encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n" + body + hidden,
        "no version": b"POST /v1/chat/completions\r\n" + key + b"\r\n" + body + hidden,
    }


def test_requests_that_hide_another(tmp_path: Path) -> None:
    # Behind a proxy that reads the first request otherwise, the rest would be run as somebody else's call.
    async def main() -> None:
        engine = engine_of(HELLO)
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            for number, name in enumerate(smuggling(await running.begin("none"))):
                rollout = await running.begin(f"r{number}")
                answer = await said_to(running, smuggling(rollout)[name], whole=False)
                await running.idle()
                statuses = [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]
                assert statuses in ([], [400], [403]), (name, statuses)
                assert rollout.capture().records == rollout.capture().lost == (), name
            assert sampled(engine) == []

    run(main())


@pytest.mark.parametrize("filling", [b"x: " + b"y" * 4_000_000, b"".join(b"x%d: y\r\n" % n for n in range(100_000))])
def test_requests_without_end(tmp_path: Path, filling: bytes) -> None:
    # Headers that never end fill the memory of the gateway, and no key is needed for that.
    async def main() -> None:
        engine = engine_of(HELLO)
        async with engine.serve() as url, gateway(tmp_path, url, measured=False) as running:
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            answer = await said_to(running, head + filling + b"\r\n\r\n", whole=False)
            assert status_of(answer) in {0, 400, 431}

    run(main())


REMOVED = {
    "kv_transfer_params": {"do_remote_decode": True},
    "ec_transfer_params": {"x": 1},
    "request_id": "mine",
    "rid": "mine",
    "cache_salt": "salt",
    "priority": -5,
    "vllm_xargs": {"a": 1},
    "session_id": "s",
    "custom_params": {"a": 1},
    "bootstrap_host": "10.0.0.1",
    "data_parallel_rank": 3,
}
REFUSED = {
    "input_ids": [1, 2],
    "prompt_token_ids": [1, 2],
    "prompt_embeds": "AAAA",
    "chat_template": "{{ messages }}",
    "logits_processors": ["os.system"],
    "lora_path": "/tmp/x",
    "lora_request": {"a": 1},
    "use_beam_search": True,
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_parameters_that_a_harness_may_not_set(tmp_path: Path, dialect: Dialect) -> None:
    # They would let an agent read others' caches, jump the queue, or be trained on tokens that it chose itself.
    async def main() -> None:
        engine = engine_of(HELLO)
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            for name, value in REMOVED.items():
                answer = await rollout.ask(dialect, **{name: value})
                assert saw_finish(dialect, answer), (name, answer)
                assert f"removed:{name}" in answer.headers["x-gristmill-notes"].split(",")
                body = sampled(engine)[-1].body
                # The gateway's own id of the call is one of them.
                assert body.get(name) != value, (name, body)
                assert f"removed:{name}" in rollout.record(answer.call_id).changes
            for name, value in {**REFUSED, "kv_transfer_params": {"prompt_token_ids": [1]}}.items():
                answer = await rollout.ask(dialect, **{name: value})
                assert answer.status == 400, (name, answer)
                error = error_of(dialect, answer)
                assert error is not None
                assert f"$.{name}" in error["message"]
            assert len(sampled(engine)) == len(REMOVED)
            await running.idle()
            refused = [record for record in rollout.records() if not record.usable]
            assert len(refused) == len(REFUSED) + 1
            assert {record.unusable_reason for record in refused} == {Code.CALL_FAILED}
            rollout.sound()

    run(main())


@pytest.mark.parametrize("dialect", [Dialect.CHAT, Dialect.COMPLETIONS])
def test_code_for_the_engine(tmp_path: Path, dialect: Dialect) -> None:
    # SGLang unpickles what it is given there: the agent under test would run code on the engine's machine.
    async def main() -> None:
        engine = engine_of(HELLO)
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            answer = await rollout.ask(dialect, custom_logit_processor="gASVAAAA")
            assert answer.status == 400
            assert sampled(engine) == []

    run(main())


def media(dialect: Dialect, url: str) -> list[dict[str, Any]]:
    """Return requests with one medium in each place that a dialect has for it."""
    match dialect:
        case Dialect.RESPONSES:
            image = {"type": "input_image", "image_url": url}
            file = {"type": "input_file", "file_url": url}
            output = {"type": "function_call_output", "call_id": "c", "output": [image]}
            given = [[{"role": "user", "content": [part]}] for part in (image, file)]
            return [body_of(dialect, input=items) for items in (*given, [output])]
        case Dialect.MESSAGES:
            image = {"type": "image", "source": {"type": "url", "url": url}}
            file = {"type": "document", "source": {"type": "url", "url": url}}
            result = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
            parts = [image, file, result]
        case _:
            parts = [{"type": kind, kind: {"url": url}} for kind in ("image_url", "video_url", "audio_url")]
            parts += [{"type": "image_url", "image_url": url}, {"image_url": url}]
    return [body_of(dialect, messages=[{"role": "user", "content": [part]}]) for part in parts]


@pytest.mark.parametrize("dialect", [Dialect.CHAT, Dialect.RESPONSES, Dialect.MESSAGES])
def test_media_by_address(tmp_path: Path, dialect: Dialect) -> None:
    # The engine would fetch addresses for the agent: of the cluster's own services, or of the cloud's keys.
    async def main() -> None:
        engine = engine_of(HELLO)
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            for address in ("http://169.254.169.254/", "https://x.example/a.png", "file:///etc/passwd", " data:x", ""):
                for body in media(dialect, address):
                    answer = await rollout.post(PATHS[dialect], body)
                    assert answer.status == 400, (address, body, answer)
                    assert error_of(dialect, answer) is not None
            assert sampled(engine) == []

    run(main())


def test_headers_stop_at_the_gateway(tmp_path: Path) -> None:
    # A cookie or a header for the engine's own router would be a way around everything that is checked here.
    sent = {
        "cookie": "session=stolen",
        "forwarded": "for=10.0.0.1",
        "x-forwarded-for": "10.0.0.1",
        "x-real-ip": "10.0.0.1",
        "x-request-id": "mine",
        "x-session-id": "session",
        "x-sglext-x": "1",
        "x-data-parallel-rank": "2",
        "proxy-authorization": "Basic secret",
        "te": "trailers",
        "connection": "close, x-hop",
        "x-hop": "1",
        "x-anything": "1",
        "accept-encoding": "gzip, br",
        "user-agent": "harness/1",
        "x-api-key": "",
        "traceparent": "00-1-2-01",
        "expect": "100-continue",
    }

    async def main() -> None:
        async def play(seen: Asked, wire: Wire) -> None:
            held = {"set_cookie": "engine=1", "x_internal": "secret", "access_control_allow_origin": "*"}
            held |= {"x_request_id": "engine", "server": "engine", "retry_after": "9", "www_authenticate": "Basic"}
            if seen.body.get("stream"):
                await wire.head(200, content_type="text/event-stream", transfer_encoding="chunked", **held)
                end = piece(seen, prompt=[1, 2]) + piece(seen, "hi", [5], finish="stop") + usage(2, 1) + DONE
                await wire.piece(end)
                await wire.end()
                return
            await wire.json({"error": {"message": "no"}}, 400, **held)

        async with HandEngine(play) as engine, gateway(tmp_path, engine.url, measured=False) as running:
            rollout = await running.begin()
            for dialect, stream in product(DIALECTS, (False, True)):
                answer = await rollout.ask(dialect, stream=stream, headers=sent)
                assert answer.status == (200 if stream else 400)
                assert {name.encode() for name in answer.headers} <= OURS, answer.headers
                assert b"secret" not in answer.raw
                got = engine.calls[-1].headers
                assert set(got) <= TO_ENGINES, got
                assert got.get("x-request-id") == answer.call_id
                assert got.get("accept-encoding", "identity") == "identity"
                assert "harness" not in got.get("user-agent", "")

    run(main())


TO_ENGINES = {
    "host",
    "accept",
    "accept-encoding",
    "content-length",
    "content-type",
    "user-agent",
    "x-request-id",
    "connection",
}
"""Headers that an engine may get."""


def stored_bytes(folder: Path) -> bytes:
    """Return everything that is on disk but the admin key's own file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".admin-key"))
    assert files
    return b"\n".join(path.read_bytes() for path in files)


def test_secrets_are_said_nowhere(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # Logs, ledgers and counters are shared freely; a key in one of them is a key for whoever reads it.
    secret_text = "the miller keeps gold under the wheel"

    async def main() -> tuple[list[str], bytes]:
        rules = [
            {"when": {"any": "Break"}, "reply": {**HELLO, "fault": {"kind": "status", "status": 500}}},
            {"when": {"any": "Deny"}, "reply": {**HELLO, "fault": {"kind": "status", "status": 401}}},
            {"when": {"any": "Cut"}, "reply": {**HELLO, "fault": {"kind": "reset", "after_chunks": 1}}},
        ]
        engine = engine_of(*rules, HELLO)
        said: list[Answer] = []
        async with engine.serve() as url, gateway(tmp_path, url, log_level="debug") as running:
            rollout, other = await running.begin("a"), await running.begin("b")
            admin = running.gateway.admin_key.path.read_text().strip()
            wrong = mint_key()
            for dialect in DIALECTS:
                for text in ("Hello", "Break", "Deny", "Cut"):
                    for stream in (False, True):
                        said.append(await rollout.ask(dialect, f"{text}: {secret_text}", stream=stream))
                said.append(await rollout.ask(dialect, headers={"x-api-key": admin}))
                said.append(await rollout.ask(dialect, headers={"authorization": f"Bearer {wrong}"}))
                said.append(await rollout.post(f"/r/b{PATHS[dialect]}?key={wrong}", body_of(dialect)))
                said.append(await rollout.post(PATHS[dialect], b"{" + secret_text.encode()))
                said.append(await rollout.post(PATHS[dialect] + f"/{wrong}", {}))
            running.disk(object).refuse(2)
            said.append(await rollout.ask(Dialect.CHAT, secret_text))
            await running.idle()
            metrics = running.gateway.metrics.text()
            assert b"gristmill_calls_total" in metrics
            secrets = [rollout.secret, other.secret, admin, wrong]
            assert rollout.records()
            told = b"\n".join([metrics, *(answer.raw + repr(answer.headers).encode() for answer in said)])
            return secrets, told

    result: list[Any] = []

    async def kept() -> None:
        result.extend(await main())

    run(kept())
    secrets, told = result
    stored = stored_bytes(tmp_path)
    log = capfd.readouterr().err
    assert '"event":"served"' in log
    for secret in secrets:
        assert secret not in log
        assert secret.encode() not in told
        assert secret.encode() not in stored
    assert secret_text not in log
    assert not (tmp_path / "calls.ledger.admin-key").stat().st_mode & 0o077


def test_the_key_for_an_engine(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The engine's key is the gateway's; an engine that repeats it in an error must not hand it to the agent.
    key = "sk-engine-0123456789abcdef"
    monkeypatch.setenv("ENGINE_KEY", key)
    answers: list[Answer] = []

    async def main() -> None:
        async def play(seen: Asked, wire: Wire) -> None:
            said = {"error": {"message": f"Incorrect API key provided: {seen.headers['authorization']}"}}
            await wire.json(said, 401)

        async with HandEngine(play) as engine:
            upstreams = [{"url": engine.url, "key_env": "ENGINE_KEY"}]
            async with gateway(tmp_path, measured=False, upstreams=upstreams) as running:
                rollout = await running.begin()
                for dialect, stream in product(DIALECTS, (False, True)):
                    answers.append(await rollout.ask(dialect, stream=stream))
                assert engine.calls[-1].headers["authorization"] == f"Bearer {key}"
                assert rollout.secret not in repr(engine.seen)
                await rollout.settled(len(answers))

    run(main())
    assert {answer.status for answer in answers} == {502}
    for answer in answers:
        assert key.encode() not in answer.raw
    assert key not in capfd.readouterr().err
    assert key.encode() not in stored_bytes(tmp_path)


def test_websockets_and_upgrades(tmp_path: Path) -> None:
    # A connection that becomes something else would carry what nobody looks at.
    async def main() -> None:
        engine = engine_of(HELLO)
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            socket = "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n"
            for path in ("/v1/responses", "/v1/chat/completions", "/v1/realtime", "/"):
                head = f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {rollout.secret}\r\n"
                raw = f"{head}connection: upgrade\r\nupgrade: websocket\r\n{socket}\r\n"
                answer = await said_to(running, raw.encode(), whole=False)
                assert status_of(answer) in {200, 400, 404, 405, 426}, answer
                assert status_of(answer) != 200 or path == "/"
            answer = await said_to(
                running, raw_call(rollout, "connection: upgrade", "upgrade: h2c", host="127.0.0.1"), whole=False
            )
            assert status_of(answer) == 400
            assert b"Upgrade" in answer
            assert sampled(engine) == []
            assert rollout.capture().records == rollout.capture().lost == ()

            sent: list[Any] = []

            async def receive() -> dict[str, Any]:
                return {"type": "websocket.connect"}

            async def send(message: Any) -> None:
                sent.append(message)

            await running.gateway.app({"type": "websocket", "path": "/v1/responses", "headers": []}, receive, send)
            assert [message["type"] for message in sent] == ["websocket.close"]

    run(main())


def test_a_rollout_is_told_nothing_of_another(tmp_path: Path) -> None:
    # What one agent said must not come out of another's calls, whatever ids it guesses.
    async def main() -> None:
        engine = engine_of({"when": {"any": "secret"}, "reply": {"content": "gold under the wheel"}}, HELLO)
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout, other = await running.begin("a"), await running.begin("b")
            first = await rollout.ask(Dialect.RESPONSES, "secret")
            assert spoken(Dialect.RESPONSES, first) == "gold under the wheel"
            identifier = first.value["id"]
            stolen = await other.ask(Dialect.RESPONSES, "and?", previous_response_id=identifier)
            assert stolen.status == 400
            assert b"gold" not in stolen.raw
            own = await rollout.ask(Dialect.RESPONSES, "and?", previous_response_id=identifier)
            assert own.status == 200
            item = {"type": "item_reference", "id": first.value["output"][0]["id"]}
            stolen = await other.ask(Dialect.RESPONSES, input=[item])
            assert b"gold" not in stolen.raw
            assert len(sampled(engine)) == 2

    run(main())
