"""The DFlash drafter: Qwen3-style layers whose keys and values also come from the target's context features.

R rows, T context tokens, Q block tokens, D width, C captured layers, H query heads, G key/value heads, E head width.
Attribute names equal the published tensor names. The drafter has no embedding and no head: both are the target's.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from blockdraft.config import ConfigError, DrafterConfig
from blockdraft.models.blocks import check_window


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """Every number of a drafter, resolved; written into the export."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    vocab_size: int
    max_position_embeddings: int
    window: int | None = None
    window_layers: tuple[int, ...] = ()
    causal: bool = False
    """Attend inside a block to earlier slots only."""
    window_causal: bool = False
    """The same in layers with a window only, as published checkpoints with windows run that state no direction."""
    embedding_multiplier: float = 1.0
    """Factor on the target's raw embedding rows, kept so that other clients can apply it."""
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise ConfigError(f"drafter.block_size must be at least 2 (the anchor counts), got {self.block_size}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                "drafter.num_heads must be a multiple of drafter.num_kv_heads, "
                f"got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"drafter.head_dim must be even (rotary embedding), got {self.head_dim}")
        bad = [layer for layer in self.target_layer_ids if not 0 <= layer < self.num_target_layers]
        if bad or not self.target_layer_ids or list(self.target_layer_ids) != sorted(set(self.target_layer_ids)):
            raise ConfigError(
                f"drafter.target_layer_ids must be rising layer numbers in 0..{self.num_target_layers - 1}, "
                f"got {list(self.target_layer_ids)}"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(
                f"drafter.mask_token_id must lie in the target's embedding (0..{self.vocab_size - 1}), "
                f"got {self.mask_token_id}"
            )
        check_window(self.window, self.block_size)
        if (self.window is None) != (not self.window_layers):
            raise ConfigError("drafter.window and drafter.window_layers go together: give both or neither")
        if any(not 0 <= layer < self.num_layers for layer in self.window_layers):
            raise ConfigError(
                f"drafter.window_layers must be drafter layers 0..{self.num_layers - 1}, got {self.window_layers}"
            )
        rising = sorted(set(self.window_layers))
        if list(self.window_layers) != rising:
            # An export says a kind for each layer: it has no order and no repeats to give back.
            raise ConfigError(
                f"drafter.window_layers: expected rising drafter layers, each once, found {list(self.window_layers)}; "
                f"write {' '.join(map(str, rising))}"
            )
        if self.window_causal and (self.causal or self.window is None):
            raise ConfigError("window_causal stands for windowed layers of a drafter that is not causal throughout")

    def is_causal(self, window: int | None) -> bool:
        """Whether layers with that window (None: full layers) attend inside a block to earlier slots only."""
        return self.causal or (self.window_causal and window is not None)


def default_layer_ids(num_target_layers: int, num_captured: int) -> tuple[int, ...]:
    """Evenly spread target layer ids (docs/algorithm.md, section 1); N=36, C=5 gives 1, 9, 17, 25, 33."""
    if num_target_layers < 4:
        raise ConfigError(
            f"the target must have at least 4 layers to choose from, found {num_target_layers}; name layers "
            "with drafter.target_layer_ids"
        )
    if num_captured == 1:
        return (num_target_layers // 2,)
    ids = tuple(round(1 + i * (num_target_layers - 4) / (num_captured - 1)) for i in range(num_captured))
    if len(set(ids)) < num_captured:
        raise ConfigError(
            f"drafter.num_layers: expected at most {num_target_layers - 3} captured layers, one a drafter layer, for a "
            f"target of {num_target_layers} layers, found {num_captured}; lower it, or name that many of 0.."
            f"{num_target_layers - 1} with drafter.target_layer_ids"
        )
    return ids


class TargetFacts(NamedTuple):
    """What a drafter's shape is derived from; `Target.facts` has it."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    is_moe: bool
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    embedding_multiplier: float
    logit_multiplier: float
    logit_softcap: float | None


def derive_shape(config: DrafterConfig, target: TargetFacts, mask_token_id: int) -> DrafterShape:
    """Resolves every default of `config` from the target (docs/algorithm.md, section 2)."""
    width = target.hidden_size
    head_dim = config.head_dim or min(target.head_dim, 128)
    same_heads = head_dim == target.head_dim
    num_heads = config.num_heads or (target.num_heads if same_heads else max(1, width // head_dim))
    # 8 where it divides the heads: 20 heads (a width of 2,560) get 5.
    few = max(count for count in range(1, 9) if num_heads % count == 0)
    num_kv_heads = config.num_kv_heads or (target.num_kv_heads if same_heads else few)
    inner = 3 * width if target.is_moe else target.intermediate_size
    return DrafterShape(
        hidden_size=width,
        num_layers=config.num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=config.intermediate_size or inner,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        block_size=config.block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=config.target_layer_ids or default_layer_ids(target.num_layers, config.num_layers),
        num_target_layers=target.num_layers,
        vocab_size=target.vocab_size,
        max_position_embeddings=target.max_position_embeddings,
        window=config.window,
        window_layers=config.window_layers,
        causal=config.causal,
        embedding_multiplier=target.embedding_multiplier,
        logit_multiplier=target.logit_multiplier,
        logit_softcap=target.logit_softcap,
    )


class Attend(Protocol):
    """How one layer attends: masked SDPA or flex_attention in training, a key/value cache in decoding."""

    def __call__(
        self,
        layer: int,
        query_RHQE: Tensor,
        context_key_RGTE: Tensor,
        context_value_RGTE: Tensor,
        block_key_RGQE: Tensor,
        block_value_RGQE: Tensor,
    ) -> Tensor:
        """Returns [R, H, Q, E]; queries and keys come normed and rotated.

        In training the last layer asks for slots 1..L-1 alone: its queries are A * (L - 1), its block keys A * L.
        """
        ...


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Rotation(NamedTuple):
    """Rotary factors of a set of positions, each [R, 1, N, E]."""

    cos: Tensor
    sin: Tensor


def rotary_frequencies(head_dim: int, theta: float, device: torch.device) -> Tensor:
    """theta ** (-2i / E) for half a head, float32."""
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    return theta**-exponent


def rotation(position_RN: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """Rotary angles over the whole head width: theta ** (-2i / E), computed in float32."""
    angle_RNE = position_RN.float()[..., None] * rotary_frequencies(head_dim, theta, position_RN.device)
    angle_RNE = torch.cat([angle_RNE, angle_RNE], dim=-1)[:, None]
    return Rotation(angle_RNE.cos().to(dtype), angle_RNE.sin().to(dtype))


def rotate(x_RHNE: Tensor, angles: Rotation) -> Tensor:
    """Applies a rotary embedding in the half-split layout."""
    first, second = x_RHNE.chunk(2, dim=-1)
    return x_RHNE * angles.cos + torch.cat([-second, first], dim=-1) * angles.sin


def drop_anchors(x: Tensor, block_size: int | None, dim: int = 1) -> Tensor:
    """Leaves out slot 0 of every block, Q -> A * (L - 1) in `dim`; nothing when `block_size` is None."""
    if block_size is None:
        return x
    drafted: Tensor = x.unflatten(dim, (-1, block_size)).narrow(dim + 1, 1, block_size - 1).flatten(dim, dim + 1)
    return drafted


def asking_slots(query_RHQE: Tensor, block_key_RGQE: Tensor, block_size: int) -> int:
    """How many slots of each block, its last ones, an `Attend` is asked for: all L, or L - 1 without the anchor's."""
    num_slots = query_RHQE.shape[2] * block_size // block_key_RGQE.shape[2]
    assert num_slots >= block_size - 1, "only slot 0 may be left out"
    return num_slots


class DrafterAttention(nn.Module):
    """Queries from the block; keys and values from context features and block through the same projections."""

    def __init__(self, shape: DrafterShape, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def heads(self, x_RNF: Tensor) -> Tensor:
        """[R, N, heads * E] -> [R, N, heads, E]."""
        heads: Tensor = x_RNF.unflatten(-1, (-1, self.head_dim))
        return heads

    def keys_values(self, x_RND: Tensor, angles: Rotation) -> tuple[Tensor, Tensor]:
        """Keys, normed and rotated, and values of a stream, each [R, G, N, E]."""
        key_RGNE = rotate(self.k_norm(self.heads(self.k_proj(x_RND))).transpose(1, 2), angles)
        return key_RGNE, self.heads(self.v_proj(x_RND)).transpose(1, 2)

    def forward(
        self,
        context_RTD: Tensor,
        block_RQD: Tensor,
        context_angles: Rotation,
        block_angles: Rotation,
        attend: Attend,
        drop: int | None,
    ) -> Tensor:
        asking_RQD = drop_anchors(block_RQD, drop)
        asking_angles = Rotation(*(drop_anchors(part, drop, dim=2) for part in block_angles))
        query_RHQE = rotate(self.q_norm(self.heads(self.q_proj(asking_RQD))).transpose(1, 2), asking_angles)
        context_key, context_value = self.keys_values(context_RTD, context_angles)
        block_key, block_value = self.keys_values(block_RQD, block_angles)
        out_RHQE = attend(self.layer, query_RHQE, context_key, context_value, block_key, block_value)
        return self.o_proj(out_RHQE.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class DrafterMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x_RQD: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x_RQD)) * self.up_proj(x_RQD))  # type: ignore[no-any-return]


class DrafterLayer(nn.Module):
    """Pre-norm attention and MLP; context features skip the input norm."""

    def __init__(self, shape: DrafterShape, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = DrafterAttention(shape, layer)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = DrafterMLP(shape)

    def forward(
        self,
        context_RTD: Tensor,
        block_RQD: Tensor,
        context_angles: Rotation,
        block_angles: Rotation,
        attend: Attend,
        drop: int | None = None,
    ) -> Tensor:
        """With `drop` (the block size) slot 0 gives its key and value only: nothing else of it is computed."""
        normed_RQD = self.input_layernorm(block_RQD)
        attended = self.self_attn(context_RTD, normed_RQD, context_angles, block_angles, attend, drop)
        block_RQD = drop_anchors(block_RQD, drop) + attended
        return block_RQD + self.mlp(self.post_attention_layernorm(block_RQD))  # type: ignore[no-any-return]


class Drafter(nn.Module):
    """The trainable part. Weights start at normal(0, 0.02); `calibrate` then sets the scale of the final norm."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.hidden_size
        self.fc = nn.Linear(len(shape.target_layer_ids) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, shape.rms_norm_eps)
        self.layers = nn.ModuleList([DrafterLayer(shape, layer) for layer in range(shape.num_layers)])
        self.norm = RMSNorm(width, shape.rms_norm_eps)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights."""
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.fc.weight.device

    def initialise(self, generator: torch.Generator) -> None:
        """Draws every matrix from normal(0, 0.02) with `generator` (on the CPU, so every device starts alike)."""
        with torch.no_grad():
            for weight in self.parameters():
                if weight.dim() == 2:
                    weight.copy_(torch.empty(weight.shape).normal_(std=0.02, generator=generator))

    def project(self, features_RTC: Tensor) -> Tensor:
        """Context features [R, T, C * D] -> [R, T, D], shared by every layer."""
        return self.hidden_norm(self.fc(features_RTC))  # type: ignore[no-any-return]

    def forward(
        self,
        context_RTD: Tensor,
        context_position_RT: Tensor,
        block_RQD: Tensor,
        block_position_RQ: Tensor,
        attend: Attend,
        *,
        drafted_only: bool = False,
    ) -> Tensor:
        """Runs the layers on block embeddings; returns the final-normed hidden states [R, Q, D].

        With `drafted_only` those of slot 0, which nothing is read off, are left out, [R, A * (L - 1), D]: in the last
        layer it has a key and a value and no more.
        """
        shape = self.shape
        context_angles = rotation(context_position_RT, shape.head_dim, shape.rope_theta, block_RQD.dtype)
        block_angles = rotation(block_position_RQ, shape.head_dim, shape.rope_theta, block_RQD.dtype)
        for number, layer in enumerate(self.layers):
            drop = shape.block_size if drafted_only and number == shape.num_layers - 1 else None
            block_RQD = layer(context_RTD, block_RQD, context_angles, block_angles, attend, drop)
        return self.norm(block_RQD)  # type: ignore[no-any-return]
