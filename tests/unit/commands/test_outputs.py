"""Outputs that a user names: what would be lost or could not be written is refused first."""

import re
from pathlib import Path

import pytest

from blockdraft.commands import evaluate, export, generate, import_, prepare, regenerate
from blockdraft.commands.outputs import check_directory, check_export, check_file, check_sampling, check_seed
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
    check_export(tmp_path)
    (tmp_path / "README.md").write_text("notes")
    with pytest.raises(ConfigError, match="expected a new directory or an export to replace, found other files"):
        check_export(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["DFlashDraftModel"]}')
    (tmp_path / "model.safetensors").write_text("")
    check_export(tmp_path)


def test_a_place_with_rights_that_takes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for check in (check_file, check_directory, check_export):
        with pytest.raises(ConfigError, match="expected a place that can be written, found /proc, which"):
            check(Path("/proc/x"))
    check_directory(tmp_path / "store")
    assert list(tmp_path.iterdir()) == [], "the look leaves something there"

    def full(**_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(ConfigError, match=r"which takes no file \(No space left on device\); choose another --output"):
        check_file(tmp_path / "answers.jsonl")


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("temperature", float("nan"), "expected 0 (greedy) or more, found nan"),
        ("temperature", float("inf"), "expected 0 (greedy) or more, found inf"),
        ("temperature", -1.0, "expected 0 (greedy) or more, found -1.0"),
        ("top_p", 7.0, "expected a share above 0, and 1 for all tokens, found 7.0"),
        ("top_p", 0.0, "expected a share above 0, and 1 for all tokens, found 0.0"),
        ("top_p", float("nan"), "expected a share above 0, and 1 for all tokens, found nan"),
        ("top_k", -3, "expected at least 1, or 0 for all tokens, found -3"),
    ],
)
def test_temperatures_are_looked_at_before_anything_is_loaded(tmp_path: Path, flag: str, value: float, said: str):
    given = {"temperature": 1.0} | {flag: value}
    with pytest.raises(ConfigError, match=re.escape(f"--{flag.replace('_', '-')}: {said}")):
        check_sampling(**given)
    nothing = {"drafter": tmp_path / "nothing", "target": "nothing"}
    commands = [
        lambda: generate.run(generate.Options(**nothing, prompt="p", **given)),
        lambda: evaluate.run(evaluate.Options(**nothing, prompts=("p",), method="decode", **given)),
    ]
    for command in commands:
        with pytest.raises(ConfigError, match=re.escape(said)):
            command()


def test_answers_of_no_token_are_refused_before_anything_is_loaded(tmp_path: Path):
    with pytest.raises(ConfigError, match="--max-new-tokens must be at least 1, got 0"):
        generate.run(generate.Options(drafter=tmp_path / "nothing", prompt="p", target="nothing", max_new_tokens=0))


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
