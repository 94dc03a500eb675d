"""What a drafter layer does between its matrix products, forward and backward, in plain torch: the kernels' reference.

R batch rows, A anchors of each, L block size, S slots of each block that are made (its last ones, L or L - 1), N rows
of what is read (tokens of all batch rows, flattened), M rows of what is written, U = A + 1 rows that differ, D width,
F = H * E width of H heads of E, I inner width, J = 2 I.

models/layer_triton.py does the same in one pass over memory each. Every tensor is contiguous. Everything is computed in
float32 inside (in float64 where that is what comes in) and rounded once, when it is stored.
"""

from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor


class Expand(NamedTuple):
    """Rows of a first layer: every slot but the anchor's holds the same mask token, so its row is there once.

    Of A + 1 rows for each batch row, the anchors' and then the mask token's, are made A * S for each: slot 0 of block a
    reads row a, every later slot row A. With `first_slot` 1 slot 0 is left out.
    """

    num_anchors: int
    block_size: int
    first_slot: int = 0

    @property
    def num_slots(self) -> int:
        """Slots that are made of each block."""
        return self.block_size - self.first_slot

    def num_made(self, num_rows: int) -> int:
        """Rows made of `num_rows`."""
        return num_rows // (self.num_anchors + 1) * self.num_anchors * self.num_slots

    def num_read(self, num_rows: int) -> int:
        """Rows that `num_rows` are made of."""
        return num_rows // (self.num_anchors * self.num_slots) * (self.num_anchors + 1)


class Normed(NamedTuple):
    """A sum, its norm, and 1 / rms of each row of the sum in float32."""

    total_ND: Tensor
    normed_ND: Tensor
    rstd_N: Tensor


class NormGradient(NamedTuple):
    """Gradients of a norm's input (what arrives beside the norm added) and weight, and the norm made again if asked."""

    total_ND: Tensor
    weight_D: Tensor
    normed_ND: Tensor | None


class HeadGradient(NamedTuple):
    """Gradients of heads before their norm, and of the norm's weight."""

    x_NF: Tensor
    weight_E: Tensor


class SwigluGradient(NamedTuple):
    """The gradient of the input, and the output made again."""

    product_NJ: Tensor
    hidden_NI: Tensor


