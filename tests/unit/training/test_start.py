"""A new drafter knows nothing, and says so: its first loss is near ln V."""

import math

import numpy as np
import pytest
import torch

from blockdraft.config import ConfigError, DrafterConfig, LossConfig, OptimConfig
from blockdraft.data.anchors import position_weights
from blockdraft.data.loader import Loader
from blockdraft.models.attention import sdpa_attend
from blockdraft.models.drafter import derive_shape
from blockdraft.runtime.slots import Filler, Slot
from blockdraft.runtime.transfers import to_device
from blockdraft.training.metrics import report
from blockdraft.training.start import calibrate, new_drafter
from blockdraft.training.step import DrafterStep
from integration.tiny import MASK_TOKEN_ID, TARGETS, tiny_drafter, tiny_target
from unit.data.test_loader import config, store_of

CPU = torch.device("cpu")


def first_loss(name: str, draft_ids: np.ndarray | None, dtype: torch.dtype, seed: int) -> float:
    """The loss of the first step of a run over random documents."""
    target = tiny_target(name)
    shape = derive_shape(DrafterConfig(num_layers=2, block_size=8), target.facts, MASK_TOKEN_ID)
    head = target.ends if draft_ids is None else target.ends.restricted(torch.from_numpy(draft_ids))
    drafter = new_drafter(shape, target.ends, head, seed).to(dtype)
    weight_L = tuple(position_weights(8, 4.0).tolist())
    lengths = np.random.default_rng(seed).integers(20, 64, 60).tolist()
    settings = config(row_length=64, num_rows=4, num_anchors=16, target_tokens=256, block_size=8, weight_L=weight_L)
    loader = Loader(store_of(lengths, seed), settings, draft_ids)  # type: ignore[arg-type]
    (fill,) = loader.fills(0, 1)
    slot = Slot(4, 64, target.hidden_size * len(target.layer_ids), target.dtype, CPU)
    Filler(target, 4, 64).fill(slot, fill)
    near = target.ends.copy_to(CPU, dtype)
    step = DrafterStep(
        drafter,
        near,
        head.copy_to(CPU, dtype),
        loss=LossConfig(),
        optim=OptimConfig(),
        total_steps=1,
        make_attend=sdpa_attend,
    )
    (one,) = fill.passes
    step.micro_batch(slot.features_RTC, to_device(one, CPU), one.denominator)
    return report(step.finish(0)).loss


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("size", [None, 33])
@pytest.mark.parametrize("name", TARGETS)
def test_the_first_loss_is_within_5_percent_of_ln_v(name, size, seed):
    draft_ids = None if size is None else np.sort(np.random.default_rng(0).permutation(np.arange(3, 90))[:size])
    loss = first_loss(name, draft_ids, torch.float32, seed)
    assert loss == pytest.approx(math.log(size or 101), rel=0.05)


def test_so_it_is_in_bfloat16():
    assert first_loss("qwen3", None, torch.bfloat16, 0) == pytest.approx(math.log(101), rel=0.05)


def test_without_calibration_it_is_not():
    # Guards the tests above: heads whose logits are small anyway would pass whatever the norm is.
    target = tiny_target("llama")
    drafter = tiny_drafter(target, 8)
    hidden_ND = torch.randn(200, 32, generator=torch.Generator().manual_seed(0))
    label_N = torch.randint(0, 101, (200,), generator=torch.Generator().manual_seed(1))
    loss = torch.nn.functional.cross_entropy(target.ends.logits(hidden_ND), label_N)
    assert float(loss) > 1.15 * math.log(101)
    scale = calibrate(drafter, target.ends, target.ends, seed=0)
    assert 0 < scale < 1
    assert torch.equal(drafter.norm.weight, torch.full((32,), scale))


def test_the_norm_is_never_scaled_up():
    target = tiny_target("llama")
    quiet = target.ends.copy_to(CPU, torch.float32).restricted(torch.arange(101))
    quiet.head_weight.mul_(1e-4)
    assert calibrate(tiny_drafter(target, 8), target.ends, quiet, seed=0) == 1.0


def test_the_same_seed_gives_the_same_drafter():
    target = tiny_target("llama")
    shape = derive_shape(DrafterConfig(num_layers=2, block_size=8), target.facts, MASK_TOKEN_ID)
    one, two, other = (new_drafter(shape, target.ends, target.ends, seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(one[name], value) for name, value in two.items())
    assert not torch.equal(one["fc.weight"], other["fc.weight"])


def test_a_head_that_is_broken_is_refused():
    target = tiny_target("llama")
    broken = target.ends.restricted(torch.arange(101))
    broken.head_weight.fill_(float("nan"))
    with pytest.raises(ConfigError, match="no finite logits"):
        calibrate(tiny_drafter(target, 8), target.ends, broken, seed=0)
