"""Files that a run writes before its first step."""

import errno
import os
from pathlib import Path

import pytest

from blockdraft.commands.run_directory import claim, starts_before
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", r"environment\.json: expected JSON, found: .*; remove it, it is written again"),
        ("[]", r"environment\.json: expected a JSON object, found list; remove it"),
        ('"started"', r"environment\.json: expected a JSON object, found str; remove it"),
        ('{"started": "today"}', r"environment\.json: expected started to be a list of moments, found str; remove"),
    ],
)
def test_an_environment_that_no_run_wrote_is_refused_with_what_to_do(tmp_path, text, expected):
    file = tmp_path / "environment.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        starts_before(file)


def test_starts_are_read_and_none_are_where_nothing_tells_of_them(tmp_path):
    file = tmp_path / "environment.json"
    assert starts_before(file) == []
    file.write_text("{}")
    assert starts_before(file) == []
    file.write_text('{"started": ["2026-11-30T00:00:00+00:00"]}')
    assert starts_before(file) == ["2026-11-30T00:00:00+00:00"]
