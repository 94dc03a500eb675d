"""What the fast pass of a target is made of: torch's reference of each fused operation, and the kernels for GPUs.

N rows, W columns of a product, D width.
"""

import pytest
import torch
from torch import nn

from blockdraft.models.target_fast_layers import fuse
from blockdraft.models.target_fast_ops import Columns, Norm, Rows, TorchOps, pick
from compiled_for_gpu import compile_for_gpu
from interpreted import run_interpreted


def test_rows_in_float8_use_the_whole_range_of_each_row():
    rows = TorchOps(torch.float32).add_norm(torch.randn(4, 24), None, Norm(torch.ones(24), 1e-6), True)[1]
    assert rows.value_NK.dtype == torch.float8_e4m3fn
    assert rows.value_NK.float().abs().amax(-1).tolist() == [448.0] * 4


INTERPRETED = """
import torch
from blockdraft.models.target_fast_layers import fuse
from blockdraft.models.target_fast_ops import Columns, Norm, TorchOps
from blockdraft.models.target_fast_triton import TritonOps

torch.manual_seed(0)
NUM, WIDTH, HEADS, DIM, LENGTH = 10, 24, 6, 12, 5


def close(found, expected, quantized=False):
    pairs = [(found, expected)] if isinstance(found, torch.Tensor) else [(found.value_NK, expected.value_NK)]
    if quantized:
        assert found.value_NK.dtype == expected.value_NK.dtype == torch.float8_e4m3fn
        pairs = [(found.value_NK.float() * found.scale_N1, expected.value_NK.float() * expected.scale_N1)]
    for one, other in pairs:
        far = float((one.float() - other.float()).norm() / other.float().norm())
        # Triton's interpreter cuts where the hardware rounds: one unit in the last place, of float8 too.
        assert far < (0.07 if quantized else 1e-6), far


reference, fused = TorchOps(torch.float32), TritonOps(torch.float32)
mixed, core = torch.randn(NUM, 200), torch.randn(NUM, HEADS, DIM)
heads, norm = Columns(HEADS, DIM, 5, 2, 60), Norm(torch.rand(DIM) + 0.5, 1e-6)
hidden, delta, wide = torch.randn(NUM, WIDTH), torch.randn(NUM, WIDTH), Norm(torch.rand(WIDTH) + 0.5, 1e-6)
for quantize in (False, True):
    for update in (None, delta):
        (total, rows), (other, others) = (ops.add_norm(hidden, update, wide, quantize) for ops in (fused, reference))
        close(total, other)
        close(rows, others, quantize)
    close(*(ops.swiglu(mixed, quantize) for ops in (fused, reference)), quantize)
    close(*(ops.gated_norm(core, mixed, heads, norm, quantize) for ops in (fused, reference)), quantize)
    for gate in (None, heads):
        close(*(ops.gate_heads(core, mixed, gate, quantize) for ops in (fused, reference)), quantize)
taps = torch.randn(2 * HEADS * DIM, 4)
# More rows than one program takes.
long, other = torch.randn(80, 400), heads._replace(offset=205)
for normalize in (False, True):
    for parts, weights in (((heads,), taps[: HEADS * DIM]), ((heads, other), taps)):
        both = [ops.conv(long, weights, parts, 40, normalize) for ops in (fused, reference)]
        for found, expected in zip(*both, strict=True):
            close(found, expected)
beta, alpha = Columns(HEADS, 1, 3, 2, 9), Columns(HEADS, 1, 30, 3, 17)
# Some beyond the point where softplus is the identity.
a_log, dt = torch.rand(HEADS), torch.rand(HEADS) * 40
for found, expected in zip(*(ops.decay(mixed, beta, alpha, a_log, dt) for ops in (fused, reference)), strict=True):
    close(found, expected)
cos, sin = torch.randn(LENGTH, 8), torch.randn(LENGTH, 8)
for one in (None, norm):
    close(*(ops.rotate(mixed, heads, one, cos, sin) for ops in (fused, reference)))
print("interpreted alike")
"""


def test_the_fused_kernels_equal_the_reference_when_interpreted():
    pytest.importorskip("triton")
    run_interpreted(INTERPRETED)


def test_columns_of_groups_are_picked_where_they_lie():
    mixed_NW = torch.arange(40.0).view(2, 20)
    found = pick(mixed_NW, Columns(4, 2, 1, 2, 9))
    assert found[0].tolist() == [[1, 2], [3, 4], [10, 11], [12, 13]]
    assert found[1, 0].tolist() == [21, 22]
    assert isinstance(TorchOps(torch.float32).swiglu(mixed_NW, False), Rows)


# Of the largest target in docs/performance.md: pointers of its kernels, and their compile-time constants.
BUILT = {
    "_add_norm": (
        {"hidden_ptr": "*bf16", "delta_ptr": "*bf16", "weight_ptr": "*fp32", "total_ptr": "*bf16", "eps": "fp32"},
        {"out_ptr": "*fp8e4nv", "scale_ptr": "*fp32"},
        {"D": 5120, "BLOCK": 8192, "HAS_DELTA": True, "QUANTIZE": True},
        8,
    ),
    "_swiglu_float8": (
        {"gate_up_ptr": "*bf16"},
        {"out_ptr": "*fp8e4nv", "scale_ptr": "*fp32"},
        {"J": 17408, "HEAD": 16384, "TAIL": 1024},
        16,
    ),
    "_conv": (
        {"mixed_ptr": "*bf16", "weight_ptr": "*bf16", "length": "i32", "l2_eps": "fp32"},
        {"out_ptr": "*bf16"},
        {"W": 16480, "H": 16, "E": 128, "OFFSET": 0, "GROUP": 1, "STRIDE": 128, "PARTS": 2, "SHIFT": 2048, "ROWS": 16}
        | {"BLOCK_H": 8, "BLOCK_E": 128, "NORMALIZE": True},
        4,
    ),
}


@pytest.mark.parametrize("name", sorted(BUILT))
def test_fused_kernels_compile_for_a_gpu_and_move_16_bytes_at_a_time(name):
    pytest.importorskip("triton")
    from blockdraft.models import target_fast_triton

    kernel = vars(target_fast_triton)[name]
    inputs, outputs, constants, warps = BUILT[name]
    types = {**inputs, **outputs}
    assert sorted([*types, *constants]) == sorted(kernel.arg_names)
    code = compile_for_gpu(kernel, types.__getitem__, constants, num_warps=warps).asm["ptx"]
    assert code.count("ld.global.v4") >= 4
    assert code.count("st.global.v4") >= 2
    assert ".local" not in code, "registers were not enough"


def test_float8_without_a_bias_and_16_bit_products_keep_the_stream_apart_or_add_to_it():
    stream_ND, rows = torch.zeros(3, 4), Rows(torch.ones(3, 8), None)
    ops, linear = TorchOps(torch.float32), nn.Linear(8, 4, bias=False)
    assert ops.product_onto(stream_ND, rows, fuse([linear], None)) is None
    torch.testing.assert_close(stream_ND, linear(torch.ones(3, 8)).detach())
    before = stream_ND.clone()
    update_ND = ops.product_onto(stream_ND, rows, fuse([nn.Linear(8, 4)], None))
    assert update_ND is not None
    assert torch.equal(stream_ND, before)
