"""The drafter's layers compiled for fixed shapes: as one graph, layer by layer, or the attention alone.

R rows, T context tokens, Q block tokens, A anchors, L block size, D width, C captured layers.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from blockdraft.models.drafter import Attend, Drafter, Rotation, RunLayer

How = Literal["stack", "layer", "attention", "nothing"]
"""What becomes one graph. `attention` leaves compiling to the Attend; in the first two it is part of the graph."""


class RunDrafter(Protocol):
    """The whole drafter on a pass's features and block embeddings."""

    def __call__(
        self,
        features_RTC: Tensor,
        context_position_RT: Tensor,
        block_RQD: Tensor,
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
    layers: list[RunLayer] = list(drafter.layers)
    if how == "layer":
        layers = [_compile_layer(layer) for layer in layers]

    def run(
        features_RTC: Tensor,
        context_position_RT: Tensor,
        block_RQD: Tensor,
        block_position_RQ: Tensor,
        attend: Attend,
    ) -> Tensor:
        context_RTD = drafter.project(features_RTC.to(block_RQD.dtype))
        return drafter.run_layers(
            layers, context_RTD, context_position_RT, block_RQD, block_position_RQ, attend, drafted_only=True
        )

    return compile_alone(run) if how == "stack" else run


def _compile_layer(layer: RunLayer) -> RunLayer:
    def run(
        context_RTD: Tensor,
        block_RQD: Tensor,
        context_angles: Rotation,
        block_angles: Rotation,
        attend: Attend,
        drop: int | None = None,
    ) -> Tensor:
        return layer(context_RTD, block_RQD, context_angles, block_angles, attend, drop)

    return compile_alone(run)


def compile_alone(function: Any) -> Callable[..., Any]:
    """A function compiled for fixed shapes, with a code object of its own.

    Compiled versions are kept, and counted against the recompile limit, by code object: replicas of one process would
    otherwise share one list, and each look through the others' versions.
    """
    code = function.__code__.replace()
    own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return torch.compile(own, dynamic=False, fullgraph=True)
