"""Blocks on the device: their tokens, their positions, and what each may attend to.

R rows, T context tokens of a row, A anchors of a row, L block positions (the anchor counts), Q = A * L block tokens,
K = T + Q keys. Everything here has fixed shapes; an anchor of -1 is an invalid block.
"""

import torch
from torch import Tensor

from blockdraft.config import ConfigError


def check_window(window: int | None, block_size: int) -> None:
    """Refuses a window in which a slot could not see its own anchor's context."""
    if window is not None and window < block_size:
        raise ConfigError(
            f"drafter.window must be at least drafter.block_size ({block_size}), got {window}; raise it or drop it"
        )


def block_positions(position_RT: Tensor, anchor_RA: Tensor, block_size: int) -> Tensor:
    """Position within its document of every block token, int64 [R, Q]; an invalid block counts from 0."""
    start_RA = torch.where(anchor_RA >= 0, position_RT.gather(1, anchor_RA.clamp(min=0)), 0)
    return (start_RA[..., None] + torch.arange(block_size, device=anchor_RA.device)).flatten(1)


def first_tokens(input_ids_RT: Tensor, anchor_RA: Tensor, mask_token_id: int) -> Tensor:
    """The different tokens that blocks are made of, int64 [R, A + 1]: the anchors' (mask token where invalid), mask."""
    anchor_token_RA = input_ids_RT.gather(1, anchor_RA.clamp(min=0))
    token_RA = torch.where(anchor_RA >= 0, anchor_token_RA, mask_token_id)
    return torch.nn.functional.pad(token_RA, (0, 1), value=mask_token_id)


def spread_blocks(first_RA: Tensor, block_size: int) -> Tensor:
    """What is given for `first_tokens`, [R, A + 1, ...], for every block token, [R, Q, ...]: anchor, then masks."""
    num_anchors = first_RA.shape[1] - 1
    anchor_RA1, mask_R1 = first_RA[:, :num_anchors, None], first_RA[:, num_anchors:, None]
    masks = mask_R1.expand(-1, num_anchors, block_size - 1, *first_RA.shape[2:])
    return torch.cat([anchor_RA1, masks], dim=2).flatten(1, 2)


def block_tokens(input_ids_RT: Tensor, anchor_RA: Tensor, block_size: int, mask_token_id: int) -> Tensor:
    """Token ids the drafter reads, int64 [R, Q]: the anchor, then mask tokens; an invalid block is all mask tokens."""
    return spread_blocks(first_tokens(input_ids_RT, anchor_RA, mask_token_id), block_size)


def visibility(
    document_RT: Tensor,
    position_RT: Tensor,
    anchor_RA: Tensor,
    block_size: int,
    *,
    window: int | None = None,
    causal: bool = False,
) -> Tensor:
    """Which keys each block token may attend to, bool [R, Q, T + Q] (docs/algorithm.md, section 4).

    Context: the anchor's document, positions strictly before the anchor's; with `window` W also positions greater
    than position(anchor) + k - W. Block: its own, both directions unless `causal`.
    """
    device = anchor_RA.device
    num_rows, num_anchors = anchor_RA.shape
    num_queries = num_anchors * block_size
    valid_RA, safe_RA = anchor_RA >= 0, anchor_RA.clamp(min=0)
    document_RA = torch.where(valid_RA, document_RT.gather(1, safe_RA), -2)
    before_RA = position_RT.gather(1, safe_RA)
    context_RAT = (document_RT[:, None] == document_RA[..., None]) & (position_RT[:, None] < before_RA[..., None])
    context_RALT = context_RAT[:, :, None].expand(-1, -1, block_size, -1)
    slot_L = torch.arange(block_size, device=device)
    if window is not None:
        first_RAL = before_RA[..., None] + slot_L - window
        context_RALT = context_RALT & (position_RT[:, None, None] > first_RAL[..., None])
    block_Q = torch.arange(num_queries, device=device) // block_size
    own_QQ = block_Q[:, None] == block_Q
    if causal:
        slot_Q = slot_L.repeat(num_anchors)
        own_QQ = own_QQ & (slot_Q <= slot_Q[:, None])
    return torch.cat(
        [context_RALT.reshape(num_rows, num_queries, -1), own_QQ.expand(num_rows, -1, -1)],
        dim=2,
    )
