"""Outputs that a user names: what would be lost or could not be written is refused first."""

import re
from pathlib import Path

import pytest

from blockdraft.commands import evaluate, export, generate, import_, prepare, regenerate
from blockdraft.commands.outputs import check_directory, check_export, check_file, check_seed
from blockdraft.config import MOST_SEED, ConfigError


def test_places_that_take_no_output(tmp_path: Path):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigError, match="expected the name of a file, found a directory"):
        check_file(tmp_path)
    with pytest.raises(ConfigError, match="expected a directory to write to, found a file"):
        check_directory(tmp_path / "file")
    for check in (check_file, check_directory, check_export):
        with pytest.raises(ConfigError, match=f"found {re.escape(str(tmp_path / 'file'))}, which is no directory"):
            check(tmp_path / "file" / "below" / "it")
        check(tmp_path / "new" / "one")
    check_file(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"


def test_the_working_directory_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in (".", "..", str(tmp_path / "here")):
        with pytest.raises(ConfigError, match="found the one that the command runs in; name one inside it"):
            check_directory(Path(name))
    check_directory(Path("inside"))
    check_file(Path("a.json"))


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": '{"architectures": ["Qwen3ForCausalLM"]}', "model.safetensors": ""},
        {"config.json": '{"run_dir": "run"}'},
        {"config.json": "{"},
        {"config.json": "[1]"},
        {"model.safetensors": ""},
    ],
)
def test_an_export_writes_over_no_target_and_no_run(tmp_path: Path, files: dict[str, str]):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match="expected a new directory or an export to replace, found the config"):
        check_export(tmp_path)


def test_an_export_may_be_replaced(tmp_path: Path):
    (tmp_path / "README.md").write_text("notes")
    check_export(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["DFlashDraftModel"]}')
    (tmp_path / "model.safetensors").write_text("")
    check_export(tmp_path)


def test_seeds():
    check_seed(0)
    check_seed(MOST_SEED)
    for seed in (-1, MOST_SEED + 1):
        with pytest.raises(ConfigError, match=f"--seed: expected a number from 0 up to .*, found {seed}"):
            check_seed(seed)


def test_every_command_looks_at_its_output_before_anything_else(tmp_path: Path):
    (tmp_path / "file").write_text("")
    below, nothing = tmp_path / "file" / "below", tmp_path / "nothing"
    chats = ("chats.jsonl",)
    commands = [
        lambda: prepare.run(prepare.Options(conversations=chats, target="nothing", output=below)),
        lambda: regenerate.run(regenerate.Options(conversations=chats, target="nothing", output=below)),
        lambda: evaluate.run(evaluate.Options(drafter=nothing, target="nothing", prompts=chats, output=below)),
        lambda: export.run(export.Options(source=nothing, output=below)),
        lambda: import_.run(import_.Options(source=nothing, output=below)),
    ]
    for command in commands:
        with pytest.raises(ConfigError, match="which is no directory"):
            command()
    with pytest.raises(ConfigError, match="--seed"):
        evaluate.run(evaluate.Options(drafter=nothing, target="nothing", prompts=chats, seed=MOST_SEED + 1))
    with pytest.raises(ConfigError, match="--seed"):
        generate.run(generate.Options(drafter=nothing, prompt="p", target="nothing", seed=-1))
