"""The drafter's side of one optimizer step: forward, loss, backward, update.

R rows, T context tokens, A anchors, L block positions, S = L - 1 drafted slots, D width, C captured layers.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from blockdraft.config import LossConfig, OptimConfig
from blockdraft.models.blocks import block_positions, block_tokens
from blockdraft.models.drafter import Attend, Drafter, DrafterShape
from blockdraft.models.ends import Ends
from blockdraft.training.loss import slot_loss, weighted_loss
from blockdraft.training.metrics import StepSums, add_sums, slot_sums, zero_sums
from blockdraft.training.optim import MasterOptimizer, lr_scale


class Blocks(NamedTuple):
    """One pass over a row's features: tokens, anchors and what their blocks are to predict, on the drafter's device."""

    input_ids_RT: Tensor
    document_RT: Tensor
    """Document number of each token, -1 for padding."""
    position_RT: Tensor
    """Position within the document."""
    anchor_RA: Tensor
    """Index in the row, -1 for an invalid block."""
    label_RAS: Tensor
    """Token ids of slots 1..L-1; with a draft vocabulary, indices into it, -1 outside."""
    supervised_RAS: Tensor
    weight_RAS: Tensor
    """Position weights of the slots that enter the loss, float32."""


class MakeAttend(Protocol):
    """Builds the attention of one pass; the runtime chooses masked SDPA or compiled flex_attention."""

    def __call__(self, shape: DrafterShape, document_RT: Tensor, position_RT: Tensor, anchor_RA: Tensor) -> Attend: ...


class SumGradients(Protocol):
    """Adds the gradients of all replicas up, in place."""

    def __call__(self, gradients: list[Tensor]) -> None: ...

    def drop(self) -> None:
        """Leaves the group of replicas."""
        ...


def drafter_hidden(
    drafter: Drafter, ends: Ends, features_RTC: Tensor, blocks: Blocks, make_attend: MakeAttend
) -> Tensor:
    """Final-normed hidden states of every block token, [R, A, L, D]."""
    shape = drafter.shape
    token_RQ = block_tokens(blocks.input_ids_RT, blocks.anchor_RA, shape.block_size, shape.mask_token_id)
    hidden_RQD = drafter(
        drafter.project(features_RTC.to(drafter.dtype)),
        blocks.position_RT,
        ends.embed(token_RQ).to(drafter.dtype),
        block_positions(blocks.position_RT, blocks.anchor_RA, shape.block_size),
        make_attend(shape, blocks.document_RT, blocks.position_RT, blocks.anchor_RA),
    )
    return hidden_RQD.unflatten(1, (-1, shape.block_size))  # type: ignore[no-any-return]


class DrafterStep:
    """One drafter replica in training. Every call comes from the thread that owns the replica."""

    def __init__(
        self,
        drafter: Drafter,
        ends: Ends,
        head: Ends,
        *,
        loss: LossConfig,
        optim: OptimConfig,
        total_steps: int,
        make_attend: MakeAttend,
        sum_gradients: SumGradients | None = None,
    ) -> None:
        """`head` is `ends`, or `ends` restricted to a draft vocabulary."""
        self.drafter, self.ends, self.head = drafter, ends, head
        self.loss_config, self.optim_config, self.total_steps = loss, optim, total_steps
        self.make_attend, self.sum_gradients = make_attend, sum_gradients
        self.optimizer = MasterOptimizer(drafter, optim)
        self.num_slots = drafter.shape.block_size - 1
        self.sums = zero_sums(self.num_slots, drafter.device)
        self.grad_norm = torch.zeros((), device=drafter.device)
        self.last_scale = 0.0
        """Learning rate of the last step as a share of the peak."""

    def micro_batch(self, features_RTC: Tensor, blocks: Blocks, denominator: float) -> None:
        """Forward, loss and backward; gradients and counts add up until `finish`."""
        hidden_RALD = drafter_hidden(self.drafter, self.ends, features_RTC, blocks, self.make_attend)
        drafted_ND = hidden_RALD[:, :, 1:].flatten(0, 2)
        result = slot_loss(drafted_ND, blocks.label_RAS.flatten(), self.head, self.loss_config.chunk_rows)
        size = blocks.label_RAS.shape
        loss = weighted_loss(result.ce_N.view(size), blocks.weight_RAS, denominator)
        loss.backward()
        self.sums = add_sums(self.sums, slot_sums(loss, result.correct_N.view(size), blocks.supervised_RAS))

    def finish(self, step: int) -> StepSums:
        """Sums gradients over replicas, clips, updates; returns this replica's counts and starts new ones."""
        if self.sum_gradients is not None:
            self.sum_gradients(self.optimizer.gradients())
        self.last_scale = lr_scale(step, self.total_steps, self.optim_config)
        self.grad_norm = self.optimizer.step(self.last_scale)
        sums, self.sums = self.sums, zero_sums(self.num_slots, self.drafter.device)
        return sums

    def rehearse(self) -> None:
        """The update at learning rate 0 after zero gradients, without a collective; leaves no trace in any counter."""
        self.optimizer.step(0.0)
        self.optimizer.reset_moments()
        self.sums = zero_sums(self.num_slots, self.drafter.device)
