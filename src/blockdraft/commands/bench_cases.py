"""What `bench` and the side-by-side runs measure: shapes, random data, the drafter's step, and the work it has to do.

R rows (1 here), T context tokens, A anchors, L block size, S = L - 1 drafted slots, Q = A * L block tokens, D width,
C captured layers, N = A * S drafted rows, V ids of the head, H heads, G key/value heads, E head width.
"""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from blockdraft.data.anchors import default_gamma, position_weights
from blockdraft.models.attention import bare_flex_attend, compile_flex, flex_attend, sdpa_attend
from blockdraft.models.blocks import block_positions, first_tokens
from blockdraft.models.compiled import How, compile_drafter
from blockdraft.models.drafter import Drafter, DrafterShape
from blockdraft.models.ends import Ends
from blockdraft.training.head_kl import choose_slot_kl
from blockdraft.training.head_loss import (
    Between,
    ScaleRows,
    between_eager,
    choose_slot_loss,
    head_loss,
    scale_rows_eager,
)
from blockdraft.training.loss import SlotLoss, dpace_weights, slot_loss, weighted_loss
from blockdraft.training.step import MakeAttend

Loss = Literal["triton", "inductor", "eager", "reference"]


def presets() -> dict[str, DrafterShape]:
    """Shapes by name."""
    large = DrafterShape(
        hidden_size=4096,
        num_layers=5,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=12288,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        block_size=16,
        mask_token_id=151669,
        target_layer_ids=(1, 9, 17, 25, 33),
        num_target_layers=36,
        vocab_size=151936,
        max_position_embeddings=40960,
    )
    larger: dict[str, Any] = {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "vocab_size": 248320,
        "mask_token_id": 248070,
    }
    largest: dict[str, Any] = {"target_layer_ids": (1, 16, 31, 46, 61), "num_target_layers": 64, "rope_theta": 1e7}
    windows: dict[str, Any] = {"window": 2048, "window_layers": (0, 1, 2, 3)}
    small: dict[str, Any] = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    tiny: dict[str, Any] = {
        "intermediate_size": 96,
        "vocab_size": 512,
        "mask_token_id": 500,
        "target_layer_ids": (1, 2, 3),
    }
    return {
        "qwen3-8b": large,
        "qwen3.6-27b": replace(large, **larger, **largest),
        "qwen3.6-27b-windows": replace(large, **larger, **largest, **windows),
        "tiny": replace(large, **small, **tiny),
    }


class Problem(NamedTuple):
    """Random weights of a target's ends, random features, one document, an all-ones loss mask."""

    shape: DrafterShape
    ends: Ends
    features_RTC: Tensor
    document_RT: Tensor
    position_RT: Tensor
    anchor_RA: Tensor
    first_RAD: Tensor
    label_N: Tensor
    weight_N: Tensor
    loss_mask_RT: Tensor
    input_ids_RT: Tensor


def make_problem(
    shape: DrafterShape, num_tokens: int, num_anchors: int, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> Problem:
    """Everything but the drafter, made on the device."""
    torch.manual_seed(seed)
    width, length = shape.hidden_size, shape.block_size
    with torch.device(device):
        embedding = nn.Embedding(shape.vocab_size, width, dtype=dtype)
        embedding.weight.data.mul_(0.02)
        head_VD = torch.randn(shape.vocab_size, width, dtype=dtype) * 0.02
        ids_RT = torch.randint(shape.vocab_size, (1, num_tokens))
        anchor_RA = torch.randperm(num_tokens - 1)[:num_anchors].sort().values[None]
        position_RT = torch.arange(num_tokens)[None]
        features_RTC = torch.randn(1, num_tokens, len(shape.target_layer_ids) * width, dtype=dtype)
        index_AS = anchor_RA[0, :, None] + torch.arange(1, length)
        weight_S = torch.from_numpy(position_weights(length, default_gamma(length))[1:].copy()).to(device)
    ends = Ends(embedding, head_VD)
    return Problem(
        shape=shape,
        ends=ends,
        features_RTC=features_RTC,
        document_RT=torch.zeros_like(position_RT),
        position_RT=position_RT,
        anchor_RA=anchor_RA,
        first_RAD=ends.embed(first_tokens(ids_RT, anchor_RA, shape.mask_token_id)),
        label_N=ids_RT[0, index_AS.clamp(max=num_tokens - 1)].flatten(),
        weight_N=(weight_S * (index_AS < num_tokens)).flatten(),
        loss_mask_RT=torch.ones(1, num_tokens, device=device),
        input_ids_RT=ids_RT,
    )


def make_drafter(shape: DrafterShape, device: torch.device, dtype: torch.dtype) -> Drafter:
    """A drafter with random weights, made on the device."""
    with torch.device(device):
        drafter = Drafter(shape).to(dtype)
    with torch.no_grad():
        for weight in drafter.parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.02)
    return drafter


