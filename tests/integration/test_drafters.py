"""Several drafters in one process: the arithmetic is that of one, whatever the timing."""

import dataclasses
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from blockdraft.config import ConfigError
from blockdraft.data import loader
from blockdraft.data.template import Encoded
from blockdraft.runtime.diagnostics import Diagnostics
from blockdraft.runtime.distributed import GradientSum
from blockdraft.runtime.pipeline import no_delay
from blockdraft.training import buckets
from blockdraft.training.buckets import GradientBuckets
from integration.test_resume import forget_after
from integration.tiny_run import (
    Files,
    assert_same_run,
    final_tensors,
    make_files,
    metrics,
    random_documents,
    run_control,
    tiny_config,
)

TWO = ("cpu", "cpu")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return make_files(tmp_path_factory.mktemp("drafters"))


def accumulated(files: Files, run_dir: Path, micro_batches: int = 2, **changes):
    return tiny_config(files, run_dir, optim={"accumulation": micro_batches}, **changes)


@pytest.fixture(scope="module")
def one_drafter(files, tmp_path_factory) -> Path:
    """One drafter, two micro-batches a step."""
    return run_control(accumulated(files, tmp_path_factory.mktemp("one"))).run_dir


def jitter(seed: int):
    """Sleeps of up to 20 ms before each piece of work."""
    draw = random.Random(seed)

    def delay(_worker: str, _number: int) -> None:
        time.sleep(draw.random() * 0.02)

    return delay


def assert_close_run(left: Path, right: Path, tolerance: float = 1e-6) -> None:
    """Masters, moments and every logged number agree to `tolerance`, masters by what they have moved at most."""
    one, other = final_tensors(left), final_tensors(right)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert float((value.double() - other[name].double()).abs().max()) <= tolerance, name
    assert_close_metrics(left, right, tolerance)


def assert_close_metrics(left: Path, right: Path, tolerance: float = 1e-6) -> None:
    mine, theirs = metrics(left), metrics(right)
    assert [line["step"] for line in mine] == [line["step"] for line in theirs]
    for ours, line in zip(mine, theirs, strict=True):
        for name, value in line.items():
            assert ours[name] == pytest.approx(value, rel=10 * tolerance, abs=tolerance), (line["step"], name)


@pytest.mark.parametrize("topology", ["pool", "pairs", "shared"])
def test_two_drafters_equal_one_with_twice_the_micro_batches(files, one_drafter, tmp_path, topology):
    runtime = {"topology": topology, "targets": TWO, "drafters": TWO}
    ran = run_control(accumulated(files, tmp_path, runtime=runtime), delay=jitter(1))
    assert_close_run(ran.run_dir, one_drafter)
    first, second = (step.optimizer.state_tensors() for step in ran.control.built.steps)
    assert all(torch.equal(value, second[name]) for name, value in first.items()), "replicas part"


@pytest.fixture
def small_buckets(monkeypatch) -> list[int]:
    """Many sums a step; collects how many of them each step had started before its backward was over."""
    early: list[int] = []
    finish = GradientBuckets.finish

    def counted(self, counts) -> None:
        early.append(self.num_started)
        finish(self, counts)

    monkeypatch.setattr(buckets, "BUCKET_BYTES", 2_000)
    monkeypatch.setattr(GradientBuckets, "finish", counted)
    return early


@pytest.mark.parametrize(
    ("topology", "drafters", "micro_batches"),
    [("pool", 2, 2), ("pool", 3, 6), ("pairs", 2, 4), ("shared", 2, 2)],
)
def test_sums_beside_the_backward_equal_sums_after_it(
    files, tmp_path, monkeypatch, small_buckets, topology, drafters, micro_batches
):
    runtime = {"topology": topology, "targets": ("cpu",) * (1 if topology == "pool" else 2)}
    runtime["drafters"] = ("cpu",) * drafters
    data = {"num_rows": 1}
    runs = []
    for name in ("beside", "after"):
        small_buckets.clear()
        config = accumulated(files, tmp_path / name, micro_batches, runtime=runtime, data=data)
        ran = run_control(config, delay=jitter(4))
        runs.append(ran.run_dir)
        num_buckets = len(ran.control.built.steps[0].buckets.layout)
        assert num_buckets > 3
        # The first sum of each drafter has no backward: it sets up what carries the others.
        assert sorted(small_buckets) == [0] * drafters + [num_buckets if name == "beside" else 0] * 10 * drafters
        monkeypatch.setattr(GradientBuckets, "announce", lambda _self, _name: None)
    assert_same_run(*runs)


