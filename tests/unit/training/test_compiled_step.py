"""A step whose drafter is compiled, or runs by its own kernels: the same numbers, gradients added in float32."""

import pytest
import torch

from blockdraft.config import LossConfig, OptimConfig
from blockdraft.data.loader import Loader
from blockdraft.models import compiled
from blockdraft.models.attention import sdpa_attend
from blockdraft.training.metrics import report
from blockdraft.training.step import DrafterStep
from integration.tiny import tiny_drafter, tiny_target
from unit.data.test_loader import LENGTHS, config, store_of
from unit.training.test_step import CPU, filled, to_device


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch):
    """Forward and backward are captured as on a GPU, then run operation by operation."""
    torch.compiler.reset()
    original = torch.compile
    monkeypatch.setattr(
        compiled.torch, "compile", lambda function, **how: original(function, backend="aot_eager", **how)
    )
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_and_plain_steps_agree_and_nothing_compiles_after_the_first(dtype):
    target = tiny_target("qwen3")
    fills = list(Loader(store_of(LENGTHS), config(num_rows=2)).fills(0, 3))  # type: ignore[arg-type]
    found = []
    for how in ("nothing", "stack", "layer", "kernels"):
        drafter = tiny_drafter(target, 4).to(dtype)
        ends = target.ends.copy_to("cpu", dtype)
        step = DrafterStep(
            drafter,
            ends,
            ends,
            loss=LossConfig(),
            optim=OptimConfig(lr=1e-3),
            total_steps=10,
            make_attend=sdpa_attend,
            how=how,
        )
        losses = []
        for number, fill in enumerate(fills):
            slot, (one,) = filled(target, fill, 2), fill.passes
            with torch.compiler.set_stance("default" if number == 0 else "fail_on_recompile"):
                step.micro_batch(slot.features_RTC, to_device(one, CPU), one.denominator)
            losses.append(report(step.finish(number)).loss)
        assert all(master.dtype == torch.float32 for master in step.optimizer.masters.values())
        found.append(losses)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    assert found[1] == pytest.approx(found[0], rel=tolerance)
    assert found[2] == pytest.approx(found[0], rel=tolerance)
    assert found[3] == pytest.approx(found[0], rel=tolerance)
