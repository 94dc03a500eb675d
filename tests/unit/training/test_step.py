"""R rows, T context tokens, A anchors, L block positions; one step of a drafter on real micro-batches."""

import pytest
import torch

from blockdraft.config import LossConfig, OptimConfig
from blockdraft.data.loader import Fill, Loader
from blockdraft.models.attention import sdpa_attend
from blockdraft.models.target import Target
from blockdraft.runtime.slots import Filler, Slot
from blockdraft.runtime.transfers import to_device
from blockdraft.runtime.warm_up import warm_up_drafter
from blockdraft.training import buckets
from blockdraft.training.metrics import report
from blockdraft.training.optim import MasterOptimizer
from blockdraft.training.step import DrafterStep
from integration.tiny import tiny_drafter, tiny_target
from unit.data.test_loader import LENGTHS, config, store_of

CPU = torch.device("cpu")


def step_for(target: Target, *, chunk_rows: int = 4096, **shape) -> DrafterStep:
    return DrafterStep(
        tiny_drafter(target, 4, **shape),
        target.ends,
        target.ends,
        loss=LossConfig(chunk_rows=chunk_rows),
        optim=OptimConfig(lr=1e-3, warmup=0.0),
        total_steps=10,
        make_attend=sdpa_attend,
    )


def filled(target: Target, fill: Fill, num_rows: int) -> Slot:
    width = target.hidden_size * len(target.layer_ids)
    slot = Slot(num_rows, 32, width, torch.float32, CPU)
    Filler(target, num_rows, 32).fill(slot, fill)
    return slot


def gradients(step: DrafterStep, slot: Slot, micro_batches: list) -> list[torch.Tensor]:
    for features_RTC, one in micro_batches:
        step.micro_batch(features_RTC, to_device(one, CPU), one.denominator)
    del slot
    return [gradient.clone() for gradient in step.optimizer.gradients()]


def one_row(one, row: int):
    """Row `row` of a micro-batch as a micro-batch of its own."""
    parts = {name: value[row : row + 1] for name, value in one._asdict().items() if isinstance(value, torch.Tensor)}
    return one._replace(**parts)


@pytest.mark.parametrize("shape", [{}, {"window": 6, "window_layers": (0,)}, {"causal": True}], ids=str)
def test_one_micro_batch_of_four_rows_equals_four_of_one(shape):
    # Case 7: the denominator is the step's, so how rows fall into micro-batches does not matter.
    target = tiny_target("qwen3")
    loader = Loader(store_of(LENGTHS), config(num_rows=4))  # type: ignore[arg-type]
    (fill,) = loader.fills(0, 1)
    (one,) = fill.passes
    slot = filled(target, fill, 4)
    supervised = one.supervised_RAS.sum((1, 2)).tolist()
    assert len(set(supervised)) > 1, "rows that weigh alike would hide a mean over micro-batches"
    whole, parts = step_for(target, **shape), step_for(target, chunk_rows=5, **shape)
    expected = gradients(whole, slot, [(slot.features_RTC, one)])
    found = gradients(parts, slot, [(slot.features_RTC[row : row + 1], one_row(one, row)) for row in range(4)])
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-6, rtol=1e-4)
    one_report, other_report = report(whole.finish(0)), report(parts.finish(0))
    assert one_report.loss == pytest.approx(other_report.loss, rel=1e-5)
    assert one_report._replace(loss=0.0) == other_report._replace(loss=0.0)


def test_the_loss_is_the_weighted_mean_over_the_step():
    target = tiny_target("llama")
    fills = list(Loader(store_of(LENGTHS), config(accumulation=3)).fills(0, 1))  # type: ignore[arg-type]
    step, total, weights = step_for(target), 0.0, 0.0
    for fill in fills:
        slot, (one,) = filled(target, fill, 2), fill.passes
        step.micro_batch(slot.features_RTC, to_device(one, CPU), one.denominator)
        alone = step_for(target)
        alone.micro_batch(slot.features_RTC, to_device(one, CPU), float(one.weight_RAS.sum()))
        share = float(one.weight_RAS.sum())
        total += report(alone.finish(0)).loss * share
        weights += share
    assert report(step.finish(0)).loss == pytest.approx(total / weights, rel=1e-5)


def test_a_row_of_padding_leaves_loss_and_gradients_finite():
    # Case 5.
    target = tiny_target("gemma3")
    (fill,) = Loader(store_of([20]), config()).fills(0, 1)  # type: ignore[arg-type]
    (one,) = fill.passes
    slot, step = filled(target, fill, 2), step_for(target)
    both = gradients(step, slot, [(slot.features_RTC, one)])
    assert all(torch.isfinite(gradient).all() for gradient in both)
    assert any((gradient != 0).any() for gradient in both)
    alone = gradients(step_for(target), slot, [(slot.features_RTC[:1], one_row(one, 0))])
    for mine, its in zip(both, alone, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-6, rtol=1e-4)


