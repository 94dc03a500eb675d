"""The topologies of eight devices, on eight CPU threads: 5 targets and 3 drafters, 4 and 4, 6 and 2, two pairs.

Every run has twelve micro-batches a step, so that one target with one drafter is the reference of all.
"""

import time
from pathlib import Path

import pytest
import torch

from blockdraft.runtime.workers import WorkerError
from integration.test_drafters import assert_close_run, jitter
from integration.tiny_run import Files, assert_same_run, make_files, metrics, run_control, tiny_config, worker_threads

MICRO_BATCHES = 12
TOPOLOGIES = [("pool", 5, 3), ("pool", 4, 4), ("pool", 6, 2), ("pairs", 2, 2)]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return make_files(tmp_path_factory.mktemp("topologies"))


def config_of(files: Files, run_dir: Path, topology: str, targets: int, drafters: int, **changes):
    runtime = {"topology": topology, "targets": ("cpu",) * targets, "drafters": ("cpu",) * drafters, "channel_depth": 2}
    changes = {"steps": 4, "save_every": 4} | changes
    return tiny_config(files, run_dir, optim={"accumulation": MICRO_BATCHES}, runtime=runtime, **changes)


@pytest.fixture(scope="module")
def one_and_one(files, tmp_path_factory) -> Path:
    return run_control(config_of(files, tmp_path_factory.mktemp("one"), "pool", 1, 1)).run_dir


@pytest.mark.parametrize(("topology", "targets", "drafters"), TOPOLOGIES)
def test_the_losses_are_those_of_one_target_and_one_drafter(files, one_and_one, tmp_path, topology, targets, drafters):
    numbers: dict[str, list[int]] = {}

    def note(worker: str, number: int) -> None:
        numbers.setdefault(worker, []).append(number)

    ran = run_control(config_of(files, tmp_path, topology, targets, drafters), delay=note)
    assert_close_run(ran.run_dir, one_and_one)
    whole = list(range(4 * MICRO_BATCHES))
    # The loader hands out every number once and in order, drafter i gets i, i + N, ... in order, targets share them.
    assert numbers["loader"] == whole
    for index in range(drafters):
        assert numbers[f"drafter {index}"] == whole[index::drafters]
    taken = [numbers.get(f"target {index}", []) for index in range(targets)]
    assert all(mine == sorted(mine) for mine in taken)
    assert sorted(number for mine in taken for number in mine) == whole
    if topology == "pairs":
        assert taken == [whole[index::drafters] for index in range(targets)]
    first, *others = (step.optimizer.state_tensors() for step in ran.control.built.steps)
    for other in others:
        assert all(torch.equal(value, other[name]) for name, value in first.items()), "replicas part"


@pytest.mark.parametrize(("topology", "targets", "drafters"), TOPOLOGIES)
def test_random_delays_change_no_bit(files, tmp_path, topology, targets, drafters):
    plain = run_control(config_of(files, tmp_path / "plain", topology, targets, drafters, steps=3, save_every=3))
    late = config_of(files, tmp_path / "late", topology, targets, drafters, steps=3, save_every=3)
    assert_same_run(run_control(late, delay=jitter(11)).run_dir, plain.run_dir)
    assert len(metrics(plain.run_dir)) == 3


@pytest.mark.parametrize("who", ["loader", *(f"target {i}" for i in range(5)), *(f"drafter {i}" for i in range(3))])
def test_each_worker_of_five_and_three_can_die(files, tmp_path, who):
    def delay(worker: str, number: int) -> None:
        if worker == who and number >= 20:
            raise RuntimeError(f"{who} breaks here")
        if worker.startswith("target"):
            # So that every target gets some number soon.
            time.sleep(0.002)

    config = config_of(files, tmp_path, "pool", 5, 3, steps=400, save_every=400)
    with pytest.raises(WorkerError, match=rf"^{who} on cpu died in step ") as caught:
        run_control(config, delay=delay)
    assert worker_threads() == []
    assert f"{who} breaks here" in str(caught.value)
    assert "still running" not in str(caught.value)
    # A loader that is far ahead can die before the first step, which is what the file begins with.
    assert not (tmp_path / "metrics.jsonl").exists() or len(metrics(tmp_path)) < 100
