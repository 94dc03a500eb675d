"""Locks between commands."""

import errno
from pathlib import Path

import pytest

from blockdraft.data import locks
from blockdraft.data.locks import try_lock


def test_one_holds_it_until_it_is_closed(tmp_path: Path) -> None:
    place = tmp_path / "file"
    with place.open("a") as first:
        assert try_lock(first)
        with place.open("a") as second:
            assert not try_lock(second)
    with place.open("a") as third:
        assert try_lock(third)


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOLCK, errno.ENOTSUP, errno.EIO])
def test_a_file_system_without_locks_stops_nobody(tmp_path: Path, monkeypatch, number) -> None:
    def refuse(_held: object, _how: int) -> None:
        raise OSError(number, "as asked")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    with (tmp_path / "file").open("a") as held:
        if number == errno.EIO:
            with pytest.raises(OSError, match="as asked"):
                try_lock(held)
        else:
            assert try_lock(held)