def test_a_micro_batch_without_any_block_gives_zero_gradients():
    target = tiny_target("llama")
    loader = Loader(store_of([20]), config())  # type: ignore[arg-type]
    (fill,) = loader.fills(0, 1)
    (one,) = fill.passes
    slot, step = filled(target, fill, 2), step_for(target)
    for value in gradients(step, slot, [(slot.features_RTC[1:], one_row(one, 1))]):
        assert (value == 0).all()
    assert report(step.finish(0)).loss == 0.0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_warm_up_leaves_weights_moments_and_counts_as_they_were(optimizer):
    target = tiny_target("llama")
    loader = Loader(store_of(LENGTHS), config())  # type: ignore[arg-type]
    results = []
    for is_warm in (True, False):
        step = step_for(target)
        step.optim_config = OptimConfig(optimizer=optimizer, warmup=0.0)
        step.optimizer = type(step.optimizer)(step.drafter, step.optim_config)
        fills = list(loader.fills(0, 2))
        slot = filled(target, fills[0], 2)
        if is_warm:
            warm_up_drafter(step, slot, loader)
        reports = []
        for number, fill in enumerate(fills):
            Filler(target, 2, 32).fill(slot, fill)
            one = fill.passes[0]
            step.micro_batch(slot.features_RTC, to_device(one, CPU), one.denominator)
            reports.append(report(step.finish(number)))
        results.append((reports, {name: value.clone() for name, value in step.optimizer.state_tensors().items()}))
    (warm, warm_state), (cold, cold_state) = results
    assert warm == cold
    assert all(torch.equal(warm_state[name], value) for name, value in cold_state.items())


class Multiplied:
    """Stands for a sum over as many equal replicas."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def meet(self) -> None:
        pass

    def start(self, bucket) -> None:
        for value in bucket:
            value.mul_(self.factor)

    def wait(self) -> None:
        pass

    def drop(self) -> None:
        pass


def test_gradients_are_summed_before_they_are_clipped():
    target = tiny_target("llama")
    (fill,) = Loader(store_of(LENGTHS), config()).fills(0, 1)  # type: ignore[arg-type]
    slot, (one,) = filled(target, fill, 2), fill.passes
    norms = []
    for factor in (1.0, 3.0):
        step = step_for(target)
        step.sum_gradients = Multiplied(factor)
        step.begin_sum()
        step.micro_batch(slot.features_RTC, to_device(one, CPU), one.denominator)
        step.finish(0)
        norms.append(float(step.grad_norm))
    assert norms[1] == pytest.approx(3 * norms[0], rel=1e-5)


def test_the_norm_is_begun_when_all_but_the_last_bucket_are_summed(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    begun: list[list[str]] = []
    monkeypatch.setattr(MasterOptimizer, "measure_all_but", lambda _self, names: begun.append(names))
    target = tiny_target("llama")
    (fill,) = Loader(store_of(LENGTHS), config()).fills(0, 1)  # type: ignore[arg-type]
    slot, (one,) = filled(target, fill, 2), fill.passes
    step = step_for(target)
    step.sum_gradients = Multiplied(1.0)
    step.begin_sum()
    step.micro_batch(slot.features_RTC, to_device(one, CPU), one.denominator)
    assert begun == []
    step.finish(0)
    # The first weight of the forward.
    assert begun == [["fc.weight"]]


def test_joining_leaves_no_trace_in_the_first_step():
    # A step of two micro-batches adds them in float32: what joining summed must not keep the first one as it is made.
    target = tiny_target("llama")
    (fill,) = Loader(store_of(LENGTHS), config()).fills(0, 1)  # type: ignore[arg-type]
    slot, (one,) = filled(target, fill, 2), fill.passes
    found = []
    for joins in (False, True):
        step = step_for(target)
        drafter = step.drafter.bfloat16()
        step = DrafterStep(
            drafter,
            target.ends,
            target.ends.copy_to(CPU, torch.bfloat16),
            loss=LossConfig(),
            optim=OptimConfig(lr=1e-3, warmup=0.0),
            total_steps=10,
            make_attend=sdpa_attend,
        )
        total = Multiplied(1.0)
        if joins:
            step.join(total)
        step.micro_batch(slot.features_RTC, to_device(one, CPU), one.denominator)
        step.sum_gradients = total
        step.begin_sum()
        step.micro_batch(slot.features_RTC.flip(1), to_device(one, CPU), one.denominator)
        step.finish(0)
        found.append({name: value.clone() for name, value in step.optimizer.state_tensors().items()})
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_an_update_waits_for_what_still_reads_the_weights():
    # A checkpoint's copy may still be under way; sums and gradients do not touch what it reads.
    target = tiny_target("llama")
    loader = Loader(store_of(LENGTHS), config())  # type: ignore[arg-type]
    (fill,) = loader.fills(0, 1)
    step, order = step_for(target), []
    weights = {name: weight.detach().clone() for name, weight in step.drafter.named_parameters()}

    def before_update() -> None:
        same = all(torch.equal(weight, weights[name]) for name, weight in step.drafter.named_parameters())
        order.append("unchanged" if same else "changed")

    step.before_update = before_update
    slot, (one,) = filled(target, fill, 2), fill.passes
    step.micro_batch(slot.features_RTC, to_device(one, CPU), one.denominator)
    assert order == []
    step.finish(0)
    assert order == ["unchanged"]
    assert not all(torch.equal(weight, weights[name]) for name, weight in step.drafter.named_parameters())
