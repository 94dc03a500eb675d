"""The drafter in training without a compiler: matrix products, and between them the operations of models/layer_ops.py.

A layer is two autograd Functions with the attention between them, so that gradients reach the weights half a layer at a
time, while the rest of the backward still runs. Kept for the backward are products, what the attention keeps, and the
residual stream before each norm; normed states and the MLP's product are made again where the backward needs them.
Residual sums that are due go into the norm that follows. Weights that meet the same rows are one matrix
(models/joined_weights.py), and what their products' gradients are lies side by side: one product in place of three, and
the sum over them is its own.

R rows, T context tokens, C features of each, U = R * T rows of context; A anchors, L block size; N rows of a layer's
input: R * A * L, in the first layer R * (A + 1) (`blocks.first_tokens`: the others are repetitions); M rows of its
output, in the last layer without slot 0; D width, F = heads * head width, G = key/value heads * head width, I inner
width, E head width; J = 2 G (keys and values) or 2 I (gate and up), X = F + 2 G, or 2 G where queries have other rows.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from blockdraft.models.drafter import Attend, Drafter, DrafterLayer, Rotation, rotary_frequencies
from blockdraft.models.joined_weights import join_layers, joined
from blockdraft.models.layer_ops import EAGER_OPS, Expand, LayerOps


class Rows(NamedTuple):
    """Which rows a layer reads and makes, and the rotary factors of each stream, [rows, E]."""

    expand: Expand | None
    """The first layer's: keys and values of every slot."""
    expand_asking: Expand | None
    """The same for queries and everything behind them: where it is the last layer too, without slot 0."""
    drop: int | None
    """The last layer's block size, unless it is the first too: slot 0 of each block is left out behind the keys."""
    asking: Rotation
    block: Rotation
    context: Rotation


class Settings(NamedTuple):
    """Of a layer's Functions, beside tensors that need gradients."""

    ops: LayerOps
    eps: float
    rows: Rows


class Entered(NamedTuple):
    """What `_Enter` makes of a layer's input, before the attention."""

    total_ND: Tensor
    """The residual stream, without a gradient: it has rows that `residual_MD` has not, or the reverse."""
    residual_MD: Tensor
    """No numbers: takes the gradient of the residual stream behind the attention, row by row of the output."""
    query_MF: Tensor
    context_key_UG: Tensor
    context_value_UG: Tensor
    block_key_QG: Tensor
    block_value_QG: Tensor
    context_UD: Tensor
    """As it came: its gradient goes through all layers, each adding to it in place."""


class KernelDrafter:
    """The whole drafter on a pass's features and the embeddings of its blocks; a RunDrafter (models/compiled.py)."""

    def __init__(self, drafter: Drafter, ops: LayerOps | None = None) -> None:
        """`ops`: those of the drafter's device unless told otherwise."""
        self.drafter = drafter
        join_layers(drafter)
        self.ops = choose_ops(drafter.device) if ops is None else ops
        shape = drafter.shape
        self.frequency_Y = rotary_frequencies(shape.head_dim, shape.rope_theta, drafter.device)

    def __call__(
        self,
        features_RTC: Tensor,
        context_position_RT: Tensor,
        first_RAD: Tensor,
        block_position_RQ: Tensor,
        attend: Attend,
    ) -> Tensor:
        """Returns the final-normed hidden states of slots 1..L-1, [R, A * (L - 1), D]."""
        drafter, num_rows = self.drafter, len(first_RAD)
        check_current(drafter.device)
        context_UD = self._project(features_RTC.to(drafter.dtype).flatten(0, 1))
        total, delta = first_RAD.flatten(0, 1), None
        all_rows = self._rows(first_RAD, context_position_RT, block_position_RQ)
        for number, (layer, rows) in enumerate(zip(drafter.layers, all_rows, strict=True)):
            assert isinstance(layer, DrafterLayer)
            settings = Settings(self.ops, layer.input_layernorm.eps, rows)
            entered = _enter(layer, settings, total, delta, context_UD)
            context_UD = entered.context_UD
            heads = (stream.unflatten(0, (num_rows, -1)) for stream in entered[2:7])
            width = drafter.shape.head_dim
            out_RHME = attend(number, *(stream.unflatten(-1, (-1, width)).transpose(1, 2) for stream in heads))
            attended_MF = out_RHME.transpose(1, 2).flatten(2).flatten(0, 1)
            total, delta = _leave(layer, settings, entered, attended_MF)
        hidden_RMD: Tensor = self._norm(total, delta).unflatten(0, (num_rows, -1))
        return hidden_RMD

    def _project(self, features_UC: Tensor) -> Tensor:
        norm, weight = self.drafter.hidden_norm, self.drafter.fc.weight
        context_UD: Tensor = _Project.apply(self.ops, norm.eps, features_UC, weight, norm.weight)  # type: ignore[no-untyped-call]
        return context_UD

    def _norm(self, total_MD: Tensor, delta_MD: Tensor | None) -> Tensor:
        norm = self.drafter.norm
        hidden_MD: Tensor = _FinalNorm.apply(self.ops, norm.eps, total_MD, delta_MD, norm.weight)  # type: ignore[no-untyped-call]
        return hidden_MD

    def _rows(self, first_RAD: Tensor, context_position_RT: Tensor, block_position_RQ: Tensor) -> list[Rows]:
        """Of each layer."""
        shape, num_anchors = self.drafter.shape, first_RAD.shape[1] - 1
        num_layers, length, num_context = shape.num_layers, shape.block_size, context_position_RT.numel()
        cos, sin = self.ops.rotary(context_position_RT, block_position_RQ, self.frequency_Y, length, self.drafter.dtype)
        ends = (num_context, num_context + block_position_RQ.numel())
        context, block, drafted = (Rotation(*both) for both in zip(_cut(cos, ends), _cut(sin, ends), strict=True))
        rows = [Rows(None, None, None, block, block, context) for _ in range(num_layers)]
        rows[-1] = rows[-1]._replace(asking=drafted, drop=length)
        whole = Expand(num_anchors, length)
        asking = whole._replace(first_slot=1) if num_layers == 1 else whole
        rows[0] = rows[0]._replace(expand=whole, expand_asking=asking, drop=None)
        return rows