class LayerOps(Protocol):
    """The operations of a layer. Sums have a fixed order: the same inputs give the same bits."""

    def add_norm(
        self,
        x_ND: Tensor,
        delta_MD: Tensor | None,
        weight_D: Tensor,
        eps: float,
        expand: Expand | None = None,
        drop: int | None = None,
    ) -> Normed:
        """The sum in the type of `x_ND`, and the norm of the rounded sum; without delta the sum is `x_ND` itself.

        With `expand` row m of the delta meets the row of `x_ND` that m is made of. With `drop` (the block size) the
        delta has no rows for slot 0 of each block, and those of `x_ND` are left out. At most one of the two, and
        only with a delta.
        """
        ...

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
        """Gradients of normed = norm(total) * weight; `residual_MD` is added to the input's.

        With `drop` (the block size) the residual has no rows for slot 0 of each block: zero is added there.
        """
        ...

    def rotate_heads(
        self,
        x_NF: Tensor,
        weight_E: Tensor,
        eps: float,
        cos_ME: Tensor,
        sin_ME: Tensor,
        expand: Expand | None = None,
    ) -> Tensor:
        """Norm of each head and rotary embedding in the half-split layout: [M, F].

        Both halves of a row of the factors are alike, as `rotation` of models/drafter.py makes them; the first is read.
        """
        ...

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
        """Gradients of `rotate_heads`; with `expand` a mask token's row has the sum over its slots.

        `onto_NF`: columns of a wider matrix that the gradient is written to.
        """
        ...

    def expand_rows(self, x_NF: Tensor, expand: Expand) -> Tensor:
        """A row of every slot: [M, F]."""
        ...

    def sum_rows_onto(self, onto_NF: Tensor, upstream_MF: Tensor, expand: Expand | None) -> None:
        """Writes the gradient of `expand_rows` to columns of a wider matrix; without `expand` a copy."""
        ...

    def take_drafted(self, x_ND: Tensor, block_size: int) -> Tensor:
        """Rows without slot 0 of each block: [M, D]."""
        ...

    def add_drafted(self, x_ND: Tensor, more_MD: Tensor, block_size: int) -> None:
        """Adds these to the rows of `take_drafted`, where they lie."""
        ...

    def rotary(
        self, context_RT: Tensor, block_RQ: Tensor, frequency_Y: Tensor, block_size: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine [rows, E] of context positions, then block positions, then these without slot 0.

        `frequency_Y`: of half a head (`rotary_frequencies` of models/drafter.py); both halves are alike.
        """
        ...

    def swiglu(self, product_NJ: Tensor) -> Tensor:
        """silu(gate) * up of rows [gate, up]: [N, I]."""
        ...

    def swiglu_backward_onto(self, upstream_NI: Tensor, product_NJ: Tensor) -> SwigluGradient:
        """The gradient of `swiglu`, written over `product_NJ`, and the output made again, over `upstream_NI`."""
        ...


class EagerOps:
    """The reference, for CPUs and for tests."""

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
        total_MD = x_ND
        if delta_MD is not None:
            read_MD = x_ND if expand is None else self.expand_rows(x_ND, expand)
            total_MD = without_first(read_MD, drop) + delta_MD
        normed_MD, rstd_M1 = _norm(total_MD, eps)
        return Normed(total_MD, (_wide(weight_D) * normed_MD).to(x_ND.dtype), rstd_M1[:, 0])

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
        normed_ND = _wide(total_ND) * rstd_N[:, None]
        gradient_ND, scale_D = _norm_backward(_wide(upstream_ND), normed_ND, rstd_N[:, None], _wide(weight_D))
        if residual_MD is not None:
            gradient_ND = gradient_ND + _wide(with_first(residual_MD, drop))
        again_ND = (_wide(weight_D) * normed_ND).to(total_ND.dtype) if wants_normed else None
        return NormGradient(gradient_ND.to(total_ND.dtype), scale_D.to(weight_D.dtype), again_ND)

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
        x_MF = x_NF if expand is None else self.expand_rows(x_NF, expand)
        normed_MHE, _ = _norm(x_MF.unflatten(1, (-1, len(weight_E))), eps)
        first, second = (_wide(weight_E) * normed_MHE).chunk(2, dim=-1)
        cos, sin = _factors(cos_ME, sin_ME)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(1).to(x_NF.dtype)

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
        x_MF = x_NF if expand is None else self.expand_rows(x_NF, expand)
        heads = (-1, len(weight_E))
        first, second = _wide(upstream_MF).unflatten(1, heads).chunk(2, dim=-1)
        cos, sin = _factors(cos_ME, sin_ME)
        turned_MHE = torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)
        normed_MHE, rstd_MH1 = _norm(x_MF.unflatten(1, heads), eps)
        gradient_MHE, scale_E = _norm_backward(turned_MHE, normed_MHE, rstd_MH1, _wide(weight_E))
        gradient_NF = torch.empty_like(x_NF) if onto_NF is None else onto_NF
        self.sum_rows_onto(gradient_NF, gradient_MHE.flatten(1), expand)
        return HeadGradient(gradient_NF, scale_E.to(weight_E.dtype))

    def expand_rows(self, x_NF: Tensor, expand: Expand) -> Tensor:
        """As LayerOps."""
        x_RUF = x_NF.unflatten(0, (-1, expand.num_anchors + 1))
        anchor_RA1F = x_RUF[:, :-1, None]
        mask_RALF = x_RUF[:, -1:, None].expand(-1, expand.num_anchors, expand.block_size - 1, -1)
        return torch.cat([anchor_RA1F, mask_RALF], dim=2)[:, :, expand.first_slot :].flatten(0, 2)

    def sum_rows_onto(self, onto_NF: Tensor, upstream_MF: Tensor, expand: Expand | None) -> None:
        """As LayerOps."""
        if expand is None:
            onto_NF.copy_(upstream_MF)
            return
        upstream_RASF = upstream_MF.unflatten(0, (-1, expand.num_anchors, expand.num_slots))
        onto_RUF = onto_NF.unflatten(0, (-1, expand.num_anchors + 1))
        onto_RUF[:, :-1] = upstream_RASF[:, :, 0] if expand.first_slot == 0 else 0.0
        onto_RUF[:, -1] = _wide(upstream_RASF[:, :, 1 - expand.first_slot :]).sum((1, 2))

    def take_drafted(self, x_ND: Tensor, block_size: int) -> Tensor:
        """As LayerOps."""
        return without_first(x_ND, block_size)

    def add_drafted(self, x_ND: Tensor, more_MD: Tensor, block_size: int) -> None:
        """As LayerOps."""
        x_ND.unflatten(0, (-1, block_size))[:, 1:] += more_MD.unflatten(0, (-1, block_size - 1))

    def rotary(
        self, context_RT: Tensor, block_RQ: Tensor, frequency_Y: Tensor, block_size: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """As LayerOps."""
        block_N = block_RQ.flatten()
        position_N = torch.cat([context_RT.flatten(), block_N, without_first(block_N, block_size)])
        angle_NY = position_N.float()[:, None] * frequency_Y
        angle_NE = torch.cat([angle_NY, angle_NY], dim=-1)
        return angle_NE.cos().to(dtype), angle_NE.sin().to(dtype)

    def swiglu(self, product_NJ: Tensor) -> Tensor:
        """As LayerOps."""
        gate_NI, up_NI = _wide(product_NJ).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate_NI) * up_NI).to(product_NJ.dtype)

    def swiglu_backward_onto(self, upstream_NI: Tensor, product_NJ: Tensor) -> SwigluGradient:
        """As LayerOps."""
        upstream, (gate, up) = _wide(upstream_NI), _wide(product_NJ).chunk(2, dim=-1)
        share = torch.sigmoid(gate)
        silu = gate * share
        gradient_NJ = torch.cat([upstream * up * share * (1 + gate * (1 - share)), upstream * silu], dim=-1)
        hidden_NI = upstream_NI.copy_(silu * up)
        return SwigluGradient(product_NJ.copy_(gradient_NJ), hidden_NI)


EAGER_OPS: Final[LayerOps] = EagerOps()


def check_map(delta_MD: Tensor | None, expand: Expand | None, drop: int | None) -> None:
    """Without a delta nothing is written that could have other rows than what is read."""
    assert expand is None or drop is None, "rows are either repeated or left out"
    assert delta_MD is not None or (expand is None and drop is None), "only a sum can have other rows than its input"


def without_first(x_ND: Tensor, drop: int | None) -> Tensor:
    """Rows without slot 0 of each block of `drop` slots; all when that is None."""
    return x_ND if drop is None else x_ND.unflatten(0, (-1, drop))[:, 1:].flatten(0, 1)


def with_first(x_MD: Tensor, drop: int | None) -> Tensor:
    """Rows with zeros for slot 0 of each block of `drop` slots: the gradient of `without_first`."""
    if drop is None:
        return x_MD
    return torch.nn.functional.pad(x_MD.unflatten(0, (-1, drop - 1)), (0, 0, 1, 0)).flatten(0, 1)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _factors(cos_ME: Tensor, sin_ME: Tensor) -> tuple[Tensor, Tensor]:
    """One half of each, over all heads."""
    half = cos_ME.shape[1] // 2
    return _wide(cos_ME)[:, None, :half], _wide(sin_ME)[:, None, :half]


def _norm(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Over the last dimension: x / rms(x), and 1 / rms(x)."""
    x = _wide(x)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * rstd, rstd


def _norm_backward(upstream: Tensor, normed: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight, where normed = x / rms(x) was multiplied by the weight."""
    scaled = upstream * weight
    gradient = rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return gradient, (upstream * normed).flatten(0, -2).sum(0)
