"""The block attention kernels: interpreted beside masked SDPA, compiled for a GPU without one, and their spans.

R rows, T context keys, A anchors, L block size, H query heads, G key/value heads, E head width.
"""

import dataclasses
import sys

import pytest
import torch

from blockdraft.models.attention import sdpa_attend
from blockdraft.models.block_mask import context_ranges
from blockdraft.models.blocks import visibility
from compiled_for_gpu import compile_for_gpu
from integration.tiny import tiny_drafter, tiny_target
from interpreted import run_interpreted
from unit.models.test_blocks import row

pytest.importorskip("triton")
from blockdraft.models import attention_backward_triton, attention_triton, block_attention
from blockdraft.models.block_attention import Ranges, Tile, Tiles, choose_tiles, context_spans, kernel_attend

ANCHORS = ([0, 3, 5, 6, 20, 33, 34, 41, 45, 60, -1, -1], [0, 2, 9, 11, 25, 33, 34, 41, 45, 60, 78, -1])
# Interpreting takes its time: several key/value heads in one case.
CASES = (
    {"block_size": 4, "causal": True},
    {"block_size": 10, "num_heads": 2, "num_kv_heads": 1},
    {"block_size": 16, "window": 20, "window_layers": (0,), "num_heads": 2, "num_kv_heads": 1},
)


def rows():
    """Documents of 40, 3 and 37 tokens with padding, and one of 83."""
    one, two = row(40, 3, 37, padding=3), row(83)
    return torch.cat([one[0], two[0]]), torch.cat([one[1], two[1]]), torch.tensor(ANCHORS)


def shape_of(**changes):
    return dataclasses.replace(tiny_drafter(tiny_target("llama"), 4).shape, **changes)


def outputs_and_gradients(make_attend, shape, numbers, num_slots):
    """`num_slots`: of each block that ask."""
    generator = torch.Generator().manual_seed(0)
    keys, queries = (numbers[2].shape[1] * count for count in (shape.block_size, num_slots))
    heads, groups = shape.num_heads, shape.num_kv_heads
    sizes = [(heads, queries), (groups, 83), (groups, 83), (groups, keys), (groups, keys)]
    streams = [torch.randn(2, heads, n, 16, generator=generator).requires_grad_() for heads, n in sizes]
    out_RHQE = make_attend(shape, *numbers)(0, *streams)
    upstream_RHQE = torch.randn(out_RHQE.shape, generator=generator)
    return [out_RHQE.detach(), *torch.autograd.grad(out_RHQE, streams, upstream_RHQE)]


def let_numbers_index() -> None:
    """numpy 2.4 makes no number of an array of one element, which the interpreter's loop bounds are."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def compare() -> None:
    """Run in a process of its own, where kernels are interpreted."""
    let_numbers_index()
    one = Tile(16, 16, 4, 1)
    # Query tiles larger than key tiles and the reverse; with larger tiles than blocks and smaller ones.
    block_attention.FLOAT32_SIZES = (Tiles(Tile(32, 16, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), one),)
    for case in CASES:
        shape, numbers = shape_of(**case), rows()
        # The largest blocks without slot 0 only: interpreting takes its time.
        for num_slots in {shape.block_size - 1, min(shape.block_size, 15)}:
            found = outputs_and_gradients(kernel_attend, shape, numbers, num_slots)
            wanted = outputs_and_gradients(sdpa_attend, shape, numbers, num_slots)
            for mine, its in zip(found, wanted, strict=True):
                far = float((mine - its).norm() / its.norm())
                assert far < 1e-6, (case, num_slots, far)
    sys.stdout.write("interpreted alike\n")


def test_kernels_equal_masked_sdpa_when_interpreted():
    run_interpreted("from unit.models.test_block_attention import compare; compare()")


def test_spans_hold_every_query_that_sees_a_key_and_the_inner_ones_see_all():
    tile = Tile(8, 16, 4, 1)
    for case in CASES:
        document_RT, position_RT, anchor_RA = rows()
        size, window = case["block_size"], case.get("window")
        ranges = Ranges(*context_ranges(position_RT, anchor_RA, size, window))
        seen_RQT = visibility(document_RT, position_RT, anchor_RA, size, window=window)[..., :83]
        span_RJ4 = context_spans(ranges, 83, tile)
        num_inner = 0
        for line, spans in zip(seen_RQT, span_RJ4.tolist(), strict=True):
            for key_tile, (first, inner_first, inner_stop, stop) in enumerate(spans):
                keys = line[:, key_tile * 16 : key_tile * 16 + 16]
                assert not keys[: first * 8].any()
                assert not keys[stop * 8 :].any()
                assert keys[inner_first * 8 : inner_stop * 8].all()
                assert first <= inner_first <= inner_stop <= stop
                num_inner += inner_stop - inner_first
        assert (num_inner > 0) == (window is None)


def compiled(function, tile: Tile, num_slots: int = 16, causal: bool = False):
    """A kernel compiled for an H200 at the shapes of Qwen3-8B."""
    constants = {"H": 32, "G": 8, "E": 128, "L": 16, "PRECISION": "tf32"}
    constants |= {"M": tile.queries, "N": tile.keys, "S": num_slots, "CAUSAL": causal}
    descriptors = {name: tile.queries for name in ("query", "upstream", "out")}
    descriptors |= {f"{part}_{what}": tile.keys for part in ("context", "block") for what in ("key", "value")}

    def kind(name: str) -> str:
        if name in descriptors:
            return f"tensordesc<bf16[{descriptors[name]},128]>"
        if name.endswith("_ptr"):
            part = name.split("_")[0]
            return {"low": "*i32", "high": "*i32", "span": "*i32", "log": "*fp32", "delta": "*fp32"}.get(part, "*bf16")
        return "i32" if name.startswith("num_") else "fp32"

    return compile_for_gpu(function, kind, constants, num_warps=tile.warps, num_stages=tile.stages)


@pytest.mark.parametrize(
    ("which", "num_slots"),
    # The context's gradients do not know of blocks.
    [("forward", 16), ("forward", 15), ("query", 16), ("query", 15), ("context", 16), ("block", 16), ("block", 15)],
)
def test_kernels_compile_for_a_gpu_and_use_its_matrix_units_and_copy_engine(which, num_slots):
    module = attention_triton if which == "forward" else attention_backward_triton
    tile = getattr(choose_tiles(torch.bfloat16, 0), which)
    found = compiled(vars(module)[f"{which}_kernel"], tile, num_slots)
    assert "wgmma.mma_async" in found.asm["ptx"]
    assert "cp.async.bulk.tensor" in found.asm["ptx"]
    # An H200 gives a block 227 KB.
    assert found.metadata.shared <= 227 * 1024


def test_smaller_tiles_need_less_shared_memory():
    sizes = [
        compiled(attention_triton.forward_kernel, tiles.forward).metadata.shared for tiles in block_attention.SIZES
    ]
    assert sizes == sorted(sizes, reverse=True)
    # Consumer cards give a block 99 KB.
    assert sizes[1] <= 99 * 1024
    assert choose_tiles(torch.float32, 9) == block_attention.FLOAT32_SIZES[-1]
