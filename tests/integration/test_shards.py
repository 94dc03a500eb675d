"""Runs whose drafters divide the optimizer's state: bit for bit those of drafters that each have all of it."""

import dataclasses
import threading
import time
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

from blockdraft.config import ConfigError
from blockdraft.runtime.distributed import GradientSum
from blockdraft.runtime.saver import Saver, Snapshot
from blockdraft.training import buckets
from blockdraft.training.checkpoint import OPTIMIZER, list_checkpoints
from blockdraft.training.shards import ROUNDS
from integration.test_drafter_failures import Broken, assert_ends, three_drafters
from integration.test_drafters import assert_close_run, jitter
from integration.test_resume import forget_after
from integration.tiny_run import Files, assert_same_run, final_tensors, make_files, run_control, tiny_config


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return make_files(tmp_path_factory.mktemp("shards"))


def of_drafters(files: Files, run_dir, count: int, micro_batches: int, *, shard: bool, **changes):
    optim = {"accumulation": micro_batches, "shard": shard, "weight_decay": 0.01} | changes.pop("optim", {})
    return tiny_config(files, run_dir, optim=optim, runtime={"drafters": ("cpu",) * count}, **changes)


@pytest.mark.parametrize(
    ("count", "micro_batches", "optimizer", "dtype"),
    [
        (2, 2, "adamw", "float32"),
        (3, 3, "adamw", "bfloat16"),
        (2, 4, "adamw_bf16", "bfloat16"),
        (3, 6, "muon", "float32"),
        (2, 2, "muon", "bfloat16"),
    ],
)
def test_a_divided_run_equals_one_that_is_not(files, tmp_path, monkeypatch, count, micro_batches, optimizer, dtype):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 2_000)
    changes = {"optim": {"optimizer": optimizer}, "drafter": {"dtype": dtype}}
    whole = run_control(of_drafters(files, tmp_path / "whole", count, micro_batches, shard=False, **changes))
    copy = Snapshot._copy

    def slow(self, contents):
        # The others have met nobody yet for their next step: what they keep must not move while it is copied.
        time.sleep(0.2)
        return copy(self, contents)

    monkeypatch.setattr(Snapshot, "_copy", slow)
    config = of_drafters(files, tmp_path / "divided", count, micro_batches, shard=True, **changes)
    divided = run_control(config, delay=jitter(7))
    assert_same_run(divided.run_dir, whole.run_dir)
    early = [list_checkpoints(run.run_dir / "checkpoints")[0] for run in (whole, divided)]
    first, second = (load_file(directory / OPTIMIZER) for directory in early)
    assert list(first) == list(second)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    states = [step.optimizer.state_tensors() for step in divided.control.built.steps]
    assert all(states)
    assert sum(map(len, states)) == len(first)
    weights = [dict(step.drafter.named_parameters()) for step in divided.control.built.steps]
    for name, weight in weights[0].items():
        assert all(torch.equal(weight, other[name]) for other in weights[1:]), name


@pytest.mark.parametrize("is_first_divided", [True, False])
def test_a_run_goes_on_divided_or_not(files, tmp_path, is_first_divided):
    config = of_drafters(files, tmp_path / "whole", 2, 4, shard=is_first_divided)
    whole = run_control(config).run_dir
    checkpoint = forget_after(whole, tmp_path / "parts", 5)
    config = of_drafters(files, tmp_path / "parts", 2, 4, shard=not is_first_divided)
    assert_same_run(run_control(config, resume=checkpoint).run_dir, whole)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4)])
def test_a_run_goes_on_with_other_drafters(files, tmp_path, before, after):
    config = of_drafters(files, tmp_path / "whole", before, 4, shard=before > 1)
    whole = run_control(config).run_dir
    checkpoint = forget_after(whole, tmp_path / "parts", 5)
    same = {name: value.clone() for name, value in final_tensors(tmp_path / "parts").items()}
    config = of_drafters(files, tmp_path / "parts", after, 4, shard=after > 1)
    resumed = run_control(config, resume=checkpoint)
    assert_close_run(resumed.run_dir, whole)
    assert same.keys() == final_tensors(resumed.run_dir).keys()


def test_every_drafter_meets_the_others_and_waits_for_a_copy_of_its_share(files, tmp_path, monkeypatch):
    # Both matter on GPUs only, where nothing else shows who forgot.
    start, launches, updates = GradientSum.start, set(), Counter()

    def noted(self, bucket) -> None:
        launches.add((self.rank, id(self._launch), self._launch._number))
        start(self, bucket)

    def update(_self, _device) -> None:
        updates[threading.current_thread().name] += 1

    monkeypatch.setattr(GradientSum, "start", noted)
    monkeypatch.setattr(Saver, "before_update", update)
    run_control(of_drafters(files, tmp_path, 3, 3, shard=True, steps=4))
    assert updates == {f"drafter {rank}": 4 for rank in range(3)}
    assert {rank for rank, _, _ in launches} == {0, 1, 2}
    assert len({meeting for _, meeting, _ in launches}) == 1
    assert {number for _, _, number in launches} == {3}


def test_one_drafter_has_nobody_to_divide_with(files, tmp_path):
    config = of_drafters(files, tmp_path, 1, 2, shard=True)
    with pytest.raises(ConfigError, match=r"optim\.shard divides .* expected at least 2 runtime\.drafters, found 1"):
        run_control(config)


# `assert_ends` has a limit of seconds.
@pytest.mark.alone
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_drafter_that_dies_inside_the_exchange(files, tmp_path, monkeypatch, rank):
    hand_out, begun = GradientSum.hand_out, []

    def counted(self, weights) -> None:
        if self.rank == rank:
            begun.append(1)
            # The first rounds belong to no step; by now the others wait.
            if len(begun) == 2 * ROUNDS + 2:
                time.sleep(0.5)
                raise Broken("out of memory")
        hand_out(self, weights)

    monkeypatch.setattr(GradientSum, "hand_out", counted)
    config = three_drafters(files, tmp_path)
    config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, shard=True))
    text = assert_ends(config, rf"^drafter {rank} on cpu died in step 2:")
    assert "Broken: out of memory" in text
    assert "NodeLost" not in text


def test_two_drafters_stop_divided_and_save_everything(files, tmp_path):
    def stop(control, line: str) -> None:
        if line.startswith("step 3/"):
            control.pipeline.ask_to_stop()

    config = of_drafters(files, tmp_path / "run", 2, 2, shard=True, steps=400, save_every=1000)
    ran = run_control(config, say=stop)
    (directory,) = list_checkpoints(ran.run_dir / "checkpoints")
    steps = int(directory.name.removeprefix("step_"))
    assert 3 <= steps < 400
    whole = run_control(of_drafters(files, tmp_path / "whole", 2, 2, shard=False, steps=400, save_every=1000), say=stop)
    saved = load_file(directory / OPTIMIZER)
    assert saved.keys() == final_tensors(whole.run_dir).keys() & saved.keys()
    assert {int(value) for name, value in saved.items() if ".step." in name} == {steps}
