"""The operations of a drafter layer through Triton kernels: `LayerOps` for GPUs.

Letters as in models/layer_ops.py, which is the reference; the kernels are in models/layer_kernels.py. P programs, each
with one line of what is summed over rows.
"""

from typing import Final

import torch
import triton
from torch import Tensor

from blockdraft.models import layer_kernels as kernels
from blockdraft.models.layer_ops import Expand, HeadGradient, LayerOps, Normed, NormGradient, SwigluGradient, check_map
from blockdraft.models.row_kernels import launch_drafted, launch_rotary

NORM_WARPS: Final = 16
"""Of the norm's backward on each multiprocessor: its 128 registers of a thread leave room for no more."""
HEAD_PROGRAMS: Final = 4
"""Of other kernels that sum over rows, as many as there is room for: a second round would leave most of it empty."""
NUM_WARPS: Final = 4
"""Of kernels whose programs take tiles of `TILE` elements."""
TILE: Final = 4096
SWIGLU_TILE: Final = 1024
PARTS: Final = 256
"""Lines that are added up at a time, in columns of `COLUMNS`."""
COLUMNS: Final = 16


class TritonOps:
    """The fused operations. One kernel each, and where rows are summed one or two more that read little."""

    def add_norm(
        self,
        x_ND: Tensor,
        delta_MD: Tensor | None,
        weight_D: Tensor,
        eps: float,
        expand: Expand | None = None,
        drop: int | None = None,
    ) -> Normed:
        """As LayerOps."""
        check_map(delta_MD, expand, drop)
        read_MD = x_ND if delta_MD is None else delta_MD
        _check_contiguous(x_ND, read_MD, weight_D)
        num_rows, width = read_MD.shape
        total_MD = x_ND if delta_MD is None else torch.empty_like(read_MD, dtype=x_ND.dtype)
        normed_MD = torch.empty_like(read_MD, dtype=x_ND.dtype)
        rstd_M = torch.empty(num_rows, dtype=torch.float32, device=x_ND.device)
        block = triton.next_power_of_2(width)
        kernels.add_norm_kernel[(num_rows,)](
            x_ND, read_MD, weight_D, total_MD, normed_MD, rstd_M, 0 if expand is None else expand.num_anchors, eps,
            D=width, BLOCK=block, HAS_DELTA=delta_MD is not None, EXPAND=expand is not None, DROP=drop is not None,
            L=_block_size(expand, drop), FIRST=0 if expand is None else expand.first_slot, num_warps=_row_warps(block),
        )  # fmt: skip
        return Normed(total_MD, normed_MD, rstd_M)

    def norm_backward(
        self,
        upstream_ND: Tensor,
        total_ND: Tensor,
        rstd_N: Tensor,
        weight_D: Tensor,
        residual_MD: Tensor | None,
        *,
        wants_normed: bool,
        drop: int | None = None,
    ) -> NormGradient:
        """As LayerOps."""
        assert residual_MD is not None or drop is None, "only a residual can lack rows"
        beside_MD = total_ND if residual_MD is None else residual_MD
        _check_contiguous(upstream_ND, total_ND, rstd_N, weight_D, beside_MD)
        num_rows, width = total_ND.shape
        gradient_ND = torch.empty_like(total_ND)
        normed_ND = torch.empty_like(total_ND) if wants_normed else None
        block = triton.next_power_of_2(width)
        num_programs = min(num_rows, _num_processors(total_ND) * (NORM_WARPS // _row_warps(block)))
        part_PD = torch.empty(num_programs, width, dtype=torch.float32, device=total_ND.device)
        kernels.norm_backward_kernel[(num_programs,)](
            upstream_ND, total_ND, rstd_N, weight_D, beside_MD, gradient_ND,
            gradient_ND if normed_ND is None else normed_ND, part_PD, num_rows,
            D=width, BLOCK=block, HAS_RESIDUAL=residual_MD is not None, HAS_NORMED=wants_normed,
            L=_block_size(None, drop), DROP=drop is not None, num_warps=_row_warps(block),
        )  # fmt: skip
        return NormGradient(gradient_ND, _sum_lines(part_PD, weight_D), normed_ND)

    def rotate_heads(
        self,
        x_NF: Tensor,
        weight_E: Tensor,
        eps: float,
        cos_ME: Tensor,
        sin_ME: Tensor,
        expand: Expand | None = None,
    ) -> Tensor:
        """As LayerOps."""
        _check_contiguous(x_NF, weight_E, cos_ME, sin_ME)
        width, dim = x_NF.shape[1], len(weight_E)
        num_made = len(x_NF) if expand is None else expand.num_made(len(x_NF))
        assert cos_ME.shape == sin_ME.shape == (num_made, dim), "a row of factors for each row that is made"
        out_MF = torch.empty(num_made, width, dtype=x_NF.dtype, device=x_NF.device)
        half, tile = _tile(dim)
        kernels.rotate_kernel[(triton.cdiv(num_made * (width // dim), tile),)](
            x_NF, weight_E, cos_ME, sin_ME, out_MF, num_made, 0 if expand is None else expand.num_anchors, eps,
            H=width // dim, E=dim, TILE=tile, HALF=half, L=_block_size(expand, None),
            FIRST=0 if expand is None else expand.first_slot, EXPAND=expand is not None, num_warps=NUM_WARPS,
        )  # fmt: skip
        return out_MF

    def rotate_heads_backward(
        self,
        upstream_MF: Tensor,
        x_NF: Tensor,
        weight_E: Tensor,
        eps: float,
        cos_ME: Tensor,
        sin_ME: Tensor,
        expand: Expand | None = None,
        onto_NF: Tensor | None = None,
    ) -> HeadGradient:
        """As LayerOps."""
        _check_contiguous(upstream_MF, x_NF, weight_E, cos_ME, sin_ME)
        num_rows, num_heads, dim = len(x_NF), x_NF.shape[1] // len(weight_E), len(weight_E)
        gradient_NF = torch.empty_like(x_NF) if onto_NF is None else onto_NF
        line = _line(gradient_NF, x_NF.shape)
        groups = 0
        if expand is not None:
            groups = num_rows // (expand.num_anchors + 1)
            # Of slot 0, where that was made.
            num_rows = 0 if expand.first_slot else groups * expand.num_anchors
            if expand.first_slot:
                gradient_NF.zero_()
        half, tile = _tile(dim)
        num_programs = min(triton.cdiv(num_rows * num_heads, tile), _num_processors(x_NF) * HEAD_PROGRAMS)
        part_PE = torch.empty(num_programs + groups * num_heads, dim, dtype=torch.float32, device=x_NF.device)
        if num_rows:
            kernels.rotate_backward_kernel[(num_programs,)](
                upstream_MF, x_NF, weight_E, cos_ME, sin_ME, gradient_NF, part_PE, num_rows,
                0 if expand is None else expand.num_anchors, eps,
                H=num_heads, E=dim, LINE=line, TILE=tile, HALF=half, L=_block_size(expand, None),
                EXPAND=expand is not None, num_warps=NUM_WARPS,
            )  # fmt: skip
        if expand is not None:
            sum_RPF = _turn_back(upstream_MF, cos_ME, sin_ME, groups, num_heads, expand)
            kernels.mask_row_kernel[(num_heads, groups)](
                sum_RPF, x_NF, weight_E, gradient_NF, part_PE, sum_RPF.shape[1], expand.num_anchors, num_programs, eps,
                H=num_heads, E=dim, LINE=line, PARTS=64, HALF=half, num_warps=NUM_WARPS,
            )  # fmt: skip
        return HeadGradient(gradient_NF, _sum_lines(part_PE, weight_E))

    def expand_rows(self, x_NF: Tensor, expand: Expand) -> Tensor:
        """As LayerOps."""
        _check_contiguous(x_NF)
        num_made, width = expand.num_made(len(x_NF)), x_NF.shape[1]
        out_MF = torch.empty(num_made, width, dtype=x_NF.dtype, device=x_NF.device)
        block = min(1024, triton.next_power_of_2(width))
        rows = TILE // block
        kernels.expand_kernel[(triton.cdiv(num_made, rows), triton.cdiv(width, block))](
            x_NF, out_MF, num_made, expand.num_anchors,
            F=width, ROWS=rows, BLOCK=block, L=expand.block_size, FIRST=expand.first_slot, num_warps=NUM_WARPS,
        )  # fmt: skip
        return out_MF

    def sum_rows_onto(self, onto_NF: Tensor, upstream_MF: Tensor, expand: Expand | None) -> None:
        """As LayerOps."""
        _check_contiguous(upstream_MF)
        num_rows, width = onto_NF.shape
        line = _line(onto_NF, (num_rows, width))
        block = min(512, triton.next_power_of_2(width))
        rows, columns = TILE // block, triton.cdiv(width, block)
        if expand is None:
            kernels.place_kernel[(triton.cdiv(num_rows, rows), columns)](
                upstream_MF, onto_NF, num_rows, F=width, LINE=line, ROWS=rows, BLOCK=block, num_warps=NUM_WARPS
            )
            return
        groups = num_rows // (expand.num_anchors + 1)
        if expand.first_slot:
            # The anchors' rows take no part where slot 0 is not made.
            onto_NF.zero_()
        num_parts = _num_parts(upstream_MF, expand.num_anchors * expand.num_slots, rows, columns * groups)
        sum_RPF = torch.empty(groups, num_parts, width, dtype=torch.float32, device=upstream_MF.device)
        kernels.sum_kernel[(num_parts, columns, groups)](
            upstream_MF, onto_NF, sum_RPF, expand.num_anchors,
            F=width, LINE=line, ROWS=rows, BLOCK=block, L=expand.block_size, FIRST=expand.first_slot,
            num_warps=NUM_WARPS,
        )  # fmt: skip
        _reduce(sum_RPF, onto_NF, expand.num_anchors, expand.num_anchors + 1, line)

    def take_drafted(self, x_ND: Tensor, block_size: int) -> Tensor:
        """As LayerOps."""
        drafted_MD = x_ND.new_empty(len(x_ND) // block_size * (block_size - 1), x_ND.shape[1])
        launch_drafted(x_ND, drafted_MD, block_size, adds=False)
        return drafted_MD

    def add_drafted(self, x_ND: Tensor, more_MD: Tensor, block_size: int) -> None:
        """As LayerOps."""
        launch_drafted(x_ND, more_MD, block_size, adds=True)

    def rotary(
        self, context_RT: Tensor, block_RQ: Tensor, frequency_Y: Tensor, block_size: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """As LayerOps."""
        return launch_rotary(context_RT, block_RQ, frequency_Y, block_size, dtype)

    def swiglu(self, product_NJ: Tensor) -> Tensor:
        """As LayerOps."""
        _check_contiguous(product_NJ)
        num_rows, width = len(product_NJ), product_NJ.shape[1] // 2
        out_NI = product_NJ.new_empty(num_rows, width)
        parts = triton.cdiv(width, SWIGLU_TILE)
        kernels.swiglu_kernel[(num_rows * parts,)](
            product_NJ, out_NI, INNER=width, PARTS=parts, BLOCK=SWIGLU_TILE, num_warps=NUM_WARPS
        )
        return out_NI

    def swiglu_backward_onto(self, upstream_NI: Tensor, product_NJ: Tensor) -> SwigluGradient:
        """As LayerOps."""
        _check_contiguous(upstream_NI, product_NJ)
        num_rows, width = upstream_NI.shape
        parts = triton.cdiv(width, SWIGLU_TILE)
        kernels.swiglu_backward_kernel[(num_rows * parts,)](
            upstream_NI, product_NJ, INNER=width, PARTS=parts, BLOCK=SWIGLU_TILE, num_warps=NUM_WARPS
        )
        return SwigluGradient(product_NJ, upstream_NI)


TRITON_OPS: Final[LayerOps] = TritonOps()


def _turn_back(
    upstream_MF: Tensor, cos_ME: Tensor, sin_ME: Tensor, groups: int, num_heads: int, expand: Expand
) -> Tensor:
    """Gradients before the rotation of each batch row's later slots, as sums of some of its tokens each: [R, P, F]."""
    dim = cos_ME.shape[1]
    half, tile = _tile(dim)
    heads = min(8, tile, triton.next_power_of_2(num_heads))
    rows = tile // heads
    columns = triton.cdiv(num_heads, heads)
    num_parts = _num_parts(upstream_MF, expand.num_anchors * expand.num_slots, rows, columns * groups)
    sum_RPF = torch.empty(groups, num_parts, num_heads * dim, dtype=torch.float32, device=upstream_MF.device)
    kernels.turn_back_kernel[(num_parts, columns, groups)](
        upstream_MF, cos_ME, sin_ME, sum_RPF, expand.num_anchors,
        H=num_heads, E=dim, HEADS=heads, ROWS=rows, HALF=half, L=expand.block_size, FIRST=expand.first_slot,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return sum_RPF


def _sum_lines(part_PD: Tensor, weight_D: Tensor) -> Tensor:
    """The gradient of a weight from the programs' shares."""
    gradient_D = torch.empty_like(weight_D)
    _reduce(part_PD[None], gradient_D, 0, 1, len(weight_D))
    return gradient_D


def _reduce(part_RPD: Tensor, out: Tensor, first: int, step: int, line: int) -> None:
    """Sums over P, of group r into row first + r * step, each `line` numbers behind the one before."""
    groups, num_parts, width = part_RPD.shape
    kernels.reduce_kernel[(triton.cdiv(width, COLUMNS), groups)](
        part_RPD, out, num_parts, first, step, D=width, LINE=line, PARTS=PARTS, BLOCK=COLUMNS, num_warps=8
    )


def _line(columns_NF: Tensor, shape: tuple[int, ...]) -> int:
    """From one row to the next, of columns of a matrix."""
    assert columns_NF.shape == shape and columns_NF.stride(1) == 1, "whole columns side by side"
    return columns_NF.stride(0)


def _num_parts(like: Tensor, num_rows: int, rows: int, others: int) -> int:
    """Programs that share a batch row's tokens: enough to fill the GPU, and each with a few turns to its one line."""
    few_turns = int(triton.cdiv(num_rows, 4 * rows))
    return max(1, min(few_turns, int(triton.cdiv(_num_processors(like) * HEAD_PROGRAMS, others))))


def _num_processors(like: Tensor) -> int:
    # The interpreter, in tests, takes one program after the other.
    return int(torch.cuda.get_device_properties(like.device).multi_processor_count) if like.is_cuda else 1


def _tile(dim: int) -> tuple[int, int]:
    """Half a head as a power of two, and heads to a tile."""
    assert dim % 2 == 0, "a head has two halves"
    half = triton.next_power_of_2(dim // 2)
    return half, max(1, TILE // (2 * half))


def _block_size(expand: Expand | None, drop: int | None) -> int:
    """One where rows are as they are: the kernel does not read it."""
    return expand.block_size if expand is not None else drop if drop is not None else 1


def _row_warps(block: int) -> int:
    """16 elements of a row to a thread."""
    return min(16, max(1, block // 512))


def _check_contiguous(*tensors: Tensor) -> None:
    assert all(tensor.is_contiguous() for tensor in tensors), "the kernels count rows by their width"