Attention = Literal["own", "flex", "sdpa"]


def choose_make_attend(attention: Attention, how: How) -> MakeAttend:
    """`own` and `flex` need a GPU; flex_attention is compiled by itself where nothing around it is."""
    if attention == "sdpa":
        return sdpa_attend
    if attention == "own":
        # Only GPUs have Triton.
        from blockdraft.models.block_attention import kernel_attend

        return kernel_attend
    return bare_flex_attend if how in ("stack", "layer") else functools.partial(flex_attend, compiled=compile_flex())


def stack_step(problem: Problem, drafter: Drafter, how: How, attention: Attention) -> Callable[[], Tensor]:
    """The drafter's forward, mask included: hidden states of the drafted slots, [N, D]."""
    run, make_attend = compile_drafter(drafter, how), choose_make_attend(attention, how)

    def forward() -> Tensor:
        attend = make_attend(problem.shape, problem.document_RT, problem.position_RT, problem.anchor_RA)
        block_position_RQ = block_positions(problem.position_RT, problem.anchor_RA, problem.shape.block_size)
        numbers = (problem.features_RTC, problem.position_RT, problem.first_RAD, block_position_RQ)
        return run(*numbers, attend).flatten(0, 1)

    return forward


def choose_between(loss: Loss) -> Between:
    """The stage between the loss's two products."""
    if loss == "triton":
        from blockdraft.training.head_loss_triton import between_triton

        return between_triton
    return torch.compile(between_eager, dynamic=False, fullgraph=True) if loss == "inductor" else between_eager


def choose_scale_rows(loss: Loss) -> ScaleRows:
    """The loss's backward, which Inductor leaves as it is."""
    if loss == "triton":
        from blockdraft.training.head_loss_triton import scale_rows_triton

        return scale_rows_triton
    return scale_rows_eager


def loss_step(problem: Problem, loss: Loss, chunk_rows: int) -> Callable[[Tensor], Tensor]:
    """The loss of drafted hidden states."""
    between, scale_rows = choose_between(loss), choose_scale_rows(loss)
    denominator = float(problem.weight_N.sum())

    def run(hidden_ND: Tensor) -> Tensor:
        found: SlotLoss
        if loss == "reference":
            found = slot_loss(hidden_ND, problem.label_N, problem.ends, chunk_rows)
        else:
            found = head_loss(hidden_ND, problem.label_N, problem.ends, chunk_rows, between, scale_rows)
        return weighted_loss(found.ce_N, problem.weight_N, denominator)

    return run


Objective = Literal["ce", "dpace", "kl"]


def objective_step(problem: Problem, objective: Objective, chunk_rows: int) -> Callable[[Tensor], Tensor]:
    """The loss of drafted hidden states as the training step makes it."""
    device, weight_N = problem.features_RTC.device, problem.weight_N
    lose_ce, lose_kl = choose_slot_loss(device), choose_slot_kl(device)
    denominator = float(weight_N.sum())
    final_ND = (
        torch.randn(len(problem.label_N), problem.shape.hidden_size, device=device) if objective == "kl" else None
    )

    def run(hidden_ND: Tensor) -> Tensor:
        if final_ND is not None:
            kl_N = lose_kl(hidden_ND, final_ND.to(hidden_ND.dtype), problem.ends, chunk_rows).kl_N
            return weighted_loss(kl_N, weight_N, denominator)
        ce_N = lose_ce(hidden_ND, problem.label_N, problem.ends, chunk_rows).ce_N
        if objective == "ce":
            return weighted_loss(ce_N, weight_N, denominator)
        by_block = (1, problem.anchor_RA.shape[1], -1)
        ce_RAS, is_supervised_RAS = ce_N.view(by_block), (weight_N > 0).view(by_block)
        return weighted_loss(ce_RAS, dpace_weights(ce_RAS, is_supervised_RAS), float(is_supervised_RAS.sum()))

    return run


