"""The trainers that `make parity` compares: each one's step and visibility table on given weights, anchors and data.

Anchors are fixed by replacing each trainer's sampler; nothing else of theirs is changed.

R rows, T context tokens, A anchors, L block positions, Q = A * L block tokens, D width, C captured layers.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from nemo_automodel.components.attention.dflash_mask import create_dflash_sdpa_mask as nemo_mask
from nemo_automodel.components.speculative.dflash.core import DFlashTrainerModule
from nemo_automodel.components.speculative.dflash.core import _context_doc_ids as nemo_documents
from nemo_automodel.components.speculative.dflash.draft_qwen3 import Qwen3DFlashDraftModel
from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel, create_dflash_sdpa_mask
from specforge.modeling.draft.dflash import DFlashDraftModel as SpecForgeModel
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel as SpeculatorsModel
from speculators.models.dflash.attention import create_anchor_block_mask_mod
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask
from transformers import Qwen3Config, Qwen3ForCausalLM

from blockdraft.config import LossConfig, OptimConfig
from blockdraft.data.anchors import block_labels, position_weights
from blockdraft.models.attention import sdpa_attend
from blockdraft.models.blocks import visibility
from blockdraft.models.drafter import Drafter, DrafterShape
from blockdraft.models.formats import published_config
from blockdraft.models.target import Target
from blockdraft.training.step import Blocks, DrafterStep

BLOCK, GAMMA, TOKENS, VOCAB, WIDTH, MASK = 8, 4.0, 48, 101, 32, 100
LAYER_IDS = (1, 3, 4)


class Data(NamedTuple):
    """What every trainer is given."""

    input_ids_RT: Tensor
    loss_mask_RT: Tensor
    document_RT: Tensor
    position_RT: Tensor
    anchor_RA: Tensor
    """-1: an invalid block."""
    features_RTC: Tensor
    last_hidden_RTD: Tensor


class Step(NamedTuple):
    """What a trainer's step came to."""

    loss: float
    gradients: dict[str, Tensor]


def tiny_target() -> Qwen3ForCausalLM:
    """Random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        initializer_range=0.1,
    )
    return Qwen3ForCausalLM(config).eval()


def make_drafter(**changes: Any) -> Drafter:
    """Three layers, every weight random, norms included."""
    shape = DrafterShape(
        hidden_size=WIDTH,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=48,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        block_size=BLOCK,
        mask_token_id=MASK,
        target_layer_ids=LAYER_IDS,
        num_target_layers=6,
        vocab_size=VOCAB,
        max_position_embeddings=512,
        **changes,
    )
    drafter = Drafter(shape)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in drafter.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if weight.dim() == 1 else 0.1 * noise)
    return drafter


def make_data(target: Target, anchors: list[list[int]], lengths: list[list[int]]) -> Data:
    """Random ids, a loss mask with gaps, documents of the given lengths in each row."""
    generator = torch.Generator().manual_seed(2)
    num_rows = len(anchors)
    ids_RT = torch.randint(3, MASK, (num_rows, TOKENS), generator=generator)
    mask_RT = (torch.rand(num_rows, TOKENS, generator=generator) > 0.15).long()
    anchor_RA = torch.tensor(anchors)
    for row, chosen in enumerate(anchors):
        for anchor in chosen:
            mask_RT[row, max(anchor, 0) : max(anchor, 0) + 2] = 1
    document_RT = torch.stack([torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)) for n in lengths])
    position_RT = torch.stack([torch.cat([torch.arange(part) for part in n]) for n in lengths])
    output = target.model(ids_RT, output_hidden_states=True)
    features = torch.cat([output.hidden_states[layer + 1] for layer in LAYER_IDS], dim=-1)
    return Data(
        ids_RT, mask_RT, document_RT, position_RT, anchor_RA, features.detach(), output.hidden_states[-1].detach()
    )


def our_blocks(data: Data, after_gap: bool = True, wanted_RT: Tensor | None = None) -> Blocks:
    """As the loader makes them; `wanted_RT` are the tokens to predict where these are not the row's own."""
    labels = block_labels(
        (data.input_ids_RT if wanted_RT is None else wanted_RT).numpy(),
        data.document_RT.numpy(),
        data.loss_mask_RT.numpy(),
        data.anchor_RA.numpy(),
        BLOCK,
        after_gap=after_gap,
    )
    weight = labels.supervised_RAL * position_weights(BLOCK, GAMMA)
    return Blocks(
        data.input_ids_RT,
        data.document_RT,
        data.position_RT,
        data.anchor_RA,
        torch.from_numpy(labels.label_RAL[..., 1:]),
        torch.from_numpy(labels.supervised_RAL[..., 1:]),
        torch.from_numpy(np.ascontiguousarray(weight[..., 1:], dtype=np.float32)),
    )


