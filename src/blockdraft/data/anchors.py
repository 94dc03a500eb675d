"""Anchors and labels: which positions are drafted, and what the slots of their blocks predict.

R rows, T tokens of a row, A anchors of a row, L block positions (the anchor counts). NumPy, since the loader draws
anchors; an anchor of -1 is an invalid block. Visibility and positions on the device: models/blocks.py.
"""

from typing import NamedTuple

import numpy as np

INVALID = -1
MIN_ANCHORS = 4
"""A document gets at least this many anchors, if it has them (docs/algorithm.md, section 3)."""


class BlockLabels(NamedTuple):
    """What the slots of each block predict."""

    label_RAL: np.ndarray
    """Token id at anchor + slot, int64; 0 where there is none."""
    supervised_RAL: np.ndarray
    """Slots that count, bool; slot 0 never does."""


def default_gamma(block_size: int) -> float:
    """Decay of the position weight by block size (docs/algorithm.md, section 5)."""
    known = {16: 7.0, 10: 5.0, 8: 4.0}
    if block_size in known:
        return known[block_size]
    return 4.0 + 3.0 * (block_size - 8) / 8 if block_size > 8 else block_size / 2


def position_weights(block_size: int, gamma: float) -> np.ndarray:
    """w_k = exp(-(k - 1) / gamma) for slots 0..L-1, float32 [L]; slot 0 has weight 0."""
    weight_L = np.exp(-(np.arange(block_size) - 1) / gamma).astype(np.float32)
    weight_L[0] = 0.0
    return weight_L


def eligible_anchors(loss_mask_T: np.ndarray, document_T: np.ndarray) -> np.ndarray:
    """Positions that may anchor a block, bool [T]: they and their successor are supervised, in one document."""
    eligible_T = np.zeros(len(loss_mask_T), dtype=bool)
    supervised_T = (loss_mask_T > 0) & (document_T >= 0)
    eligible_T[:-1] = supervised_T[:-1] & supervised_T[1:] & (document_T[:-1] == document_T[1:])
    return eligible_T


def deal_anchors(eligible_counts: list[int], num_anchors: int) -> list[int]:
    """How many of a row's anchors each of its documents gets.

    Largest remainder by eligible count, at least min(4, eligible) to each, capped at the eligible count, what the
    caps leave over dealt again. If the minimum alone is more than the row has, the minimum shrinks evenly.
    """
    minimum = MIN_ANCHORS
    while minimum and sum(min(minimum, count) for count in eligible_counts) > num_anchors:
        minimum -= 1
    dealt = [min(minimum, count) for count in eligible_counts]
    left = min(num_anchors, sum(eligible_counts)) - sum(dealt)
    while left:
        room = [count - given for count, given in zip(eligible_counts, dealt, strict=True)]
        total = sum(count for count, free in zip(eligible_counts, room, strict=True) if free)
        exact = [left * count / total if free else 0.0 for count, free in zip(eligible_counts, room, strict=True)]
        share = [min(int(part), free) for part, free in zip(exact, room, strict=True)]
        by_remainder = sorted(range(len(exact)), key=lambda i: (int(exact[i]) - exact[i], i))
        spare = left - sum(share)
        for i in by_remainder:
            if spare and share[i] < room[i]:
                share[i] += 1
                spare -= 1
        dealt = [given + more for given, more in zip(dealt, share, strict=True)]
        left -= sum(share)
    return dealt


def sample_anchors(
    loss_mask_T: np.ndarray, document_T: np.ndarray, num_anchors: int, generator: np.random.Generator
) -> np.ndarray:
    """Draws a row's anchors uniformly without replacement per document, sorted; int64 [A], -1 where none is left."""
    eligible = np.flatnonzero(eligible_anchors(loss_mask_T, document_T))
    documents, start = np.unique(document_T[eligible], return_index=True)
    groups = np.split(eligible, start[1:]) if len(documents) else []
    dealt = deal_anchors([len(group) for group in groups], num_anchors)
    drawn = [generator.choice(group, count, replace=False) for group, count in zip(groups, dealt, strict=True)]
    anchor_A = np.full(num_anchors, INVALID, dtype=np.int64)
    if drawn:
        chosen = np.sort(np.concatenate(drawn))
        anchor_A[: len(chosen)] = chosen
    return anchor_A


def block_labels(
    input_ids_RT: np.ndarray,
    document_RT: np.ndarray,
    loss_mask_RT: np.ndarray,
    anchor_RA: np.ndarray,
    block_size: int,
    *,
    after_gap: bool = False,
) -> BlockLabels:
    """Labels and supervised slots of every block (docs/algorithm.md, section 5).

    Slot k is supervised if its position lies in the anchor's document, has loss mask 1, and slots 1..k-1 are
    supervised as well; `after_gap` drops the last condition.
    """
    num_tokens = input_ids_RT.shape[1]
    valid_RA = anchor_RA >= 0
    position_RAL = np.where(valid_RA, anchor_RA, 0)[..., None] + np.arange(block_size)
    inside_RAL = (position_RAL < num_tokens) & valid_RA[..., None]
    position_RAL = np.minimum(position_RAL, num_tokens - 1)
    row_R11 = np.arange(len(anchor_RA))[:, None, None]
    document_RAL = document_RT[row_R11, position_RAL]
    supervised_RAL = inside_RAL & (document_RAL == document_RAL[..., :1]) & (loss_mask_RT[row_R11, position_RAL] > 0)
    if not after_gap:
        supervised_RAL[..., 1:] = np.logical_and.accumulate(supervised_RAL[..., 1:], axis=-1)
    supervised_RAL[..., 0] = False
    label_RAL = np.where(inside_RAL, input_ids_RT[row_R11, position_RAL], 0).astype(np.int64)
    return BlockLabels(label_RAL, supervised_RAL)