def test_two_bfloat16_drafters_sum_in_bfloat16_what_one_adds_in_float32(files, tmp_path, monkeypatch):
    types: dict[int, set[torch.dtype]] = {}
    start = GradientSum.start

    def noted(self, bucket) -> None:
        types.setdefault(len(runs), set()).update(value.dtype for value in bucket if value.dim() == 2)
        start(self, bucket)

    monkeypatch.setattr(GradientSum, "start", noted)
    runs: list[Path] = []
    for drafters, micro_batches in ((1, 2), (2, 2), (1, 4), (2, 4)):
        runtime = {"drafters": ("cpu",) * drafters}
        changes = {"drafter": {"dtype": "bfloat16"}, "runtime": runtime, "steps": 4}
        runs.append(run_control(accumulated(files, tmp_path / str(len(runs)), micro_batches, **changes)).run_dir)
    # The sum that sets things up is of the weights' type. Two micro-batches a replica are summed in float32.
    assert types == {1: {torch.bfloat16}, 3: {torch.bfloat16, torch.float32}}
    for one, two in ((runs[0], runs[1]), (runs[2], runs[3])):
        for ours, theirs in zip(metrics(one), metrics(two), strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-3)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=5e-3)


@pytest.mark.parametrize("objective", ["ce", "dpace", "kl"])
def test_the_gradient_does_not_depend_on_how_samples_fall_into_micro_batches(files, tmp_path, objective):
    # Case 7: a micro-batch of four rows, four of one row, and four dealt to two and to four drafters.
    shapes = {
        "one": {"data": {"num_rows": 4}},
        "four": {"data": {"num_rows": 1}, "optim": {"accumulation": 4}},
        "two drafters": {"data": {"num_rows": 1}, "optim": {"accumulation": 4}, "runtime": {"drafters": TWO}},
        "four drafters": {"data": {"num_rows": 1}, "optim": {"accumulation": 4}, "runtime": {"drafters": TWO * 2}},
    }
    documents = [one for one in random_documents(24, longest=50)[1:] if len(one.input_ids) > 32]
    same = make_files(tmp_path / "files", documents=documents[:4])
    found = {}
    for name, changes in shapes.items():
        config = tiny_config(same, tmp_path / name, steps=1, loss={"objective": objective}, **changes)
        # Every eligible position is an anchor: four rows of one document each, in whatever order.
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, num_anchors=64))
        ran = run_control(config)
        found[name] = (metrics(ran.run_dir)[0], final_tensors(ran.run_dir))
    line, tensors = found.pop("one")
    assert line["blocks"] > 100
    for name, (other_line, other) in found.items():
        for key in ("loss", "accept", "accuracy", "grad_norm", "blocks", "tokens"):
            assert other_line[key] == pytest.approx(line[key], rel=1e-5), (name, key)
        for key, value in tensors.items():
            if "exp_avg." in key:
                torch.testing.assert_close(other[key], value, rtol=1e-4, atol=1e-7, msg=f"{name}: {key}")


def with_reply(num_tokens: int, seed: int) -> Encoded:
    """Forty tokens, the last `num_tokens` of them supervised: one fills a row of 64."""
    ids = [random.Random(seed).randrange(3, 250) for _ in range(40)]
    return Encoded(ids, [0] * (40 - num_tokens) + [1] * num_tokens)