def our_step(
    drafter: Drafter,
    target: Target,
    data: Data,
    *,
    after_gap: bool = True,
    objective: Literal["ce", "dpace"] = "ce",
    wanted_RT: Tensor | None = None,
) -> Step:
    """Our trainer's step on one micro-batch, without the update; `drafter` has no gradients yet."""
    step = DrafterStep(
        drafter,
        target.ends,
        target.ends,
        loss=LossConfig(gamma=GAMMA, after_gap=after_gap, objective=objective),
        optim=OptimConfig(),
        total_steps=1,
        make_attend=sdpa_attend,
    )
    blocks = our_blocks(data, after_gap, wanted_RT)
    # SpecForge divides dpace by the rows; a step of ours by its supervised slots.
    denominator = float(blocks.weight_RAS.sum()) if objective == "ce" else float(len(data.anchor_RA))
    step.micro_batch(data.features_RTC, blocks, denominator)
    named = zip(step.optimizer.masters, step.optimizer.gradients(), strict=True)
    return Step(float(step.sums.loss), {name: gradient.clone() for name, gradient in named})


def their_config(shape: DrafterShape) -> Qwen3Config:
    """What their drafters are built from: the export's own config."""
    config = Qwen3Config(**published_config(shape, torch.float32))
    config._attn_implementation = "sdpa"
    return config


def fixed_anchors(data: Data) -> Callable[..., tuple[Tensor, Tensor]]:
    """Stands in for a trainer's sampler."""
    chosen = data.anchor_RA.clamp(min=0), data.anchor_RA >= 0
    return lambda *_arguments, **_named: chosen


def step_of(module: torch.nn.Module, loss: Tensor, drafter: torch.nn.Module) -> Step:
    """Backward of a trainer's loss."""
    module.zero_grad()
    loss.backward()
    return Step(
        float(loss.detach()), {name: w.grad.clone() for name, w in drafter.named_parameters() if w.grad is not None}
    )


def specforge_step(drafter: Drafter, target: Target, data: Data, chunk_blocks: int, loss_type: str = "dflash") -> Step:
    """SpecForge's."""
    theirs = SpecForgeModel(their_config(drafter.shape))
    theirs.load_state_dict(drafter.state_dict())
    module = OnlineDFlashModel(
        draft_model=theirs,
        target_lm_head=target.model.lm_head,
        target_embed_tokens=target.model.get_input_embeddings(),
        mask_token_id=MASK,
        block_size=BLOCK,
        attention_backend="sdpa",
        num_anchors=data.anchor_RA.shape[1],
        loss_decay_gamma=GAMMA,
        objective_chunk_blocks=chunk_blocks,
        loss_type=loss_type,
    )
    module._sample_anchor_positions = fixed_anchors(data)
    loss, _, _ = module(data.input_ids_RT, data.features_RTC, data.loss_mask_RT.float())
    return step_of(module, loss, theirs)


