"""How the drafter runs in training: without a compiler, or compiled by layers, as one graph, or the attention alone.

R rows, T context tokens, Q block tokens, A anchors, L block size, D width, C captured layers; [R, A + 1, D] are the
embeddings of `blocks.first_tokens`: all that blocks are made of.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any, Final, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from blockdraft.models.blocks import spread_blocks
from blockdraft.models.drafter import Attend, Drafter, DrafterLayer, Rotation, rotation
from blockdraft.models.own_layers import KernelDrafter

How = Literal["kernels", "stack", "layer", "attention", "nothing"]
"""How the drafter runs in training: by the program's own kernels, or what of it becomes one compiled graph.

`kernels`: models/own_layers.py, nothing is compiled as a graph. `layer`: layers alike share one compiled version, and
the backward makes elementwise results again instead of keeping them. `stack`: all layers at once, nothing made twice;
it takes minutes to compile. In these two the attention is part of the graph; `attention` leaves compiling to the
Attend. `nothing`: plain operations.
"""


class RunDrafter(Protocol):
    """The whole drafter on a pass's features and the embeddings of its blocks."""

    def __call__(
        self,
        features_RTC: Tensor,
        context_position_RT: Tensor,
        first_RAD: Tensor,
        block_position_RQ: Tensor,
        attend: Attend,
    ) -> Tensor:
        """Returns the final-normed hidden states of slots 1..L-1, [R, A * (L - 1), D]."""
        ...


def compile_drafter(drafter: Drafter, how: How) -> RunDrafter:
    """The drafter's training forward. One per worker: call it first, forward and backward, in the worker's thread.

    Compiled code is made for the shapes of the first call. The drafter itself stays as it is, for evaluation and
    export.
    """
    if how == "kernels":
        return KernelDrafter(drafter)
    if how == "layer":
        return _by_layer(drafter)

    def run(
        features_RTC: Tensor,
        context_position_RT: Tensor,
        first_RAD: Tensor,
        block_position_RQ: Tensor,
        attend: Attend,
    ) -> Tensor:
        block_RQD = spread_blocks(first_RAD, drafter.shape.block_size)
        context_RTD = drafter.project(features_RTC.to(block_RQD.dtype))
        hidden_RND: Tensor = drafter(
            context_RTD, context_position_RT, block_RQD, block_position_RQ, attend, drafted_only=True
        )
        return hidden_RND

    return compile_alone(run) if how == "stack" else run


class Prepared(NamedTuple):
    """What every layer reads; rotary factors are made once, not by each kernel that turns something."""

    context_RTD: Tensor
    context_angles: Rotation
    block_angles: Rotation


class Kind(NamedTuple):
    """Layers that one compiled version serves."""

    number: int
    """The first of them: what the attention of a layer depends on is the same for all."""
    drop: int | None
    run: Callable[..., Tensor]


def _by_layer(drafter: Drafter) -> RunDrafter:
    shape = drafter.shape

    def prepare(
        features_RTC: Tensor, context_position_RT: Tensor, first_RAD: Tensor, block_position_RQ: Tensor
    ) -> tuple[Prepared, Tensor]:
        width, theta, dtype = shape.head_dim, shape.rope_theta, drafter.dtype
        prepared = Prepared(
            drafter.project(features_RTC.to(dtype)),
            rotation(context_position_RT, width, theta, dtype),
            rotation(block_position_RQ, width, theta, dtype),
        )
        return prepared, spread_blocks(first_RAD, shape.block_size)

    prepared, kinds = compile_alone(prepare), _kinds(drafter)

    def run(
        features_RTC: Tensor,
        context_position_RT: Tensor,
        first_RAD: Tensor,
        block_position_RQ: Tensor,
        attend: Attend,
    ) -> Tensor:
        block_RQD: Tensor
        shared, block_RQD = prepared(features_RTC, context_position_RT, first_RAD, block_position_RQ)
        for layer, kind in zip(drafter.layers, kinds, strict=True):
            block_RQD = kind.run(layer, block_RQD, shared, _as_layer(attend, kind.number), kind.drop)
        return block_RQD

    return run


def _kinds(drafter: Drafter) -> list[Kind]:
    """Of each layer: by its window, the last one by itself since it leaves slot 0 out and takes the final norm."""
    shape, last = drafter.shape, len(drafter.layers) - 1
    found: dict[tuple[bool, bool], Kind] = {}
    kinds = []
    for number in range(last + 1):
        key = (number in shape.window_layers, number == last)
        if key not in found:
            drop = shape.block_size if number == last else None
            found[key] = Kind(number, drop, _compile_layer(drafter.norm if number == last else None))
        kinds.append(found[key])
    return kinds


def _as_layer(attend: Attend, number: int) -> Attend:
    def attend_as(
        layer: int,
        query_RHQE: Tensor,
        context_key_RGTE: Tensor,
        context_value_RGTE: Tensor,
        block_key_RGQE: Tensor,
        block_value_RGQE: Tensor,
    ) -> Tensor:
        # `layer` is not read: if it were, each layer would be compiled for its own number.
        return attend(number, query_RHQE, context_key_RGTE, context_value_RGTE, block_key_RGQE, block_value_RGQE)

    return attend_as


def _compile_layer(norm: Callable[[Tensor], Tensor] | None) -> Callable[..., Tensor]:
    def run(layer: DrafterLayer, block_RQD: Tensor, shared: Prepared, attend: Attend, drop: int | None) -> Tensor:
        block_RQD = checkpoint(
            layer, shared.context_RTD, block_RQD, shared.context_angles, shared.block_angles, attend, drop,
            use_reentrant=False, context_fn=_contexts,
        )  # fmt: skip
        return block_RQD if norm is None else norm(block_RQD)

    return compile_alone(run)


KEPT: Final = ("aten::mm", "aten::addmm", "blockdraft::block_attention", "flex_attention")
"""Operations whose results are kept for the backward; everything else is elementwise and cheaper to make again."""


def _contexts() -> tuple[Any, Any]:
    found: tuple[Any, Any] = create_selective_checkpoint_contexts(_policy)
    return found


def _policy(_ctx: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation.name() in KEPT else CheckpointPolicy.MUST_RECOMPUTE


def compile_alone(function: Any) -> Callable[..., Any]:
    """A function compiled for fixed shapes, with a code object of its own.

    Compiled versions are kept, and counted against the recompile limit, by code object: replicas of one process would
    otherwise share one list, and each look through the others' versions.
    """
    code = function.__code__.replace()
    own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return torch.compile(own, dynamic=False, fullgraph=True)
