"""Every run prints its memory plan first and compares at the end; running out of memory is answered with the plan."""

import pytest
import torch

from blockdraft.commands import train
from blockdraft.commands.checks import check
from blockdraft.commands.control import Control
from blockdraft.config import ConfigError
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


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 15.09 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_a_worker_that_runs_out_of_memory_is_answered_with_the_plan(tmp_path, monkeypatch, capsys, error) -> None:
    die_in_drafter(monkeypatch, error)
    assert train.run(tiny_config(make_files(tmp_path), tmp_path / "run"), train.Options()) == 1
    lines = capsys.readouterr().err.splitlines()
    assert any("drafter 0 on cpu died" in line for line in lines)
    plan = next(index for index, line in enumerate(lines) if line.startswith("out of memory"))
    assert lines[plan + 1].startswith("memory plan, cpu: ")
    assert any(line.startswith("what helps on cpu: ") for line in lines[plan:])


def test_building_that_runs_out_of_memory_is_answered_with_the_plan(tmp_path, monkeypatch) -> None:
    def no_room(*_args: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 640000000000 bytes")

    monkeypatch.setattr("blockdraft.commands.build.new_drafter", no_room)
    with pytest.raises(ConfigError, match=r"640000000000 bytes\nout of memory; the plan(.|\n)*what helps on cpu: "):
        run_control(tiny_config(make_files(tmp_path), tmp_path / "run"))


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"data": {"row_length": 10**12, "target_tokens": 10**12}}, "--data.row-length 500000000000"),
        ({"data": {"row_length": 200_000, "target_tokens": 200_000}, "drafter": {"block_size": 10**5}}, "num-anchors"),
        ({"data": {"row_length": 10**6, "target_tokens": 10**6, "num_anchors": 10**6}}, "--data.num-anchors 500000"),
        ({"data": {"num_rows": 10**8}}, "--data.num-rows 50000000"),
        ({"optim": {"accumulation": 10**10}}, "--optim.accumulation 5000000000"),
        ({"runtime": {"reuse": 10**11}}, "--runtime.reuse 50000000000"),
    ],
)
def test_numbers_that_no_memory_holds_are_refused_before_anything_is_made_of_that_size(tmp_path, changes, fix) -> None:
    with pytest.raises(ConfigError, match=rf"memory of cpu and host: expected at most .*what helps: .*{fix}"):
        check(tiny_config(make_files(tmp_path), tmp_path / "run", **changes))


def test_other_errors_bring_no_plan(tmp_path, monkeypatch, capsys) -> None:
    die_in_drafter(monkeypatch, RuntimeError("another fault"))
    assert train.run(tiny_config(make_files(tmp_path), tmp_path / "run"), train.Options()) == 1
    error = capsys.readouterr().err
    assert "another fault" in error
    assert "out of memory" not in error