def whole_step(
    drafter: Drafter, forward: Callable[[], Tensor], lose: Callable[[Tensor], Tensor]
) -> Callable[[], Tensor]:
    """Forward, loss and backward, gradients made in the weights' type and dropped; returns the loss."""

    def step() -> Tensor:
        loss = lose(forward())
        loss.backward()
        # Dropped here, so that memory before a step is that of the weights alone.
        drafter.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def seen_pairs(shape: DrafterShape, anchor_RA: Tensor, window: int | None, first_slot: int = 0) -> int:
    """Query-key pairs that one head of a layer has to compute, one document a row; from `first_slot` of a block on."""
    slot_L = torch.arange(first_slot, shape.block_size, device=anchor_RA.device)
    context_RAL = anchor_RA.clamp(min=0)[..., None].expand(-1, -1, len(slot_L))
    if window is not None:
        context_RAL = torch.minimum(context_RAL, (window - 1 - slot_L).clamp(min=0))
    own_L = slot_L + 1 if shape.is_causal(window) else torch.full_like(slot_L, shape.block_size)
    return int(context_RAL.sum() + own_L.sum() * anchor_RA.numel())


class LayerRows(NamedTuple):
    """Different rows of a layer, of a step of one row: repetitions of a mask token's are one."""

    known: int
    """With keys and values."""
    queries: int
    behind: int
    """The attention's output and all that follows."""


def layer_rows(shape: DrafterShape, num_anchors: int) -> list[LayerRows]:
    """Of each layer. The first has the anchors' and the mask token's; in the last slot 0 has keys and values only."""
    first, drafted = num_anchors + 1, num_anchors * (shape.block_size - 1)
    found = [LayerRows(*(num_anchors * shape.block_size,) * 3) for _ in range(shape.num_layers)]
    found[-1] = found[-1]._replace(queries=drafted, behind=drafted)
    found[0] = found[0]._replace(known=first, queries=first)
    return found


class Product(NamedTuple):
    """A matrix product [m, k] @ [k, n] of the step, and how often it comes."""

    kind: Literal["forward", "input", "weight"]
    m: int
    n: int
    k: int
    times: int


def products(shape: DrafterShape, num_tokens: int, num_anchors: int) -> list[Product]:
    """Every matrix product of a step of one row without the head's, as the drafter runs by its own kernels."""
    width, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    linear = Counter({(num_tokens, keys, width): 2 * shape.num_layers})
    for rows in layer_rows(shape, num_anchors):
        linear[rows.known, keys, width] += 2
        linear[rows.queries, queries, width] += 1
        linear[rows.behind, width, queries] += 1
        linear[rows.behind, inner, width] += 2
        linear[rows.behind, width, inner] += 1
    # The first layer passes gradients on as all others do: the weight of its input norm needs them.
    found = [Product("forward", m, n, k, times) for (m, n, k), times in linear.items()]
    found += [Product("input", m, k, n, times) for (m, n, k), times in linear.items()]
    found += [Product("weight", n, k, m, times) for (m, n, k), times in linear.items()]
    features = len(shape.target_layer_ids) * width
    # The features need no gradient.
    return [
        *found,
        Product("forward", num_tokens, width, features, 1),
        Product("weight", width, features, num_tokens, 1),
    ]


def head_products(shape: DrafterShape, num_rows: int, chunk_rows: int) -> list[Product]:
    """The two products of the head's loss."""
    times = -(-num_rows // chunk_rows)
    return [
        Product("forward", min(num_rows, chunk_rows), shape.vocab_size, shape.hidden_size, times),
        Product("input", min(num_rows, chunk_rows), shape.hidden_size, shape.vocab_size, times),
    ]


ATTENTION_WORK: Final = 4
"""Operations of a query-key pair and unit of head width in the forward: two products, multiply and add."""


def useful_flops(shape: DrafterShape, num_tokens: int, anchor_RA: Tensor) -> float:
    """Useful work of a step, counted alike for every trainer: 3 x forward of the trainable stack + 2 x the head.

    Slot 0 counts as long as something is read off it: not in the head, and in the last layer as key and value only. In
    the first layer every other slot holds the mask token: one row for the products ahead of the attention.
    """
    width, last = shape.hidden_size, shape.num_layers - 1
    drafted = anchor_RA.numel() * (shape.block_size - 1)
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layers = 0
    for rows in layer_rows(shape, anchor_RA.numel()):
        layers += 2 * width * (rows.queries * queries + 2 * (rows.known + num_tokens) * keys)
        layers += 2 * width * rows.behind * (queries + 3 * shape.intermediate_size)
    windows = [shape.window if i in shape.window_layers else None for i in range(shape.num_layers)]
    pairs = sum(seen_pairs(shape, anchor_RA, window, int(i == last)) for i, window in enumerate(windows))
    features = 2 * num_tokens * len(shape.target_layer_ids) * width * width
    head = 2 * drafted * width * shape.vocab_size
    return 3.0 * (layers + ATTENTION_WORK * queries * pairs + features) + 2.0 * head