def _cut(rows: Tensor, ends: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    return rows[: ends[0]], rows[ends[0] : ends[1]], rows[ends[1] :]


def check_current(device: torch.device) -> None:
    """Kernels that are not torch's own start on the thread's current device, whatever device their tensors lie on.

    Raises:
        RuntimeError: another one is current.
    """
    if device.type == "cuda" and torch.cuda.current_device() != device.index:
        raise RuntimeError(
            f"the drafter lies on {device}, and this thread's current device is cuda:{torch.cuda.current_device()}: "
            f"call torch.cuda.set_device({device.index}) in the thread first"
        )


def choose_ops(device: torch.device) -> LayerOps:
    """One pass over memory for each operation on a GPU, the plain operations elsewhere."""
    if device.type != "cuda":
        return EAGER_OPS
    # Only GPUs have Triton.
    from blockdraft.models.layer_triton import TRITON_OPS

    return TRITON_OPS


def _enter(layer: DrafterLayer, settings: Settings, total: Tensor, delta: Tensor | None, context_UD: Tensor) -> Entered:
    attention = layer.self_attn
    made = _Enter.apply(  # type: ignore[no-untyped-call]
        settings, total, delta, context_UD, layer.input_layernorm.weight,
        attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight,
        attention.q_norm.weight, attention.k_norm.weight,
    )  # fmt: skip
    return Entered(*made)


def _leave(layer: DrafterLayer, settings: Settings, entered: Entered, attended_MF: Tensor) -> tuple[Tensor, Tensor]:
    """The residual stream behind the attention, and what the MLP adds to it: the next norm does."""
    mlp = layer.mlp
    total_MD, delta_MD = _Leave.apply(  # type: ignore[no-untyped-call]
        settings, entered.total_ND, entered.residual_MD, attended_MF, layer.self_attn.o_proj.weight,
        layer.post_attention_layernorm.weight, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight,
    )  # fmt: skip
    return total_MD, delta_MD


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(x, weight.t())


def _asking(ops: LayerOps, x_ND: Tensor, drop: int | None) -> Tensor:
    """The rows that queries are made of."""
    return x_ND if drop is None else ops.take_drafted(x_ND, drop)


class _Project(Function):
    """Features to what every layer's context is: product and norm. The features get no gradient."""

    @staticmethod
    def forward(
        ctx: Any, ops: LayerOps, eps: float, features_UC: Tensor, weight: Tensor, norm_weight: Tensor
    ) -> Tensor:
        made = ops.add_norm(_linear(features_UC, weight), None, norm_weight, eps)
        ctx.ops = ops
        ctx.save_for_backward(features_UC, made.total_ND, made.rstd_N, norm_weight)
        return made.normed_ND

    @staticmethod
    def backward(ctx: Any, upstream_UD: Tensor) -> tuple[Tensor | None, ...]:
        features_UC, total_UD, rstd_U, norm_weight = ctx.saved_tensors
        found = ctx.ops.norm_backward(upstream_UD.contiguous(), total_UD, rstd_U, norm_weight, None, wants_normed=False)
        return None, None, None, torch.mm(found.total_ND.t(), features_UC), found.weight_D


class _FinalNorm(Function):
    """The last residual sum and its norm."""

    @staticmethod
    def forward(ctx: Any, ops: LayerOps, eps: float, total_MD: Tensor, delta_MD: Tensor, weight: Tensor) -> Tensor:
        made = ops.add_norm(total_MD, delta_MD, weight, eps)
        ctx.ops = ops
        ctx.save_for_backward(made.total_ND, made.rstd_N, weight)
        return made.normed_ND

    @staticmethod
    def backward(ctx: Any, upstream_MD: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.ops.norm_backward(upstream_MD.contiguous(), *ctx.saved_tensors, None, wants_normed=False)
        return None, None, found.total_ND, found.total_ND, found.weight_D


class _Enter(Function):
    """Residual sum, norm, the products behind it, head norms and rotation: `Entered`."""

    @staticmethod
    def forward(
        ctx: Any,
        settings: Settings,
        x_ND: Tensor,
        delta_ND: Tensor | None,
        context_UD: Tensor,
        norm_weight: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        value_weight: Tensor,
        query_norm: Tensor,
        key_norm: Tensor,
    ) -> tuple[Tensor, ...]:
        (ops, eps, rows), keys = settings, (key_norm, settings.eps)
        total_ND, normed_ND, rstd_N = ops.add_norm(x_ND, delta_ND, norm_weight, eps)
        query_NF = _linear(_asking(ops, normed_ND, rows.drop), query_weight)
        key_NG, value_NG = _linear(normed_ND, key_weight), _linear(normed_ND, value_weight)
        context_key_UG, context_value_UG = _linear(context_UD, key_weight), _linear(context_UD, value_weight)
        made = (
            ops.rotate_heads(query_NF, query_norm, eps, *rows.asking, rows.expand_asking),
            ops.rotate_heads(context_key_UG, *keys, *rows.context),
            context_value_UG,
            ops.rotate_heads(key_NG, *keys, *rows.block, rows.expand),
            value_NG if rows.expand is None else ops.expand_rows(value_NG, rows.expand),
        )
        weights = (norm_weight, query_weight, key_weight, value_weight, query_norm, key_norm)
        ctx.settings = settings
        ctx.save_for_backward(total_ND, rstd_N, context_UD, query_NF, key_NG, context_key_UG, *weights)
        ctx.mark_non_differentiable(total_ND)
        ctx.set_materialize_grads(False)
        residual_MD = total_ND.new_empty(()).expand(len(made[0]), total_ND.shape[1])
        return total_ND, residual_MD, *made, context_UD

    @staticmethod
    def backward(
        ctx: Any,
        _total: None,
        residual_MD: Tensor,
        query_MF: Tensor,
        context_key_UG: Tensor,
        context_value_UG: Tensor,
        block_key_QG: Tensor,
        block_value_QG: Tensor,
        context_UD: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Names of gradients are those of the outputs; of the products behind them, with `d_`."""
        ops, eps, rows = ctx.settings
        total_ND, rstd_N, known_UD, query_NF, key_NG, product_UG, *weights = ctx.saved_tensors
        norm_weight, query_weight, key_weight, value_weight, query_norm, key_norm = weights
        keys_JD, (num_query, num_key) = joined(key_weight, value_weight), (len(query_weight), len(key_weight))
        # Queries of other rows than the keys' have a product of their own.
        is_alike = rows.drop is None
        asked = num_query if is_alike else 0
        d_NX = total_ND.new_empty(len(total_ND), asked + 2 * num_key)
        d_UJ = known_UD.new_empty(len(known_UD), 2 * num_key)
        d_query = ops.rotate_heads_backward(
            query_MF.contiguous(), query_NF, query_norm, eps, *rows.asking, rows.expand_asking,
            d_NX[:, :asked] if is_alike else None,
        )  # fmt: skip
        known = (key_norm, eps, *rows.context, None, d_UJ[:, :num_key])
        d_known = ops.rotate_heads_backward(context_key_UG.contiguous(), product_UG, *known)
        own = (key_norm, eps, *rows.block, rows.expand, d_NX[:, asked : asked + num_key])
        d_key = ops.rotate_heads_backward(block_key_QG.contiguous(), key_NG, *own)
        ops.sum_rows_onto(d_UJ[:, num_key:], context_value_UG.contiguous(), None)
        ops.sum_rows_onto(d_NX[:, asked + num_key :], block_value_QG.contiguous(), rows.expand)
        normed_ND = torch.mm(d_NX, joined(query_weight, key_weight, value_weight) if is_alike else keys_JD)
        if rows.drop is not None:
            ops.add_drafted(normed_ND, torch.mm(d_query.x_NF, query_weight), rows.drop)
        is_first = not ctx.needs_input_grad[1]
        found = ops.norm_backward(
            normed_ND, total_ND, rstd_N, norm_weight, None if is_first else residual_MD.contiguous(),
            wants_normed=True, drop=rows.drop,
        )  # fmt: skip
        assert found.normed_ND is not None
        # In place: the layer behind made this gradient for this one alone.
        context_UD = torch.mm(d_UJ, keys_JD) if context_UD is None else context_UD.addmm_(d_UJ, keys_JD)
        d_weight_XD = torch.mm(d_NX.t(), found.normed_ND)
        d_keys_JD = d_weight_XD[asked:].addmm_(d_UJ.t(), known_UD)
        d_queries_FD = d_weight_XD[:asked]
        if rows.drop is not None:
            d_queries_FD = torch.mm(d_query.x_NF.t(), ops.take_drafted(found.normed_ND, rows.drop))
        through = None if is_first else found.total_ND
        return (
            None,
            through,
            through if ctx.needs_input_grad[2] else None,
            context_UD,
            found.weight_D,
            d_queries_FD,
            d_keys_JD[:num_key],
            d_keys_JD[num_key:],
            d_query.weight_E,
            d_key.weight_E + d_known.weight_E,
        )


class _Leave(Function):
    """Output projection, residual sum, norm and MLP: the sum, and what the MLP adds to it."""

    @staticmethod
    def forward(
        ctx: Any,
        settings: Settings,
        total_ND: Tensor,
        residual_MD: Tensor,
        attended_MF: Tensor,
        out_weight: Tensor,
        norm_weight: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
    ) -> tuple[Tensor, Tensor]:
        (ops, eps, rows), out_MD = settings, _linear(attended_MF, out_weight)
        total_MD, normed_MD, rstd_M = ops.add_norm(total_ND, out_MD, norm_weight, eps, rows.expand_asking, rows.drop)
        del out_MD
        product_MJ = _linear(normed_MD, joined(gate_weight, up_weight))
        delta_MD = _linear(ops.swiglu(product_MJ), down_weight)
        weights = (out_weight, norm_weight, gate_weight, up_weight, down_weight)
        ctx.ops = ops
        ctx.save_for_backward(attended_MF, total_MD, rstd_M, *weights)
        # Not among the saved: it is the largest, and its gradient is written over it.
        ctx.products = [product_MJ]
        return total_MD, delta_MD

    @staticmethod
    def backward(ctx: Any, total_MD: Tensor, delta_MD: Tensor) -> tuple[Tensor | None, ...]:
        """Names of gradients are those of the outputs; of what is inside, with `d_`."""
        ops: LayerOps = ctx.ops
        attended_MF, sum_MD, rstd_M, *weights = ctx.saved_tensors
        out_weight, norm_weight, gate_weight, up_weight, down_weight = weights
        assert ctx.products, "a second backward: the first one's gradient lies over what it would read"
        upstream_MI = torch.mm(delta_MD, down_weight)
        d_product_MJ, hidden_MI = ops.swiglu_backward_onto(upstream_MI, ctx.products.pop())
        d_down = torch.mm(delta_MD.t(), hidden_MI)
        del upstream_MI, hidden_MI
        d_normed_MD = torch.mm(d_product_MJ, joined(gate_weight, up_weight))
        found = ops.norm_backward(d_normed_MD, sum_MD, rstd_M, norm_weight, total_MD, wants_normed=True)
        del d_normed_MD
        assert found.normed_ND is not None
        d_joined_JD = torch.mm(d_product_MJ.t(), found.normed_ND)
        return (
            None,
            None,
            found.total_ND,
            torch.mm(found.total_ND, out_weight),
            torch.mm(found.total_ND.t(), attended_MF),
            found.weight_D,
            d_joined_JD[: len(gate_weight)],
            d_joined_JD[len(gate_weight) :],
            d_down,
        )
