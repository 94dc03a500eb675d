"""`blockdraft doctor`: a line a check, and an exit code that counts failures."""

import json
from pathlib import Path

import pytest

from blockdraft.cli import main
from blockdraft.commands import doctor
from blockdraft.config import RunConfig
from blockdraft.runtime import machine, memory_fit
from blockdraft.runtime.machine import Finding
from integration.tiny_run import Files, make_files, tiny_config


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_files(tmp_path_factory.mktemp("doctor"))


@pytest.fixture(autouse=True)
def healthy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "machine_findings", lambda: iter([Finding("machine", "ok", "quick")]))


def examine(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    code = doctor.run(config, doctor.Options())
    return code, capsys.readouterr().out.splitlines()


def test_a_run_that_can_start_has_no_failure(files: Files, tmp_path: Path, capsys) -> None:
    code, lines = examine(tiny_config(files, tmp_path / "run"), capsys)
    assert code == 0
    assert lines[-1] == "0 failures"
    checks = [line[6:].split(":")[0] for line in lines[:-1]]
    # The memory of each device has a line.
    assert list(dict.fromkeys(checks)) == [
        "machine", "devices", "target", "tokenizer and template", "token store", "run directory", "run", "mask token",
        "disk", "memory",
    ]  # fmt: skip
    assert all(line.startswith("ok ") for line in lines[:-1])
    assert "mask token: 261, chosen" in "\n".join(lines)
    assert not (tmp_path / "run").exists(), "the doctor changes nothing"


def test_every_part_that_is_wrong_is_counted(files: Files, tmp_path: Path, capsys) -> None:
    (tmp_path / "file").touch()
    changed = {
        "data": {"train": str(tmp_path / "no-store")},
        "runtime": {"targets": ("cuda:7",)},
    }
    code, lines = examine(tiny_config(files, tmp_path / "file" / "run", **changed), capsys)
    failures = [line for line in lines if line.startswith("FAIL")]
    assert code == len(failures) == 3
    assert "runtime.targets: cuda:7 is not here" in failures[0]
    assert "expected a token store, found no directory" in failures[1]
    assert "expected a directory, found the file" in failures[2]
    assert lines[-2].startswith("skip")
    assert lines[-1] == "3 failures"


def test_a_target_without_a_template_fails_there(files: Files, tmp_path: Path, capsys) -> None:
    bare = make_files(tmp_path)
    for path in bare.target.glob("chat_template*"):
        path.unlink()
    told = bare.target / "tokenizer_config.json"
    told.write_text(json.dumps(json.loads(told.read_text()) | {"chat_template": None}))
    code, lines = examine(tiny_config(files._replace(target=bare.target), tmp_path / "run"), capsys)
    assert code == 2
    assert any(
        "FAIL  tokenizer and template" in line and "expected a tokenizer with a chat template" in line for line in lines
    )


def test_what_does_not_fit_is_a_failure_with_what_helps(files: Files, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(memory_fit, "capacities", lambda devices: dict.fromkeys(devices, 700_000))
    config = tiny_config(files, tmp_path / "run", keep_last=10**9)
    code, lines = examine(config, capsys)
    failures = [line for line in lines if line.startswith("FAIL")]
    assert code == len(failures) >= 2
    assert "disk: the last 1000000000 checkpoints" in failures[0]
    assert "lower --keep-last" in failures[0]
    assert "memory: cpu" in failures[1]
    assert "--data.num-anchors 4 frees" in failures[1]


def test_the_verb_takes_a_recipe_and_flags_or_nothing(files: Files, tmp_path: Path, capsys) -> None:
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines() == ["ok    machine: quick", "0 failures"]
    flags = ["--target.path", str(files.target), "--data.train", str(files.store), "--run-dir", str(tmp_path / "run")]
    assert main(["doctor", "tiny", *flags]) == 0
    assert main(["doctor", "tiny", *flags, "--data.row-length", "32", "--data.target-tokens", "32"]) == 1
    assert "data.row_length must be at least the longest document" in capsys.readouterr().out
