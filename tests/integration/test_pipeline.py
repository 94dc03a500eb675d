"""Ten steps of a tiny run: whatever the threads' timing, the numbers are the same."""

import random
import time
from pathlib import Path

import pytest
import torch

from blockdraft.commands.control import Control
from blockdraft.models.target import Target
from blockdraft.runtime.diagnostics import Diagnostics
from integration.tiny_run import Files, assert_same_run, final_tensors, make_files, metrics, run_control, tiny_config


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return make_files(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(scope="module")
def reference(files, tmp_path_factory) -> Path:
    """A run without delays, one target and one drafter, two slots."""
    return run_control(tiny_config(files, tmp_path_factory.mktemp("reference"))).run_dir


def jitter(seed: int):
    """Sleeps of up to 30 ms before a piece of work, for every worker in its own order."""
    draw = random.Random(seed)

    def delay(_worker: str, _number: int) -> None:
        time.sleep(draw.random() * 0.03)

    return delay


def slow_target_0(worker: str, _number: int) -> None:
    # Target 1 always finishes later numbers first.
    if worker == "target 0":
        time.sleep(0.03)


def test_a_run_reports_every_step_and_learns_something(reference):
    lines = metrics(reference)
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert all(0 < line["loss"] < 10 and line["grad_norm"] > 0 for line in lines)
    assert lines[-1]["tokens"] > lines[0]["tokens"] > 0
    assert [line["lr"] for line in lines] != [lines[0]["lr"]] * 10
    assert sorted(path.name for path in (reference / "checkpoints").iterdir()) == ["step_00000005", "step_00000010"]


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("targets", [1, 2])
def test_random_sleeps_change_nothing(files, reference, tmp_path, depth, targets):
    runtime = {"channel_depth": depth, "targets": ("cpu",) * targets}
    config = tiny_config(files, tmp_path, runtime=runtime)
    assert_same_run(run_control(config, delay=jitter(depth * 10 + targets)).run_dir, reference)


def test_a_later_number_that_is_done_first_waits_for_its_turn(files, reference, tmp_path):
    config = tiny_config(files, tmp_path, runtime={"channel_depth": 4, "targets": ("cpu", "cpu")})
    assert_same_run(run_control(config, delay=slow_target_0).run_dir, reference)


def test_poisoned_slots_change_nothing(files, reference, tmp_path):
    config = tiny_config(files, tmp_path, runtime={"channel_depth": 1, "targets": ("cpu", "cpu")})
    ran = run_control(config, delay=jitter(7), diagnostics=Diagnostics(poison=True))
    assert_same_run(ran.run_dir, reference)
    assert all(torch.isnan(slot.buffer).all() for slots in ran.control.pipeline.slots for slot in slots)


@pytest.mark.parametrize("serial", [False, True])
def test_serial_targets_take_turns(files, reference, tmp_path, monkeypatch, serial):
    inside, most, capture = [], [], Target.capture

    def look(self: Target, *arguments) -> None:
        inside.append(1)
        most.append(len(inside))
        # Long enough for the other target to come in.
        time.sleep(0.03)
        capture(self, *arguments)
        inside.pop()

    monkeypatch.setattr(Target, "capture", look)
    config = tiny_config(files, tmp_path, runtime={"channel_depth": 4, "targets": ("cpu", "cpu")})
    assert_same_run(run_control(config, diagnostics=Diagnostics(serial_targets=serial)).run_dir, reference)
    assert max(most) == (1 if serial else 2)


def test_a_seed_makes_another_run(files, reference, tmp_path):
    assert metrics(run_control(tiny_config(files, tmp_path, seed=1)).run_dir) != metrics(reference)


def test_pairs_and_shared_equal_pool(files, reference, tmp_path):
    for topology in ("pairs", "shared"):
        config = tiny_config(files, tmp_path / topology, runtime={"topology": topology})
        assert_same_run(run_control(config, delay=jitter(3)).run_dir, reference)


def test_reuse_gives_each_slot_fresh_anchors_and_saves_target_work(files, tmp_path):
    calls: list[str] = []

    def count(worker: str, _number: int) -> None:
        calls.append(worker)

    once = run_control(tiny_config(files, tmp_path / "once"), delay=count)
    target_calls = calls.count("target 0")
    calls.clear()
    thrice = run_control(tiny_config(files, tmp_path / "thrice", runtime={"reuse": 3}), delay=count)
    assert target_calls == 10
    assert calls.count("target 0") == 4
    assert metrics(once.run_dir)[0] == metrics(thrice.run_dir)[0]
    assert metrics(once.run_dir)[1] != metrics(thrice.run_dir)[1]
    losses = [line["loss"] for line in metrics(thrice.run_dir)]
    assert len(set(losses)) == 10


def test_kept_features_equal_computed_ones(files, tmp_path):
    # Some epochs over the same contents: the target computes each once, the drafter reads what it would have read.
    config = tiny_config(files, tmp_path / "kept", runtime={"keep_features": True}, steps=20)
    kept = run_control(config)
    fills = kept.control.built.loader.counts.fills
    assert 20 / fills > 2
    assert kept.control.pipeline.kept is not None
    assert sorted(kept.control.pipeline.kept._kept) == list(range(fills))
    started: list[Control] = []

    def forget(worker: str, _number: int) -> None:
        if worker == "target 0":
            started[0].pipeline.kept._kept.clear()

    config = tiny_config(files, tmp_path / "computed", runtime={"keep_features": True}, steps=20)
    computed = run_control(config, delay=forget, say=lambda control, _line: started.append(control))
    assert metrics(computed.run_dir) == metrics(kept.run_dir)


def test_bfloat16_weights_with_float32_masters(files, tmp_path):
    config = tiny_config(files, tmp_path, drafter={"dtype": "bfloat16"}, target={"dtype": "bfloat16"})
    tensors = final_tensors(run_control(config).run_dir)
    assert tensors["fc.weight"].dtype == torch.bfloat16
    assert tensors["master.fc.weight"].dtype == torch.float32
    assert torch.equal(tensors["master.fc.weight"].bfloat16(), tensors["fc.weight"])
    assert not torch.equal(tensors["master.fc.weight"].bfloat16().float(), tensors["master.fc.weight"])
