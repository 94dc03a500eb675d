"""What a step without a compiler keeps and holds, by its formula and by its tensors: nothing is computed, all is sized.

R rows, T context tokens, A anchors, L block size, N rows, M rows that are made of them, D width, F width of heads.
"""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from blockdraft.commands.bench_cases import presets
from blockdraft.config import LossConfig
from blockdraft.models.drafter import Drafter, DrafterShape
from blockdraft.models.layer_ops import HeadGradient, Normed, NormGradient, SwigluGradient, check_map
from blockdraft.models.own_layers import KernelDrafter
from blockdraft.runtime.memory_plan import count_tokens, kept_by_kernels, step_peak
from unit.runtime.test_memory_plan import config, sizes

WIDTH = 2


class Held(TorchDispatchMode):
    """Bytes of all tensors that are alive and were made under it."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen = weakref.WeakKeyDictionary({tensor.untyped_storage(): 0 for tensor in known})

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage() not in self._seen:
                storage = tensor.untyped_storage()
                self._seen[storage] = storage.nbytes()
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._freed, storage.nbytes())
        return out

    def _freed(self, size: int) -> None:
        self.now -= size


class Sized:
    """`LayerOps` that only make room for what the kernels write."""

    def add_norm(self, x_ND, delta_MD, weight_D, eps, expand=None, drop=None):
        check_map(delta_MD, expand, drop)
        total = x_ND if delta_MD is None else torch.empty_like(delta_MD)
        return Normed(total, torch.empty_like(total), total.new_empty(len(total), dtype=torch.float32))

    def norm_backward(self, upstream_ND, total_ND, rstd_N, weight_D, residual_MD, *, wants_normed, drop=None):
        again_ND = torch.empty_like(total_ND) if wants_normed else None
        return NormGradient(torch.empty_like(total_ND), torch.empty_like(weight_D), again_ND)

    def rotate_heads(self, x_NF, weight_E, eps, cos_ME, sin_ME, expand=None):
        return x_NF.new_empty(len(cos_ME), x_NF.shape[1])

    def rotate_heads_backward(self, upstream_MF, x_NF, weight_E, eps, cos_ME, sin_ME, expand=None, onto_NF=None):
        return HeadGradient(torch.empty_like(x_NF) if onto_NF is None else onto_NF, torch.empty_like(weight_E))

    def expand_rows(self, x_NF, expand):
        return x_NF.new_empty(expand.num_made(len(x_NF)), x_NF.shape[1])

    def sum_rows_onto(self, onto_NF, upstream_MF, expand):
        assert len(onto_NF) == (len(upstream_MF) if expand is None else expand.num_read(len(upstream_MF)))

    def take_drafted(self, x_ND, block_size):
        return x_ND.new_empty(len(x_ND) // block_size * (block_size - 1), x_ND.shape[1])

    def add_drafted(self, x_ND, more_MD, block_size):
        assert len(more_MD) < len(x_ND)

    def rotary(self, context_RT, block_RQ, frequency_Y, block_size, dtype):
        rows = context_RT.numel() + block_RQ.numel() // block_size * (2 * block_size - 1)
        cos = frequency_Y.new_empty(rows, 2 * len(frequency_Y), dtype=dtype)
        return cos, torch.empty_like(cos)

    def swiglu(self, product_NJ):
        return product_NJ.new_empty(len(product_NJ), product_NJ.shape[1] // 2)

    def swiglu_backward_onto(self, upstream_NI, product_NJ):
        return SwigluGradient(product_NJ, upstream_NI)


class Attention(torch.autograd.Function):
    """Keeps what the attention kernels keep."""

    @staticmethod
    def forward(ctx, *streams):
        out = torch.empty_like(streams[0])
        ctx.save_for_backward(*streams, out, out.new_empty(out.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, _upstream):
        return tuple(torch.empty_like(stream) for stream in ctx.saved_tensors[:5])


def attend(_layer: int, *streams: Tensor) -> Tensor:
    return Attention.apply(*(stream.transpose(1, 2).contiguous() for stream in streams)).transpose(1, 2)


def held(shape: DrafterShape) -> tuple[int, int]:
    """Bytes that a forward leaves behind, and the most that a backward holds whose gradients go as they come."""
    tokens, anchors = 4096, 512
    with torch.device("meta"):
        drafter = Drafter(shape).bfloat16()
        given = [
            torch.empty(1, tokens, drafter.fc.in_features, dtype=torch.bfloat16),
            torch.empty(1, tokens, dtype=torch.long),
            torch.empty(1, anchors + 1, shape.hidden_size, dtype=torch.bfloat16),
            torch.empty(1, anchors * shape.block_size, dtype=torch.long),
        ]
    for weight in drafter.parameters():
        weight.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
    run = KernelDrafter(drafter, Sized())
    with Held([*drafter.parameters(), *given[:2], given[3]]) as seen:
        hidden_RMD = run(*given, attend)
        kept, seen.most = seen.now, seen.now
        hidden_RMD.backward(torch.empty_like(hidden_RMD))
    return kept, seen.most


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3-8b", {"num_layers": 5}),
        ("qwen3.6-27b", {"num_layers": 5}),
        ("qwen3-8b", {"num_layers": 1}),
        # Where gate and up are most of all, the peak comes before their weights' gradients.
        ("qwen3-8b", {"num_layers": 1, "hidden_size": 512, "intermediate_size": 16384}),
    ],
)
def test_the_formula_counts_what_is_there(name, changes):
    shape = replace(presets()[name], **changes)
    kept, most = held(shape)
    # Left out: 1 / rms of rows, the attention's sums.
    assert kept == pytest.approx(kept_by_kernels(count_tokens(config(), shape), shape.head_dim) * WIDTH, rel=0.004)
    # Next to no head, so that the backward's start holds most.
    planned = step_peak(config(), sizes(shape)._replace(how="kernels", head_rows=1))
    assert planned.keys() >= {"kept activations", "backward"}
    assert most == pytest.approx(sum(planned.values()), rel=0.004)


@pytest.mark.parametrize(("name", "limit_gib"), [("qwen3-8b", 5), ("qwen3.6-27b", 6)])
def test_the_limits_of_memory_hold_by_the_plan(name, limit_gib):
    at = sizes(presets()[name])._replace(how="kernels")
    chunked = replace(config(), loss=LossConfig(chunk_rows=2048))
    assert sum(step_peak(chunked, at).values()) < limit_gib * 2**30