@pytest.mark.parametrize("is_empty", [False, True], ids=["three tokens", "no anchor"])
@pytest.mark.parametrize("objective", ["ce", "dpace"])
def test_a_replica_with_three_token_replies_only(tmp_path, monkeypatch, objective, is_empty):
    # Case 6: even numbers have long replies and go to drafter 0, odd ones three tokens and go to drafter 1.
    documents = [with_reply(3 if i % 2 else 30, i) for i in range(8)]
    files = make_files(tmp_path / "files", documents=documents)
    epoch_plan, sample_anchors = loader.epoch_plan, loader.sample_anchors

    def alternating(*arguments, **options):
        plans = list(epoch_plan(*arguments, **options))
        sides = [[plan for plan in plans if plan.placed[0].document % 2 == side] for side in (0, 1)]
        return iter([plan for pair in zip(*sides, strict=True) for plan in pair])

    def draw(loss_mask_T, document_T, num_anchors, generator):
        anchor_A = sample_anchors(loss_mask_T, document_T, num_anchors, generator)
        return np.full_like(anchor_A, -1) if is_empty and loss_mask_T.sum() == 3 else anchor_A

    monkeypatch.setattr(loader, "epoch_plan", alternating)
    monkeypatch.setattr(loader, "sample_anchors", draw)
    runs = {}
    for name, drafters in (("one", ("cpu",)), ("two", TWO)):
        changes = {"data": {"num_rows": 1}, "loss": {"objective": objective}, "runtime": {"drafters": drafters}}
        ran = run_control(accumulated(files, tmp_path / name, **changes), delay=jitter(3))
        runs[name] = ran.run_dir
    fills = list(ran.control.built.loader.fills(0, 3))
    slots = [int(fill.passes[0].supervised_RAS[..., 0].sum()) for fill in fills]
    assert all(count == (0 if is_empty else 2) for count in slots[1::2])
    assert all(count == 8 for count in slots[::2])
    assert_close_run(runs["two"], runs["one"])


@pytest.mark.parametrize(
    ("topology", "targets", "drafters"), [("pairs", 2, 2), ("pool", 2, 2), ("pool", 3, 1), ("pool", 1, 3)]
)
def test_random_sleeps_change_nothing(files, tmp_path, topology, targets, drafters):
    runtime = {"topology": topology, "targets": ("cpu",) * targets, "drafters": ("cpu",) * drafters}
    runs = []
    for seed in (None, 1, 2):
        config = accumulated(files, tmp_path / str(seed), 3 if drafters == 3 else 2, runtime=runtime)
        delay = no_delay if seed is None else jitter(seed)
        runs.append(run_control(config, delay=delay, diagnostics=Diagnostics(poison=True)))
    assert_same_run(runs[1].run_dir, runs[0].run_dir)
    assert_same_run(runs[2].run_dir, runs[0].run_dir)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4)])
def test_a_resume_with_other_drafters_keeps_the_losses(files, tmp_path, before, after):
    config = accumulated(files, tmp_path / "whole", 4, runtime={"drafters": ("cpu",) * before})
    whole = run_control(config).run_dir
    checkpoint = forget_after(whole, tmp_path / "parts", 5)
    config = accumulated(files, tmp_path / "parts", 4, runtime={"drafters": ("cpu",) * after})
    resumed = run_control(config, resume=checkpoint)
    assert_close_run(resumed.run_dir, whole)


def test_two_drafters_stop_after_the_same_step(files, tmp_path):
    def stop(control, line: str) -> None:
        if line.startswith("step 3/"):
            control.pipeline.ask_to_stop()

    config = accumulated(files, tmp_path, steps=400, save_every=1000, runtime={"drafters": TWO})
    ran = run_control(config, say=stop, delay=jitter(5))
    last = metrics(ran.run_dir)[-1]["step"]
    assert 3 <= last < 400
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step_{last:08d}"]
    first, second = (step.optimizer.state_tensors() for step in ran.control.built.steps)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_a_run_with_a_divided_target_equals_one_with_a_whole_one(files, one_drafter, tmp_path):
    ran = run_control(accumulated(files, tmp_path, runtime={"targets": ("cpu+cpu", "cpu")}), delay=jitter(2))
    assert_same_run(ran.run_dir, one_drafter)
    with pytest.raises(ConfigError, match="puts target and drafter of a pair on one device"):
        run_control(accumulated(files, tmp_path, runtime={"topology": "shared", "targets": ("cpu+cpu",)}))
