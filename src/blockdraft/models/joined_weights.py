"""Weights that meet the same input, side by side in memory: one matrix product for all of them.

Parameters stay what they are, with names, gradients and states of their own; only their numbers move. K rows of one
weight, X of all of them, D width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from blockdraft.models.drafter import Drafter, DrafterLayer


def join_layers(drafter: Drafter) -> None:
    """Queries, keys and values of each layer, and gate and up. What is joined already stays where it is."""
    for layer in drafter.layers:
        assert isinstance(layer, DrafterLayer)
        attention, mlp = layer.self_attn, layer.mlp
        join([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        join([mlp.gate_proj.weight, mlp.up_proj.weight])


def join(weights: Sequence[Tensor]) -> None:
    """Moves the weights' numbers into one matrix, in this order."""
    if _are_joined(weights):
        return
    whole_XD = torch.cat([weight.detach() for weight in weights])
    for weight, part_KD in zip(weights, whole_XD.split([len(weight) for weight in weights]), strict=True):
        weight.data = part_KD


def joined(*weights: Tensor) -> Tensor:
    """The matrix of weights that lie side by side, [X, D]: a view.

    Raises:
        RuntimeError: they were moved since `join_layers`.
    """
    if not _are_joined(weights):
        raise RuntimeError(
            "weights of one product were expected side by side in memory, found apart: the drafter was moved or cast "
            "after its KernelDrafter was made; make another one"
        )
    width = weights[0].shape[1]
    return weights[0].detach().as_strided((sum(map(len, weights)), width), (width, 1))


def _are_joined(weights: Sequence[Tensor]) -> bool:
    memory, place = weights[0].untyped_storage().data_ptr(), weights[0].storage_offset()
    for weight in weights:
        is_next = weight.untyped_storage().data_ptr() == memory and weight.storage_offset() == place
        if not is_next or not weight.is_contiguous():
            return False
        place += weight.numel()
    return True
