"""Keys of rollouts and of the administrator."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gristmill.errors import Code, ConfigError
from gristmill.gateway.keys import ADMIN_PREFIX, AdminKey, bearer, key_digest, mint_key, read_admin_key


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([(b"authorization", b"Bearer abc")], "abc"),
        ([(b"Authorization", b"bearer  abc ")], "abc"),
        ([(b"x-api-key", b"abc")], "abc"),
        ([(b"x-api-key", b"abc"), (b"authorization", b"Bearer abc")], "abc"),
        ([(b"x-api-key", b"abc"), (b"authorization", b"Bearer abd")], None),
        ([(b"authorization", b"Bearer a"), (b"authorization", b"Bearer b")], None),
        ([(b"authorization", b"Basic abc")], None),
        ([(b"authorization", b"Bearer ")], None),
        ([], None),
    ],
)
def test_where_a_key_stands(headers: list[tuple[bytes, bytes]], key: str | None) -> None:
    # A request with two keys could be counted for one rollout and paid by another.
    assert bearer(headers) == key


def test_keys_are_long_and_only_their_digest_is_kept() -> None:
    # A key that can be guessed reads another rollout.
    keys = {mint_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("gm_") and len(key) >= 40 for key in keys)
    assert all(key not in key_digest(key) for key in keys)


def test_the_admin_key_is_made_once_and_is_private(tmp_path: Path) -> None:
    # A key that changes at every start locks out whoever has it; one that others read opens everything.
    path = tmp_path / "admin-key"
    key = AdminKey(path)
    assert path.stat().st_mode & 0o777 == 0o600
    text = read_admin_key(path)
    assert text.startswith(ADMIN_PREFIX)
    assert text not in repr(key)
    again = AdminKey(path)
    assert key.matches(text)
    assert again.matches(text)
    for wrong in (None, "", text[:-1], text + "x", text.upper(), "\ud800"):
        assert not key.matches(wrong)


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    # The agent under test may run as another user of this machine.
    path = tmp_path / "admin-key"
    AdminKey(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError) as raised:
        AdminKey(path)
    assert raised.value.code is Code.FILE_UNREADABLE


def test_links_and_other_files_are_refused(tmp_path: Path) -> None:
    # A link would let somebody else choose the key.
    target = tmp_path / "elsewhere"
    AdminKey(target)
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "other").write_text("hello\n")
    (tmp_path / "other").chmod(0o600)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("link", "other", "pipe", "missing-folder/key"):
        with pytest.raises(ConfigError):
            AdminKey(tmp_path / name)
