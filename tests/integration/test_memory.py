"""Every run prints its memory plan first and compares at the end; running out of memory is answered with the plan."""

import pytest
import torch

from blockdraft.commands import train
from blockdraft.commands.control import Control
from integration.tiny_run import make_files, run_control, tiny_config


def die_in_drafter(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def delay(worker: str, number: int) -> None:
        if worker == "drafter 0" and number == 1:
            raise error

    monkeypatch.setattr(Control.__init__, "__kwdefaults__", Control.__init__.__kwdefaults__ | {"delay": delay})


def test_the_plan_comes_before_the_run_and_beside_what_was_reached_after_it(tmp_path) -> None:
    ran = run_control(tiny_config(make_files(tmp_path), tmp_path / "run", steps=1))
    first = next(index for index, line in enumerate(ran.lines) if line.startswith("memory plan, cpu: "))
    probed = next(index for index, line in enumerate(ran.lines) if line.startswith("probe: 8 documents"))
    assert first < probed, "the plan comes before the target is loaded"
    assert any("memory of cpu: planned" in line and "torch counts no peak there" in line for line in ran.lines)


def test_a_worker_that_runs_out_of_memory_is_answered_with_the_plan(tmp_path, monkeypatch, capsys) -> None:
    die_in_drafter(monkeypatch, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 15.09 GiB."))
    assert train.run(tiny_config(make_files(tmp_path), tmp_path / "run"), train.Options()) == 1
    lines = capsys.readouterr().err.splitlines()
    assert any("drafter 0 on cpu died" in line for line in lines)
    plan = next(index for index, line in enumerate(lines) if line.startswith("out of memory"))
    assert lines[plan + 1].startswith("memory plan, cpu: ")
    assert any(line.startswith("what helps on cpu: ") for line in lines[plan:])


def test_other_errors_bring_no_plan(tmp_path, monkeypatch, capsys) -> None:
    die_in_drafter(monkeypatch, RuntimeError("another fault"))
    assert train.run(tiny_config(make_files(tmp_path), tmp_path / "run"), train.Options()) == 1
    error = capsys.readouterr().err
    assert "another fault" in error
    assert "out of memory" not in error
