"""Files that a run writes before its first step."""

import errno
import json
import os
from pathlib import Path

import pytest

from blockdraft.commands import run_directory
from blockdraft.commands.run_directory import check_usable, claim, hold, starts_before
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


def test_directories_made_for_a_lock_go_again_where_nothing_was_written(tmp_path):
    with hold(tmp_path / "a/b/empty"):
        assert (tmp_path / "a/b/empty").is_dir()
    assert not list(tmp_path.iterdir())
    (tmp_path / "there").mkdir()
    with hold(tmp_path / "there"):
        pass
    with hold(tmp_path / "a/written"):
        (tmp_path / "a/written/config.json").write_text("{}")
        (tmp_path / "a/other").mkdir()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "a", "a/other", "a/written", "a/written/config.json", "there",
    ]  # fmt: skip


@pytest.mark.parametrize("moment", ["before it is opened", "before it is locked"])
def test_a_directory_that_another_run_removes_meanwhile_is_not_held(tmp_path, monkeypatch, moment):
    directory, name = tmp_path / "run", "try_lock" if moment == "before it is locked" else "_open"
    whole = getattr(run_directory, name)

    def late(argument: object) -> object:
        if name == "try_lock":
            # As an earlier run does that ends before its first step; a third one comes.
            directory.rmdir()
            directory.mkdir()
            return whole(argument)
        monkeypatch.setattr(Path, "mkdir", lambda *_arguments, **_options: None)
        return whole(argument)

    monkeypatch.setattr(run_directory, name, late)
    with pytest.raises(ConfigError, match="another run is writing there"), hold(directory):
        raise AssertionError("it is held")


def test_starts_are_read_and_none_are_where_nothing_tells_of_them(tmp_path):
    file = tmp_path / "environment.json"
    assert starts_before(file) == []
    file.write_text("{}")
    assert starts_before(file) == []
    file.write_text('{"started": ["2026-11-30T00:00:00+00:00"]}')
    assert starts_before(file) == ["2026-11-30T00:00:00+00:00"]


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"config.json": '{"architectures": ["Qwen3ForCausalLM"]}'}, "a config.json of something else"),
        ({"config.json": "[1]"}, "a config.json of something else"),
        ({"config.json": "{"}, "a config.json of something else"),
        ({"manifest.json": "{}"}, "a manifest.json, as token stores have it"),
        ({"checkpoints/model.pt": "weights"}, "checkpoints and no config.json of a run"),
    ],
)
def test_a_directory_of_something_else_is_refused_and_left_as_it_is(tmp_path, files, found):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"expected a new directory or that of a run, found {found}; choose another"):
        check_usable(tmp_path, is_resumed=False)
    assert {name: (tmp_path / name).read_text() for name in files} == files


def test_new_and_used_run_directories_are_usable(tmp_path):
    check_usable(tmp_path / "new", is_resumed=False)
    (tmp_path / "run" / "checkpoints" / "step_00000001").mkdir(parents=True)
    check_usable(tmp_path / "run", is_resumed=True)
    claim(tmp_path / "run", RunConfig(), is_resumed=True)
    check_usable(tmp_path / "run", is_resumed=False)
    assert "run_dir" in json.loads((tmp_path / "run" / "config.json").read_text())
