from __future__ import annotations

import base64
from hashlib import sha256
from typing import Any

import pytest

from gristmill.canonical import loads
from gristmill.captures.request import asks_for_echo, media_digests, model_asked_for, sampling_of
from gristmill.records import Sampling

PNG = b"\x89PNG bytes"
DATA = base64.b64encode(PNG).decode()
DIGEST = f"sha256:{sha256(PNG).hexdigest()}"


def url_digest(url: str) -> str:
    return f"sha256:{sha256(url.encode()).hexdigest()}"


# A medium that is not seen makes an image call look like a text call, and its row loses the image.
@pytest.mark.parametrize(
    ("part", "digest"),
    [
        ({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DATA}"}}, DIGEST),
        ({"type": "image_url", "image_url": "https://x/y.png"}, url_digest("https://x/y.png")),
        ({"type": "image_url", "image_url": {}}, url_digest("")),
        ({"type": "input_image", "image_url": f"data:image/png;base64,{DATA}"}, DIGEST),
        ({"type": "input_image", "file_id": "file-1"}, url_digest("file-1")),
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}, DIGEST),
        ({"type": "image", "source": {"type": "url", "url": "https://x"}}, url_digest("https://x")),
        ({"type": "document", "source": {"type": "base64", "data": DATA}}, DIGEST),
        ({"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}}, DIGEST),
        ({"type": "video_url", "video_url": {"url": "https://x/v"}}, url_digest("https://x/v")),
        ({"type": "file", "file": {"file_data": f"data:application/pdf;base64,{DATA}"}}, DIGEST),
        ({"type": "input_file", "file_url": "https://x/f"}, url_digest("https://x/f")),
        ({"type": "tool_result", "content": [{"type": "image", "source": {"data": DATA}}]}, DIGEST),
        (
            {"type": "function_call_output", "output": [{"type": "input_image", "image_url": "data:,x"}]},
            url_digest("data:,x"),
        ),
        ({"type": "input_file", "file_data": "no base64"}, url_digest("data:;base64,no base64")),
        (
            {"type": "image_url", "image_url": {"url": "\ud800"}},
            f"sha256:{sha256(chr(0xD800).encode('utf-8', 'surrogatepass')).hexdigest()}",
        ),
    ],
)
def test_media_of_every_dialect(part: dict[str, Any], digest: str) -> None:
    assert media_digests({"messages": [{"role": "user", "content": [part]}]}) == (digest,)
    assert media_digests({"input": [{"role": "user", "content": [part]}]}) == (digest,)


# Text that only looks like a medium must not demand a media span that cannot exist.
def test_what_is_no_medium() -> None:
    request = {
        "messages": [
            {"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "plain"}}]},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": '{"type":"image"}'}}]},
            {"role": "assistant", "content": [{"type": "tool_use", "input": {"type": "image", "source": {}}}]},
            "text",
        ],
        "tools": [{"type": "image"}],
    }
    assert media_digests(request) == ()
    assert media_digests(None) == ()


# A request that no engine would take must not end the reading of a whole file.
@pytest.mark.parametrize("kind", [[], {}, 1, None, True])
def test_types_that_are_no_words(kind: Any) -> None:
    parts = [{"type": kind}, {"type": "image", "source": {"type": kind, "url": "u"}}]
    assert len(media_digests({"messages": [{"role": "user", "content": parts}]})) == 1
    assert media_digests({"messages": [{"role": kind, "type": kind, "content": [{"type": kind}]}]}) == ()


# Captures without request bodies name their media by digest alone.
def test_short_form_of_media() -> None:
    assert media_digests({"images": ["sha:aa", 1]}) == ("sha:aa",)


# A setting that is recorded wrongly makes importance weights wrong; a missing one must stay unknown.
def test_sampling() -> None:
    body = loads(
        b'{"temperature": 0.7, "top_p": 1, "top_k": 5, "seed": 3, "presence_penalty": 1e999, "top_logprobs": "x",'
        b' "frequency_penalty": "x"}'
    )
    assert sampling_of(body) == Sampling(temperature=0.7, top_p=1.0, top_k=5, seed=3)
    assert sampling_of({"sampling_params": {"temperature": 0, "repetition_penalty": 1.5}}) == Sampling(
        temperature=0.0, repetition_penalty=1.5
    )
    assert sampling_of({"seed": 2**63, "top_k": True, "temperature": 10**400}) == Sampling()
    assert sampling_of(None) == Sampling()


# The asked model is only a fallback, and only if it can be written down.
def test_model_and_echo() -> None:
    assert model_asked_for({"model": "m"}) == "m"
    assert model_asked_for({"model": "\ud800"}) is None
    assert model_asked_for([]) is None
    assert asks_for_echo({"echo": True})
    assert not asks_for_echo({"echo": 1})
