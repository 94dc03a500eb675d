"""Files that a run writes before its first step."""

import errno
import os
from pathlib import Path

import pytest

from blockdraft.commands.run_directory import claim
from blockdraft.config import ConfigError, RunConfig, read_config


def test_a_disk_that_is_full_when_a_run_begins_is_said_and_leaves_no_half_config(tmp_path, monkeypatch):
    claim(tmp_path, RunConfig(seed=1), is_resumed=False)

    def full(_self: Path, _text: str, encoding: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), encoding)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(
            ConfigError, match=r"config\.json: could not be written: .*No space left.*; free space there"
        ):
            claim(tmp_path, RunConfig(seed=2), is_resumed=False)
    assert read_config(tmp_path / "config.json").seed == 1
