"""What a checkpoint holds, and what is refused."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from blockdraft.config import ConfigError, OptimConfig, RunConfig
from blockdraft.training.checkpoint import (
    check_shape,
    contents_of,
    list_checkpoints,
    load_drafter,
    newest_checkpoint,
    resume_into,
    write_checkpoint,
)
from blockdraft.training.optim import MasterOptimizer
from integration.tiny import tiny_drafter, tiny_target

CONFIG = OptimConfig(lr=0.01)


def trained(dtype: torch.dtype = torch.float32, seed: int = 0):
    """A drafter and its optimizer after two steps of made-up gradients."""
    drafter = tiny_drafter(tiny_target("llama"), 4, 1, seed=seed).to(dtype)
    optimizer = MasterOptimizer(drafter, CONFIG)
    for _ in range(2):
        sum((weight * weight).sum() for weight in drafter.parameters()).backward()
        optimizer.step(1.0)
    return drafter, optimizer


def save_checkpoint(root: Path, step: int, drafter, optimizer, config: RunConfig, keep_last: int) -> Path:
    """Written here and now."""
    return write_checkpoint(root, contents_of(step, drafter, optimizer, config), keep_last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everything_comes_back(tmp_path, dtype):
    drafter, optimizer = trained(dtype)
    optimizer.skipped += 3
    directory = save_checkpoint(tmp_path, 12, drafter, optimizer, RunConfig(seed=5), 2)
    assert directory == tmp_path / "step_00000012"
    assert sorted(path.name for path in directory.iterdir()) == [
        "config.json",
        "drafter.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    other, fresh = trained(dtype, seed=1)
    assert resume_into(directory, other, fresh) == 12
    assert int(fresh.skipped) == 3
    found = fresh.state_tensors()
    assert all(torch.equal(found[name], value) for name, value in optimizer.state_tensors().items())
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), drafter.parameters(), strict=True))


def test_a_drafter_is_read_from_its_masters(tmp_path):
    drafter, optimizer = trained(torch.bfloat16)
    run = tmp_path / "run"
    save_checkpoint(run / "checkpoints", 1, drafter, optimizer, RunConfig(), 2)
    loaded = load_drafter(run)
    assert loaded.shape == drafter.shape
    assert loaded.dtype == torch.float32
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, optimizer.masters[name])
        assert torch.equal(weight.bfloat16(), dict(drafter.named_parameters())[name])


def test_saving_the_same_step_again_replaces_it(tmp_path):
    drafter, optimizer = trained()
    save_checkpoint(tmp_path, 3, drafter, optimizer, RunConfig(), 2)
    with torch.no_grad():
        drafter.fc.weight.zero_()
    directory = save_checkpoint(tmp_path, 3, drafter, optimizer, RunConfig(), 2)
    assert list_checkpoints(tmp_path) == [directory]
    assert not list(tmp_path.glob(".*"))
    other, fresh = trained()
    resume_into(directory, other, fresh)
    assert (other.fc.weight == 0).all()


def test_a_save_that_dies_leaves_the_last_one(tmp_path, monkeypatch):
    drafter, optimizer = trained()
    first = save_checkpoint(tmp_path, 1, drafter, optimizer, RunConfig(), 1)

    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("blockdraft.training.checkpoint.to_json", full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, 2, drafter, optimizer, RunConfig(), 1)
    assert list_checkpoints(tmp_path) == [first]
    monkeypatch.undo()
    second = save_checkpoint(tmp_path, 2, drafter, optimizer, RunConfig(), 1)
    assert list_checkpoints(tmp_path) == [second]
    assert not list(tmp_path.glob(".*"))


def test_going_on_from_an_earlier_step_keeps_the_new_checkpoints(tmp_path):
    drafter, optimizer = trained()
    for step in (5, 10, 15):
        save_checkpoint(tmp_path, step, drafter, optimizer, RunConfig(), 3)
    # Resumed from step 5: what follows replaces 10 and 15, which are of another run by now.
    saved = save_checkpoint(tmp_path, 7, drafter, optimizer, RunConfig(), 2)
    assert [path.name[-2:] for path in list_checkpoints(tmp_path)] == ["05", "07"]
    assert newest_checkpoint(saved) == saved


def test_another_shape_is_refused(tmp_path):
    drafter, optimizer = trained()
    directory = save_checkpoint(tmp_path, 1, drafter, optimizer, RunConfig(), 2)
    check_shape(directory, drafter.shape)
    with pytest.raises(ConfigError, match=r"its drafter has block_size 4, this run's has 8"):
        check_shape(directory, dataclasses.replace(drafter.shape, block_size=8))
    with pytest.raises(ConfigError, match=r"its drafter has target_layer_ids \[1, 3\], this run's has \[1, 4\]"):
        check_shape(directory, dataclasses.replace(drafter.shape, target_layer_ids=(1, 4)))


def test_other_formats_and_empty_directories_are_refused(tmp_path):
    drafter, optimizer = trained()
    directory = save_checkpoint(tmp_path, 1, drafter, optimizer, RunConfig(), 2)
    state = json.loads((directory / "state.json").read_text())
    (directory / "state.json").write_text(json.dumps(state | {"format": 99, "versions": {"blockdraft": "9.9"}}))
    with pytest.raises(ConfigError, match=r"expected checkpoint format 2, found 99, written by blockdraft 9\.9"):
        load_drafter(directory)
    with pytest.raises(ConfigError, match="expected a checkpoint, or a run directory with checkpoints"):
        newest_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize(("saved", "resumed"), [("adamw", "muon"), ("muon", "adamw")])
def test_moments_of_another_optimizer_are_refused(tmp_path, saved, resumed):
    drafter, _ = trained()
    optimizer = MasterOptimizer(drafter, dataclasses.replace(CONFIG, optimizer=saved))
    directory = save_checkpoint(tmp_path, 1, drafter, optimizer, RunConfig(), 2)
    before = {name: weight.clone() for name, weight in drafter.named_parameters()}
    other = MasterOptimizer(drafter, dataclasses.replace(CONFIG, optimizer=resumed))
    with pytest.raises(ConfigError, match=rf"expected moments of optim\.optimizer {resumed}, found those of {saved}"):
        resume_into(directory, drafter, other)
    assert all(torch.equal(before[name], weight) for name, weight in drafter.named_parameters())
