"""What a checkpoint holds, and what is refused."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from blockdraft.config import ConfigError, OptimConfig, RunConfig
from blockdraft.training.best import Best, Yardstick, read_best
from blockdraft.training.checkpoint import (
    Damaged,
    check_shape,
    contents_of,
    list_checkpoints,
    load_drafter,
    newest_checkpoint,
    record_best,
    resume_into,
    verify,
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


@pytest.mark.parametrize("name", ["drafter.safetensors", "optimizer.safetensors", "config.json", "state.json"])
def test_a_flipped_bit_and_a_missing_file_are_found(tmp_path, name):
    drafter, optimizer = trained()
    directory = save_checkpoint(tmp_path, 1, drafter, optimizer, RunConfig(), 2)
    assert verify(directory)["steps_done"] == 1
    whole = (directory / name).read_bytes()
    for place in (0, len(whole) // 3, len(whole) - 2):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        (directory / name).write_bytes(flipped)
        with pytest.raises(ConfigError, match=rf"{name}|expected checkpoint format"):
            verify(directory)
    (directory / name).write_bytes(whole[:-3])
    with pytest.raises(Damaged, match=name):
        verify(directory)
    (directory / name).unlink()
    with pytest.raises(Damaged, match=name):
        verify(directory)
    (directory / name).write_bytes(whole)
    verify(directory)


def test_another_number_in_the_state_is_found(tmp_path):
    # JSON as good as before.
    drafter, optimizer = trained()
    state = save_checkpoint(tmp_path, 1, drafter, optimizer, RunConfig(), 2) / "state.json"
    text = state.read_text()
    assert '"steps_done": 1,' in text
    state.write_text(text.replace('"steps_done": 1,', '"steps_done": 2,'))
    with pytest.raises(Damaged, match=r"state\.json: expected checksum \w+, found \w+"):
        verify(state.parent)


def test_a_checkpoint_has_its_name_when_all_of_it_is_on_disk_and_then_the_name_is(tmp_path, monkeypatch):
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("only Linux names what a descriptor is of")
    order: list[str] = []
    sync, rename = os.fsync, Path.rename

    def note(descriptor: int) -> None:
        order.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    def name(self: Path, target: Path) -> Path:
        order.append(f"-> {target.name}")
        return rename(self, target)

    monkeypatch.setattr("blockdraft.training.tensor_file.os.fsync", note)
    monkeypatch.setattr("blockdraft.training.checkpoint.fsync", note)
    monkeypatch.setattr(Path, "rename", name)
    drafter, optimizer = trained()
    save_checkpoint(tmp_path, 1, drafter, optimizer, RunConfig(), 2)
    files = ["drafter.safetensors", "optimizer.safetensors", "config.json", "state.json"]
    assert order == [*files, ".step_00000001.partial", "-> step_00000001", tmp_path.name]


def test_a_drafter_is_not_read_from_damaged_masters(tmp_path):
    drafter, optimizer = trained()
    file = save_checkpoint(tmp_path, 1, drafter, optimizer, RunConfig(), 2) / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(Damaged, match=r"optimizer\.safetensors: expected sha256 \w+, found \w+; the file is damaged"):
        load_drafter(file.parent)


EASY = Yardstick.of({"easy": [[1, 2], [3]]}, 16)


def test_the_best_one_is_kept_besides_the_newest(tmp_path):
    drafter, optimizer = trained()
    names: list[list[str]] = []
    for step, acceptance in ((1, 2.0), (2, 3.0), (3, 2.5), (4, float("nan")), (5, 2.9)):
        save_checkpoint(tmp_path, step, drafter, optimizer, RunConfig(), 2)
        assert record_best(tmp_path, Best(step, acceptance, EASY), 2) == (step in (1, 2))
        names.append([path.name[-1] for path in list_checkpoints(tmp_path)])
    assert names == [["1"], ["1", "2"], ["2", "3"], ["2", "3", "4"], ["2", "4", "5"]]
    assert read_best(tmp_path) == Best(2, 3.0, EASY)
    assert json.loads((tmp_path / "best.json").read_text())["checkpoint"] == "step_00000002"
    # A better one takes its place, and the former best goes.
    save_checkpoint(tmp_path, 6, drafter, optimizer, RunConfig(), 2)
    assert record_best(tmp_path, Best(6, 3.5, EASY), 2)
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["5", "6"]
    # One that was never saved cannot be it.
    assert not record_best(tmp_path, Best(7, 9.0, EASY), 2)
    # Resumed from an earlier step: the best is of the run that was left behind.
    save_checkpoint(tmp_path, 3, drafter, optimizer, RunConfig(), 2)
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["3"]
    assert read_best(tmp_path) is None


@pytest.mark.parametrize(
    "other",
    [
        Yardstick.of({"hard": [[1, 2], [3]]}, 16),
        Yardstick.of({"easy": [[1, 2], [4]]}, 16),
        Yardstick.of({"easy": [[1, 2], [3]], "hard": [[1]]}, 16),
        Yardstick.of({"easy": [[1, 2], [3]]}, 32),
    ],
    ids=["another name", "another prompt", "one more set", "longer answers"],
)
def test_acceptance_on_something_else_begins_a_new_best(tmp_path, other):
    drafter, optimizer = trained()
    for step in (1, 2, 3, 4):
        save_checkpoint(tmp_path, step, drafter, optimizer, RunConfig(), 9)
    assert record_best(tmp_path, Best(1, 3.0, EASY), 9)
    assert not record_best(tmp_path, Best(2, float("nan"), other), 9)
    assert record_best(tmp_path, Best(3, 2.0, other), 9)
    assert read_best(tmp_path) == Best(3, 2.0, other)
    # From here on it is compared with its like.
    assert not record_best(tmp_path, Best(4, 1.9, other), 9)


def test_a_best_of_an_earlier_version_is_read_and_compared_with_nothing(tmp_path):
    drafter, optimizer = trained()
    for step in (1, 2):
        save_checkpoint(tmp_path, step, drafter, optimizer, RunConfig(), 9)
    old = {"steps_done": 1, "acceptance_length": 3.0, "checkpoint": "step_00000001"}
    (tmp_path / "best.json").write_text(json.dumps(old))
    found = read_best(tmp_path)
    assert found == Best(1, 3.0, None)
    now = Best(2, 2.0, EASY)
    assert record_best(tmp_path, now, 9)
    assert read_best(tmp_path) == now
    assert found.spell_change(now) == (
        "the best checkpoint is chosen anew: step 1, acceptance length 3.00, was measured on what an earlier version "
        "did not note, now it is easy (prompts: 2, new tokens: 16)"
    )


def test_the_order_of_sets_does_not_count():
    assert Yardstick.of({"a": [[1]], "b": [[2]]}, 8) == Yardstick.of({"b": [[2]], "a": [[1]]}, 8)


def test_a_save_that_does_not_fit_is_not_begun(tmp_path, monkeypatch):
    drafter, optimizer = trained()
    first = save_checkpoint(tmp_path, 1, drafter, optimizer, RunConfig(), 1)
    before = {path.name: path.read_bytes() for path in first.iterdir()}
    needed = contents_of(2, drafter, optimizer, RunConfig()).num_bytes()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage._replace(free=needed - 1))
    with pytest.raises(
        ConfigError, match=r"step 2 needs 0\.\d+ GiB, 0\.\d+ GiB are free; free space there, lower --keep"
    ):
        save_checkpoint(tmp_path, 2, drafter, optimizer, RunConfig(), 1)
    assert [path.name for path in tmp_path.iterdir()] == [first.name]
    assert {path.name: path.read_bytes() for path in first.iterdir()} == before
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage._replace(free=needed))
    save_checkpoint(tmp_path, 2, drafter, optimizer, RunConfig(), 1)


def test_what_a_killed_save_leaves_is_removed_by_the_next(tmp_path):
    drafter, optimizer = trained()
    save_checkpoint(tmp_path, 1, drafter, optimizer, RunConfig(), 2)
    for kind in ("partial", "old"):
        (tmp_path / f".step_00000009.{kind}").mkdir()
    save_checkpoint(tmp_path, 2, drafter, optimizer, RunConfig(), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]


def test_going_on_from_an_earlier_step_keeps_the_new_checkpoints(tmp_path):
    drafter, optimizer = trained()
    for step in (5, 10, 15):
        save_checkpoint(tmp_path, step, drafter, optimizer, RunConfig(), 3)
    # Resumed from step 5: what follows replaces 10 and 15, which are of another run by now.
    saved = save_checkpoint(tmp_path, 7, drafter, optimizer, RunConfig(), 2)
    assert [path.name[-2:] for path in list_checkpoints(tmp_path)] == ["05", "07"]
    assert newest_checkpoint(saved) == saved


def test_an_old_checkpoint_that_somebody_else_removes_meanwhile_is_no_error(tmp_path, monkeypatch):
    drafter, optimizer = trained()
    for step in (1, 2):
        save_checkpoint(tmp_path, step, drafter, optimizer, RunConfig(), 5)
    whole = shutil.rmtree

    def late(path: Path, ignore_errors: bool = False) -> None:
        if path.name == "step_00000001":
            whole(path)
        whole(path, ignore_errors=ignore_errors)

    monkeypatch.setattr("blockdraft.training.checkpoint.shutil.rmtree", late)
    save_checkpoint(tmp_path, 3, drafter, optimizer, RunConfig(), 1)
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["3"]


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


@pytest.mark.parametrize(
    ("saved", "resumed"), [("adamw", "muon"), ("muon", "adamw"), ("adamw", "adamw_bf16"), ("adamw_bf16", "adamw")]
)
def test_moments_of_another_optimizer_are_refused(tmp_path, saved, resumed):
    drafter, _ = trained()
    optimizer = MasterOptimizer(drafter, dataclasses.replace(CONFIG, optimizer=saved))
    directory = save_checkpoint(tmp_path, 1, drafter, optimizer, RunConfig(), 2)
    before = {name: weight.clone() for name, weight in drafter.named_parameters()}
    other = MasterOptimizer(drafter, dataclasses.replace(CONFIG, optimizer=resumed))
    with pytest.raises(ConfigError, match=rf"expected moments of optim\.optimizer {resumed}, found those of {saved}"):
        resume_into(directory, drafter, other)
    assert all(torch.equal(before[name], weight) for name, weight in drafter.named_parameters())
