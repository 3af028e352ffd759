"""Engine addresses: one form, no secrets, nothing that could lead elsewhere."""

from __future__ import annotations

import pytest

from gristmill.errors import Code, ConfigError
from gristmill.gateway.upstream.spec import UpstreamSpec, engine_address


@pytest.mark.parametrize(
    ("given", "label"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("HTTP://Engine-1.Example:80", "http://engine-1.example"),
        ("https://engine:443/pool/a/v1", "https://engine/pool/a"),
        ("https://engine:8443/pool", "https://engine:8443/pool"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_one_engine_has_one_name(given: str, label: str) -> None:
    """Two spellings of an engine would be two engines, in records and in the choice of one."""
    assert engine_address(given) == label
    assert UpstreamSpec(given).label == label
    assert engine_address(label) == label


@pytest.mark.parametrize(
    "given",
    [
        "",
        "127.0.0.1:8000",
        "localhost:8000",
        "ftp://engine",
        "file:///etc/passwd",
        "http://",
        "http://:8000",
        "http://user:secret@engine",
        "http://user@engine",
        "http://engine?key=secret",
        "http://engine/?",
        "http://engine#x",
        "http://engine/a/../b",
        "http://engine/./b",
        "http://engine//b",
        "http://engine/a b",
        "http://engine/%2e%2e/b",
        "http://engine:0x50",
        "http://engine:99999",
        "http://en gine",
        "http://engine\r\nHost: other",
        "http://éngine",
        "http://[::1",
    ],
)
def test_an_address_that_says_more_is_refused(given: str) -> None:
    """A secret in an address would be in every record; a strange path would be another server's."""
    with pytest.raises(ConfigError) as caught:
        UpstreamSpec(given)
    assert caught.value.code is Code.OPTION_INVALID
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("key", ["", "two words", "line\nbreak", "schlüssel"])
def test_a_key_that_no_header_holds_is_refused(key: str) -> None:
    """A line break in a key would be a header of its own."""
    with pytest.raises(ConfigError) as caught:
        UpstreamSpec("http://engine", api_key=key)
    assert not key or key not in str(caught.value)


def test_a_spec_does_not_print_its_key() -> None:
    """A log that shows a configuration must not show the key."""
    assert "sk-secret" not in repr(UpstreamSpec("http://engine", api_key="sk-secret"))
