"""The seal on what lies in the job's store."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.wire.keys import SECRET_FILE, Seal, new_key_pair, seal_of


def test_a_sealed_entry_opens_under_its_own_name_only() -> None:
    seal = Seal(b"secret")
    entry = seal.sealed("answer/1", "text")
    assert seal.opened("answer/1", entry) == "text"
    for name, altered in (("answer/2", entry), ("answer/1", entry + "."), ("answer/1", "text"), ("answer/1", "")):
        with pytest.raises(DdpwatchError, match="not signed"):
            seal.opened(name, altered)
    with pytest.raises(DdpwatchError, match="not signed"):
        Seal(b"another").opened("answer/1", entry)


def test_without_a_secret_entries_are_as_they_are() -> None:
    assert Seal().sealed("name", "text") == Seal().opened("name", "text") == "text"


def test_the_secret_comes_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"secret\n")
    assert seal_of({SECRET_FILE: str(file)}).sealed("a", "b") == Seal(b"secret").sealed("a", "b")
    assert seal_of({}).sealed("a", "b") == "b"
    file.write_bytes(b"\n")
    for path in (file, tmp_path / "missing"):
        with pytest.raises(UsageError, match=path.name):
            seal_of({SECRET_FILE: str(path)})


def test_a_key_pair_shows_its_public_half_only() -> None:
    keys = new_key_pair()
    assert len(keys.public) == len(keys.secret) == 40
    assert keys.secret not in repr(keys)
