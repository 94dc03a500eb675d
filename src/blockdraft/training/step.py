"""The drafter's side of one optimizer step: forward, loss, backward, update.

R rows, T context tokens, A anchors, L block positions, S = L - 1 drafted slots, N = R * A * S of them, M of these that
reach the head, D width, C captured layers.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from blockdraft.config import LossConfig, OptimConfig
from blockdraft.models.blocks import block_positions, block_tokens, first_tokens
from blockdraft.models.compiled import How, RunDrafter, compile_drafter
from blockdraft.models.drafter import Attend, Drafter, DrafterShape
from blockdraft.models.ends import Ends
from blockdraft.training.buckets import GradientBuckets, SumGradients
from blockdraft.training.head_kl import choose_slot_kl
from blockdraft.training.head_loss import choose_slot_loss
from blockdraft.training.health import measure_health
from blockdraft.training.loss import dpace_weights, target_choice, weighted_loss
from blockdraft.training.loss_rows import put_back, take_labels, take_rows
from blockdraft.training.metrics import StepSums, add_sums, flatten_sums, slot_sums, unflatten_sums, zero_sums
from blockdraft.training.optim import MasterOptimizer, lr_scale
from blockdraft.training.shards import Exchange, Seat


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
    row_M: Tensor | None = None
    """Slots that reach the head (training/loss_rows.py), all supervised ones among them; None: all."""


class MakeAttend(Protocol):
    """Builds the attention of one pass: masked SDPA, kernels of our own, or flex_attention."""

    def __call__(self, shape: DrafterShape, document_RT: Tensor, position_RT: Tensor, anchor_RA: Tensor) -> Attend: ...


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


def drafted_hidden(
    run: RunDrafter, drafter: Drafter, ends: Ends, features_RTC: Tensor, blocks: Blocks, make_attend: MakeAttend
) -> Tensor:
    """The same of slots 1..L-1 only, [N, D], through the drafter as the worker runs it (compiled or not)."""
    shape = drafter.shape
    token_RA = first_tokens(blocks.input_ids_RT, blocks.anchor_RA, shape.mask_token_id)
    return run(
        features_RTC,
        blocks.position_RT,
        ends.embed(token_RA).to(drafter.dtype),
        block_positions(blocks.position_RT, blocks.anchor_RA, shape.block_size),
        make_attend(shape, blocks.document_RT, blocks.position_RT, blocks.anchor_RA),
    ).flatten(0, 1)


def states_before(state_RTD: Tensor, anchor_RA: Tensor, num_slots: int) -> Tensor:
    """The states that predict each drafted slot, [R, A, S, D]: slot k's token is foretold at anchor + k - 1.

    Behind the end of a row, and for invalid blocks, they are some other token's; such slots are never supervised.
    """
    index_RAS = anchor_RA.clamp(min=0)[..., None] + torch.arange(num_slots, device=anchor_RA.device)
    index_RQ1 = index_RAS.clamp(max=state_RTD.shape[1] - 1).flatten(1)[..., None]
    state_RQD = state_RTD.gather(1, index_RQ1.expand(-1, -1, state_RTD.shape[-1]))
    return state_RQD.view(*index_RAS.shape, -1)


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
        how: How = "nothing",
        seat: Seat | None = None,
    ) -> None:
        """`head` is `ends`, or `ends` restricted to a draft vocabulary; `how` the drafter runs (models/compiled.py)."""
        self.drafter, self.ends, self.head = drafter, ends, head
        self.loss_config, self.optim_config, self.total_steps = loss, optim, total_steps
        self.sum_gradients = sum_gradients
        self.how: How = how
        self.use_attention(make_attend)
        self.slot_loss, self.slot_kl = choose_slot_loss(drafter.device), choose_slot_kl(drafter.device)
        self.seat = seat
        self.optimizer = MasterOptimizer(drafter, optim, seat)
        optimizer = self.optimizer
        self.buckets = GradientBuckets(optimizer.weights, optimizer.gradient, optimizer.land, optimizer.measure_all_but)
        self.num_slots = drafter.shape.block_size - 1
        self.sums = zero_sums(self.num_slots, drafter.device)
        self.grad_norm = torch.zeros((), device=drafter.device)
        self.num_micro_batches = 0
        """Of the step that is under way."""
        self.health = torch.zeros(0, 3, device=drafter.device)
        """Of the last step's micro-batches, as training/health.py measures it."""
        self._measured: list[Tensor] = []
        self.before_update: Callable[[], None] = _nothing
        """Called before weights, masters and moments change: a copy of them may still be under way."""
        self.timed: Callable[[str], AbstractContextManager[object]] = nullcontext
        """Called with what `finish` is about to do; the runtime records how long it takes."""
        self.last_scale = 0.0
        """Learning rate of the last step as a share of the peak."""

    def use_attention(self, make_attend: MakeAttend) -> None:
        """Takes another attention, of other tiles for instance; what was compiled with the last one is left."""
        self.make_attend = make_attend
        self.run_drafter: RunDrafter = compile_drafter(self.drafter, self.how)

    def micro_batch(self, features_RTC: Tensor, blocks: Blocks, denominator: float) -> None:
        """Forward, loss and backward; gradients and counts add up until `finish`."""
        width = self.drafter.fc.in_features
        context_RTC = features_RTC[..., :width]
        drafted_ND = drafted_hidden(self.run_drafter, self.drafter, self.ends, context_RTC, blocks, self.make_attend)
        row_M, label_RAS = blocks.row_M, blocks.label_RAS
        taken_MD, label_M = take_rows(drafted_ND, row_M), take_labels(label_RAS.flatten(), row_M)
        if self.loss_config.needs_final_states:
            final_RASD = states_before(features_RTC[..., width:], blocks.anchor_RA, self.num_slots)
            found = self._against_target(taken_MD, take_rows(final_RASD.flatten(0, 2), row_M), label_M)
        else:
            found = self.slot_loss(taken_MD, label_M, self.head, self.loss_config.chunk_rows)
        loss_RAS, correct_RAS = (put_back(value_M, row_M, label_RAS.numel()).view_as(label_RAS) for value_M in found)
        weight_RAS = blocks.weight_RAS
        if self.loss_config.objective == "dpace":
            weight_RAS = dpace_weights(loss_RAS, weight_RAS > 0)
        loss = weighted_loss(loss_RAS, weight_RAS, denominator)
        self._measured.append(measure_health(features_RTC, loss))
        # In front of the backward: behind it the counts' sum, the last of a step, would wait for these small kernels.
        self.sums = add_sums(self.sums, slot_sums(loss.detach(), correct_RAS, blocks.supervised_RAS))
        loss.backward()
        self.num_micro_batches += 1

    def _against_target(self, drafted_MD: Tensor, final_MD: Tensor, label_M: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and correctness of every slot when the target's own distribution, or its argmax, is what counts."""
        config, final_MD = self.loss_config, final_MD.to(self.head.head_weight.dtype)
        if config.objective == "kl":
            found = self.slot_kl(drafted_MD, final_MD, self.head, config.chunk_rows)
            label_M = found.target_N if config.labels == "argmax" else label_M
            return found.kl_N, found.drafted_N == label_M
        choice_M = target_choice(final_MD, self.head, config.chunk_rows)
        return self.slot_loss(drafted_MD, choice_M, self.head, config.chunk_rows)

    def join(self, total: SumGradients, exchange: Exchange | None = None) -> None:
        """From now on one of several replicas. Sums every bucket once, so that what carries them is set up and warm.

        `exchange`: of the drafters that divide the optimizer's state; weights are handed out once for the same reason.
        """
        self.sum_gradients = total
        self.optimizer.keep_gradients()
        self.buckets.begin(total)
        self.buckets.finish(torch.zeros_like(flatten_sums(self.sums)))
        self.optimizer.forget_gradients()
        if exchange is not None:
            self.optimizer.share_all(exchange)

    def begin_sum(self) -> None:
        """Before a step's last micro-batch: meets the other replicas; sums then run beside the backward.

        A micro-batch that is the step's only one needs no addition, so its gradients are summed in the weights' type:
        half the bytes. With several the float32 sums of this replica are what is summed.
        """
        if self.sum_gradients is not None:
            self.sum_gradients.meet()
        if self.num_micro_batches == 0:
            self.optimizer.keep_gradients()
        if self.sum_gradients is not None:
            self.buckets.begin(self.sum_gradients)

    def finish(self, step: int) -> StepSums:
        """Sums gradients and counts over all replicas, clips, updates; returns the counts and starts new ones."""
        sums, self.sums = self.sums, zero_sums(self.num_slots, self.drafter.device)
        self.num_micro_batches = 0
        if self.sum_gradients is not None:
            flat = flatten_sums(sums)
            with self.timed("sum of gradients"):
                self.buckets.finish(flat)
            sums = unflatten_sums(flat, self.num_slots)
        self.last_scale = lr_scale(step, self.total_steps, self.optim_config)
        self.health = torch.stack(self._measured) if self._measured else self.health[:0]
        self._measured = []
        self.before_update()
        with self.timed("update"):
            self.grad_norm = self.optimizer.step(self.last_scale)
        if self.seat is not None:
            with self.timed("exchange of weights"):
                self.optimizer.await_weights()
        return sums

    def rehearse(self) -> None:
        """The update at learning rate 0 after zero gradients, without a collective; leaves no trace in any counter."""
        self.optimizer.rehearse()
        self._measured = []
        self.num_micro_batches = 0
        self.sums = zero_sums(self.num_slots, self.drafter.device)


def _nothing() -> None:
    """Nothing is under way."""
