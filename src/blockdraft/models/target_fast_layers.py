"""A target's layers read by their structure, as parts of a fast pass: fused products, norms, mixers.

Letters as in models/target_fast_ops.py. Parts of one layer that read the same input become one product; the modules'
own weights become views of the fused ones, so the plain forward goes on working and nothing is stored twice. In float8
the fused weights are copies beside the modules' own.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from blockdraft.models.target_fast_ops import TAPS, Columns, Norm, Ops, Rows, Weight, quantized

LAYER_PARTS = {"mlp", "input_layernorm", "post_attention_layernorm"}
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
ATTENTION_NORMS = {"q_norm", "k_norm"}
DELTA_PARTS = {"conv1d", "norm", "out_proj"}
DELTA_SPLIT = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
DELTA_GROUPED = ("in_proj_qkvz", "in_proj_ba")
FLOAT8_STEP = 16
TUNED_TOKENS = (4, 2048)
"""Documents and tokens of the batch that recurrent kernels choose their settings on."""


Copied = list[nn.Linear] | None
"""None: fused weights are shared with the modules. A list: they are float8 copies, and the list gets the modules."""


class UnknownStructure(Exception):
    """A layer is not of a kind that the fast pass knows; the text says what was found."""


class Batch(NamedTuple):
    """What all layers of one pass share."""

    length: int
    cos_SR: Tensor
    sin_SR: Tensor


class Half(Protocol):
    """Half a layer: takes normed rows and gives the update [N, D], or None where it is in the stream already."""

    def __call__(self, stream_ND: Tensor, rows: Rows, batch: Batch, ops: Ops) -> Tensor | None:
        """Runs it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """Full attention, with norms of heads and a gate where the target has them."""

    inputs: Weight
    output: Weight
    query: Columns
    key: Columns
    value: Columns
    gate: Columns | None
    query_norm: Norm | None
    key_norm: Norm | None
    scale: float
    quantize: bool

    def __call__(self, stream_ND: Tensor, rows: Rows, batch: Batch, ops: Ops) -> Tensor | None:
        """As Half."""
        mixed_NW = ops.product(rows, self.inputs)
        q_NHE = ops.rotate(mixed_NW, self.query, self.query_norm, batch.cos_SR, batch.sin_SR)
        k_NHE = ops.rotate(mixed_NW, self.key, self.key_norm, batch.cos_SR, batch.sin_SR)
        start, width = self.value.offset, self.value.num_heads * self.value.dim
        v_NHE = mixed_NW[:, start : start + width].unflatten(1, (-1, self.value.dim))
        split = (-1, batch.length)
        out_BSHE = ops.attend(
            q_NHE.unflatten(0, split), k_NHE.unflatten(0, split), v_NHE.unflatten(0, split), self.scale
        )
        rows = ops.gate_heads(out_BSHE.flatten(0, 1), mixed_NW, self.gate, self.quantize)
        return ops.product_onto(stream_ND, rows, self.output)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """A Gated-DeltaNet layer's mixer."""

    inputs: Weight
    output: Weight
    conv_CT: Tensor
    query: Columns
    key: Columns
    value: Columns
    gate: Columns
    beta: Columns
    alpha: Columns
    a_log_H: Tensor
    dt_H: Tensor
    norm: Norm
    quantize: bool

    def __call__(self, stream_ND: Tensor, rows: Rows, batch: Batch, ops: Ops) -> Tensor | None:
        """As Half."""
        mixed_NW = ops.product(rows, self.inputs)
        keys = 2 * self.key.num_heads * self.key.dim
        split = (-1, batch.length)
        q_NHE, k_NHE = ops.conv(mixed_NW, self.conv_CT[:keys], (self.query, self.key), batch.length, True)
        (v_NHE,) = ops.conv(mixed_NW, self.conv_CT[keys:], (self.value,), batch.length, False)
        g_NH, beta_NH = ops.decay(mixed_NW, self.beta, self.alpha, self.a_log_H, self.dt_H)
        core_BSHE = ops.delta_rule(*(part.unflatten(0, split) for part in (q_NHE, k_NHE, v_NHE, g_NH, beta_NH)))
        core_NHE = core_BSHE.flatten(0, 1)
        rows = ops.gated_norm(core_NHE, mixed_NW, self.gate, self.norm, self.quantize)
        return ops.product_onto(stream_ND, rows, self.output)

    def tune(self, ops: Ops) -> None:
        """Lets the recurrent kernels choose their settings on a batch of a usual size.

        They choose on their first call, once for any number of tokens; a check on a few tokens would decide for all.
        """
        if self.conv_CT.is_cuda:
            documents, length = TUNED_TOKENS
            sizes = (self.query, self.key, self.value, self.alpha, self.beta)
            q, k, v, g, beta = (self.conv_CT.new_ones(documents, length, one.num_heads, one.dim) for one in sizes)
            ops.delta_rule(q / q.shape[-1], k / k.shape[-1], v, -g[..., 0].float(), 0.5 * beta[..., 0].float())


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedMlp:
    """silu(gate) * up, then down."""

    inputs: Weight
    output: Weight
    quantize: bool

    def __call__(self, stream_ND: Tensor, rows: Rows, batch: Batch, ops: Ops) -> Tensor | None:
        """As Half."""
        return ops.product_onto(stream_ND, ops.swiglu(ops.product(rows, self.inputs), self.quantize), self.output)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnModule:
    """A feed-forward part of another kind, experts for instance: the target's module as it is."""

    module: nn.Module

    def __call__(self, stream_ND: Tensor, rows: Rows, batch: Batch, ops: Ops) -> Tensor | None:
        """As Half."""
        found = self.module(rows.value_NK.unflatten(0, (-1, batch.length)))
        return cast(Tensor, found if isinstance(found, Tensor) else found[0]).flatten(0, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """One decoder layer: norm, mixer, norm, feed-forward part, each on top of the residual stream."""

    device: torch.device
    before_mixer: Norm
    mixer: Half
    before_mlp: Norm
    mlp: Half
    quantize_mixer: bool
    quantize_mlp: bool


def read_layer(layer: nn.Module, copied: Copied) -> Layer:
    """Reads one decoder layer; with a list `copied`, in float8.

    Raises:
        UnknownStructure: it is not built of the parts known here.
    """
    parts = dict(layer.named_children())
    kinds: dict[str, Callable[[nn.Module, Copied], Half]] = {
        "self_attn": read_attention,
        "linear_attn": read_delta_net,
    }
    mixers = parts.keys() & kinds.keys()
    if parts.keys() - kinds.keys() != LAYER_PARTS or len(mixers) != 1 or layer._parameters:
        raise UnknownStructure(f"{type(layer).__name__} has the parts {sorted(parts)}")
    name = mixers.pop()
    mlp, quantize_mlp = read_mlp(parts["mlp"], copied)
    return Layer(
        device=next(layer.parameters()).device,
        before_mixer=read_norm(parts["input_layernorm"]),
        mixer=kinds[name](parts[name], copied),
        before_mlp=read_norm(parts["post_attention_layernorm"]),
        mlp=mlp,
        quantize_mixer=copied is not None,
        quantize_mlp=quantize_mlp,
    )


def read_mlp(module: nn.Module, copied: Copied) -> tuple[Half, bool]:
    """The fused form of a gated feed-forward part, or the module itself where it is something else."""
    parts = dict(module.named_children())
    if parts.keys() != MLP_PARTS or module._parameters or not _is_silu(parts["act_fn"]):
        return OwnModule(module=module), False
    inputs = fuse([parts["gate_proj"], parts["up_proj"]], copied)
    return GatedMlp(
        inputs=inputs, output=fuse([parts["down_proj"]], copied), quantize=copied is not None
    ), copied is not None


@torch.no_grad()
def _is_silu(activation: nn.Module) -> bool:
    probe = torch.linspace(-6.0, 6.0, 25)
    return not activation._parameters and torch.allclose(activation(probe), nn.functional.silu(probe), atol=1e-6)


def read_attention(module: nn.Module, copied: Copied) -> Attention:
    """Reads an attention part.

    Raises:
        UnknownStructure: it has other parts, parameters of its own, or no head width and scale.
    """
    parts, values = dict(module.named_children()), vars(module)
    known = ATTENTION_PARTS, ATTENTION_PARTS | ATTENTION_NORMS
    if parts.keys() not in known or module._parameters or not {"head_dim", "scaling"} <= values.keys():
        raise UnknownStructure(f"{type(module).__name__} has the parts {sorted([*parts, *module._parameters])}")
    dim: int = values["head_dim"]
    queries, keys = (outputs(parts[name]) for name in ("q_proj", "k_proj"))
    heads, key_heads = inputs_of(parts["o_proj"]) // dim, keys // dim
    if queries not in (heads * dim, 2 * heads * dim):
        raise UnknownStructure(f"{type(module).__name__}: q_proj has {queries} outputs for {heads} heads of {dim}")
    has_gate = queries == 2 * heads * dim
    step = 2 * dim if has_gate else dim
    has_norms = "q_norm" in parts
    return Attention(
        inputs=fuse([parts["q_proj"], parts["k_proj"], parts["v_proj"]], copied),
        output=fuse([parts["o_proj"]], copied),
        query=Columns(heads, dim, 0, 1, step),
        key=Columns(key_heads, dim, queries, 1, dim),
        value=Columns(key_heads, dim, queries + keys, 1, dim),
        gate=Columns(heads, dim, dim, 1, step) if has_gate else None,
        query_norm=read_norm(parts["q_norm"]) if has_norms else None,
        key_norm=read_norm(parts["k_norm"]) if has_norms else None,
        scale=float(values["scaling"]),
        quantize=copied is not None,
    )


def read_delta_net(module: nn.Module, copied: Copied) -> DeltaNet:
    """Reads a Gated-DeltaNet part, in the layout of Qwen3.5 (sections) or of Qwen3-Next (groups of heads).

    Raises:
        UnknownStructure: it has other parts.
    """
    parts, values = dict(module.named_children()), vars(module)
    names = parts.keys() - DELTA_PARTS
    sizes = ("num_v_heads", "num_k_heads", "head_k_dim", "head_v_dim")
    own = {"dt_bias", "A_log"}
    if names not in (set(DELTA_SPLIT), set(DELTA_GROUPED)) or module._parameters.keys() != own:
        raise UnknownStructure(f"{type(module).__name__} has the parts {sorted([*parts, *module._parameters])}")
    if not parts.keys() >= DELTA_PARTS or not set(sizes) <= values.keys():
        raise UnknownStructure(f"{type(module).__name__} lacks one of {sorted(DELTA_PARTS)}, {sizes}")
    num_v, num_k, dim_k, dim_v = (int(values[size]) for size in sizes)
    conv = parts["conv1d"]
    is_known = isinstance(conv, nn.Conv1d) and conv.bias is None and conv.kernel_size == (TAPS,)
    if not is_known or values["activation"] not in ("silu", "swish"):
        raise UnknownStructure(f"{type(module).__name__}: expected a convolution of {TAPS} taps, no bias and silu")
    grouped = names == set(DELTA_GROUPED)
    layout = grouped_columns if grouped else section_columns
    query, key, value, gate, beta, alpha = layout(num_v, num_k, dim_k, dim_v)
    dt, a_log = (cast(Tensor, module._parameters[name]).detach().float() for name in ("dt_bias", "A_log"))
    return DeltaNet(
        inputs=fuse([parts[name] for name in (DELTA_GROUPED if grouped else DELTA_SPLIT)], copied),
        output=fuse([parts["out_proj"]], copied),
        conv_CT=cast(nn.Conv1d, conv).weight.detach().squeeze(1),
        query=query,
        key=key,
        value=value,
        gate=gate,
        beta=beta,
        alpha=alpha,
        a_log_H=a_log,
        dt_H=dt,
        norm=read_norm(parts["norm"]),
        quantize=copied is not None,
    )


def section_columns(num_v: int, num_k: int, dim_k: int, dim_v: int) -> tuple[Columns, ...]:
    """Query, key, value, gate, beta, alpha one after the other (Qwen3.5)."""
    keys, values = num_k * dim_k, num_v * dim_v
    ends = 2 * keys + 2 * values
    return (
        Columns(num_k, dim_k, 0, 1, dim_k),
        Columns(num_k, dim_k, keys, 1, dim_k),
        Columns(num_v, dim_v, 2 * keys, 1, dim_v),
        Columns(num_v, dim_v, 2 * keys + values, 1, dim_v),
        Columns(num_v, 1, ends, 1, 1),
        Columns(num_v, 1, ends + num_v, 1, 1),
    )


def grouped_columns(num_v: int, num_k: int, dim_k: int, dim_v: int) -> tuple[Columns, ...]:
    """For each key head its query, key, values and gates; then for each key head its betas and alphas (Qwen3-Next)."""
    share = num_v // num_k
    step = 2 * dim_k + 2 * share * dim_v
    ends = num_k * step
    return (
        Columns(num_k, dim_k, 0, 1, step),
        Columns(num_k, dim_k, dim_k, 1, step),
        Columns(num_v, dim_v, 2 * dim_k, share, step),
        Columns(num_v, dim_v, 2 * dim_k + share * dim_v, share, step),
        Columns(num_v, 1, ends, share, 2 * share),
        Columns(num_v, 1, ends + share, share, 2 * share),
    )


@torch.no_grad()
def read_norm(module: nn.Module) -> Norm:
    """The numbers of an RMS norm; which convention it follows (w, or 1 + w) is measured.

    Raises:
        UnknownStructure: it is no RMS norm.
    """
    values, weights = vars(module), module._parameters
    eps = values.get("variance_epsilon", values.get("eps"))
    own_D = weights.get("weight")
    if weights.keys() != {"weight"} or own_D is None or own_D.dim() != 1 or not isinstance(eps, float):
        raise UnknownStructure(f"{type(module).__name__} is no RMS norm with one weight a channel")
    weight_D = own_D.detach().float()
    # A pattern without a zero mean, so that a layer norm would be noticed.
    probe_1D = 1.5 + torch.arange(len(weight_D), device=weight_D.device).remainder(7)[None] / 7.0
    bare_1D = probe_1D * torch.rsqrt(probe_1D.square().mean(-1, keepdim=True) + eps)
    found_1D = _call_norm(module, probe_1D.to(own_D.dtype)).float()
    for scale_D in (weight_D, 1.0 + weight_D):
        if torch.allclose(found_1D, bare_1D * scale_D, rtol=2e-2, atol=1e-3):
            return Norm(scale_D.contiguous(), eps)
    raise UnknownStructure(f"{type(module).__name__} computes neither of the two known RMS norms")


def _call_norm(module: nn.Module, probe_1D: Tensor) -> Tensor:
    """A gated norm gets a gate of which silu is 1."""
    call: Callable[..., Any] = module
    gate_at_one = 1.2784645
    if "gate" in inspect.signature(module.forward).parameters:
        return cast(Tensor, call(probe_1D, torch.full_like(probe_1D, gate_at_one)))
    return cast(Tensor, call(probe_1D))


@torch.no_grad()
def fuse(modules: list[nn.Module], copied: Copied) -> Weight:
    """One product for several that read the same input.

    Raises:
        UnknownStructure: one of them is not a plain linear layer.
    """
    for module in modules:
        if type(module) is not nn.Linear:
            raise UnknownStructure(f"a projection is {type(module).__name__}, not a plain linear layer")
    linears = cast(list[nn.Linear], modules)
    weights: list[Tensor] = [part.weight.detach() for part in linears]
    whole_MK = weights[0] if len(linears) == 1 else torch.cat(weights)
    bias_M = None
    if any(part.bias is not None for part in linears):
        pieces: list[Tensor] = [
            own.new_zeros(len(own)) if part.bias is None else part.bias
            for own, part in zip(weights, linears, strict=True)
        ]
        bias_M = torch.cat(pieces).detach()
    if copied is not None:
        copied.extend(linears)
        return _float8_weight(whole_MK, bias_M)
    start = 0
    for part in linears if len(linears) > 1 else ():
        # The module reads the fused weights from now on, and its own storage is freed.
        part.weight.data = whole_MK[start : start + len(part.weight)]
        start += len(part.weight)
    return Weight(whole_MK, bias_M, None)


def _float8_weight(weight_MK: Tensor, bias_M: Tensor | None) -> Weight:
    """Rounds weights to float8; outputs are filled up to a multiple of 16, which nobody reads."""
    num_outputs, width = weight_MK.shape
    if width % FLOAT8_STEP:
        raise UnknownStructure(f"a product of {width} inputs, where float8 needs a multiple of {FLOAT8_STEP}")
    missing = -num_outputs % FLOAT8_STEP
    value_MK, scale_M1 = quantized(nn.functional.pad(weight_MK, (0, 0, 0, missing)))
    assert scale_M1 is not None
    return Weight(value_MK, None if bias_M is None else nn.functional.pad(bias_M, (0, missing)), scale_M1.flatten())


def outputs(module: nn.Module) -> int:
    """Outputs of a linear layer."""
    if not isinstance(module, nn.Linear):
        raise UnknownStructure(f"a projection is {type(module).__name__}, not a linear layer")
    return module.out_features


def inputs_of(module: nn.Module) -> int:
    """Inputs of a linear layer."""
    if not isinstance(module, nn.Linear):
        raise UnknownStructure(f"a projection is {type(module).__name__}, not a linear layer")
    return module.in_features