def nemo_step(drafter: Drafter, target: Target, data: Data) -> Step:
    """NeMo AutoModel's; a row with several documents goes through its packing."""
    theirs = Qwen3DFlashDraftModel(their_config(drafter.shape))
    theirs.load_state_dict(drafter.state_dict())
    module = DFlashTrainerModule(
        draft_model=theirs,
        target_lm_head=target.model.lm_head,
        target_embed_tokens=target.model.get_input_embeddings(),
        mask_token_id=MASK,
        block_size=BLOCK,
        attention_backend="sdpa",
        num_anchors=data.anchor_RA.shape[1],
        loss_decay_gamma=GAMMA,
        sliding_window=drafter.shape.window,
    )
    module._sample_anchor_positions = fixed_anchors(data)
    packed: dict[str, Tensor] = {}
    if int(data.document_RT.max()):
        length_RD, remaining_RT = packing(data)
        packed = {"position_ids": data.position_RT, "seq_lens": length_RD, "doc_remaining": remaining_RT}
    out = module(data.input_ids_RT, data.features_RTC, data.loss_mask_RT.float(), **packed)
    return step_of(module, out.loss, theirs)


def speculators_step(theirs: SpeculatorsModel, data: Data) -> Step:
    """speculators', of a single row; its fused loss needs a GPU."""
    _, loss, _ = theirs(
        hidden_states=data.features_RTC,
        input_ids=data.input_ids_RT,
        loss_mask=data.loss_mask_RT.float(),
        verifier_last_hidden_states=data.last_hidden_RTD,
        document_ids=data.document_RT,
        position_ids=data.position_RT,
        loss_config=resolve_loss_config("ce", "eager"),
        gamma=GAMMA,
        max_anchors=data.anchor_RA.shape[1],
        per_position_loss_weight="fixed-exp-decay",
    )
    return step_of(theirs, loss, theirs)


def with_our_denominator(step: Step, data: Data) -> Step:
    """speculators divides by the count of supervised slots and a small constant; ours is the sum of their weights."""
    blocks = our_blocks(data)
    factor = (float(blocks.supervised_RAS.sum()) + 1e-5) / float(blocks.weight_RAS.sum())
    return Step(step.loss * factor, {name: gradient * factor for name, gradient in step.gradients.items()})


def targets_choice(target: Target, data: Data) -> Tensor:
    """What speculators trains on: at each position the token that the target would say after the one before, [R, T]."""
    decoder = target.model.get_decoder()
    said_RT = target.model.lm_head(decoder.norm(data.last_hidden_RTD)).argmax(-1)
    return said_RT.roll(1, dims=1)


def packing(data: Data) -> tuple[Tensor, Tensor]:
    """Document lengths of each row, and how many tokens of its document follow each token."""
    length_RD = torch.nn.functional.one_hot(data.document_RT).sum(1)
    return length_RD, length_RD.gather(1, data.document_RT) - 1 - data.position_RT


def seen_by_us(shape: DrafterShape, data: Data, window: int | None) -> Tensor:
    """Our table, [R, Q, T + Q]."""
    return visibility(
        data.document_RT,
        data.position_RT,
        data.anchor_RA,
        BLOCK,
        window=window,
        causal=shape.is_causal(window),
    )


def specforge_table(data: Data, window: int | None) -> Tensor:
    """SpecForge's mask; valid blocks only, since it masks an invalid block whole."""
    anchor_RA, valid_RA = fixed_anchors(data)()
    return create_dflash_sdpa_mask(anchor_RA, valid_RA, TOKENS, BLOCK, torch.device("cpu"), sliding_window=window)


def nemo_table(data: Data, window: int | None) -> Tensor:
    """NeMo's mask, with its documents."""
    anchor_RA, valid_RA = fixed_anchors(data)()
    document_RT = nemo_documents(packing(data)[0], TOKENS, torch.device("cpu"))
    mask = nemo_mask(
        anchor_RA,
        valid_RA,
        TOKENS,
        BLOCK,
        torch.device("cpu"),
        torch.float32,
        ctx_doc_id=document_RT,
        anchor_doc_id=document_RT.gather(1, anchor_RA),
        sliding_window=window,
    )
    return mask == 0


def speculators_table(data: Data) -> Tensor:
    """speculators' mask of a single row."""
    predicate, num_queries, num_keys = create_anchor_block_mask_mod(
        data.document_RT[0], TOKENS, data.anchor_RA[0].clamp(min=0), BLOCK
    )
    return create_mask(predicate, None, None, num_queries, num_keys, device="cpu")
