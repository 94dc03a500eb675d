"""Steps of other trainers on the same problem, where their packages are installed.

R rows, T context tokens, C captured layers.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from blockdraft.commands.bench_cases import Problem
from blockdraft.data.anchors import default_gamma
from blockdraft.models.formats import published_config


def peer_steps(problem: Problem, dtype: torch.dtype, say: Callable[[str], None]) -> dict[str, Callable[[], Tensor]]:
    """Forward and backward of each peer that can be imported; gradients are dropped at the end of the step."""
    steps: dict[str, Callable[[], Tensor]] = {}
    for make in (_specforge, _nemo):
        try:
            steps |= make(problem, dtype)
        except ImportError as error:
            say(f"{make.__name__[1:]} is left out: {error}")
    return steps


def _config(problem: Problem) -> Qwen3Config:
    config = Qwen3Config(**published_config(problem.shape, torch.bfloat16))
    config._attn_implementation = "flex_attention" if problem.features_RTC.device.type == "cuda" else "sdpa"
    return config


def _ends(problem: Problem) -> tuple[nn.Linear, nn.Module]:
    head_VD = problem.ends.head_weight
    head = nn.Linear(head_VD.shape[1], head_VD.shape[0], bias=False, device="meta")
    head.weight = nn.Parameter(head_VD, requires_grad=False)
    return head, problem.ends.embedding


def _stepper(module: nn.Module, drafter: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def step() -> Tensor:
        value = loss()
        value.backward()
        drafter.zero_grad(set_to_none=True)
        return value.detach()

    # Buffers of their own (NeMo's) start on the CPU.
    module.to(next(drafter.parameters()).device).train()
    return step


def _specforge(problem: Problem, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel

    config, device = _config(problem), problem.features_RTC.device
    head, embedding = _ends(problem)
    with torch.device(device):
        drafter = DFlashDraftModel(config).to(dtype)
    steps = {}
    for name, chunk in (("SpecForge", 128), ("SpecForge, no chunking", 0)):
        module = OnlineDFlashModel(
            draft_model=drafter,
            target_lm_head=head,
            target_embed_tokens=embedding,
            mask_token_id=problem.shape.mask_token_id,
            block_size=problem.shape.block_size,
            attention_backend=config._attn_implementation,
            num_anchors=problem.anchor_RA.shape[1],
            loss_decay_gamma=default_gamma(problem.shape.block_size),
            objective_chunk_blocks=chunk,
        )

        def loss(module: nn.Module = module) -> Tensor:
            value: Tensor = module(problem.input_ids_RT, problem.features_RTC, problem.loss_mask_RT)[0]
            return value

        steps[name] = _stepper(module, drafter, loss)
    return steps


def _nemo(problem: Problem, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    from nemo_automodel.components.speculative.dflash.core import DFlashTrainerModule
    from nemo_automodel.components.speculative.dflash.draft_qwen3 import Qwen3DFlashDraftModel

    config, device = _config(problem), problem.features_RTC.device
    head, embedding = _ends(problem)
    with torch.device(device):
        drafter = Qwen3DFlashDraftModel(config).to(dtype)
    module = DFlashTrainerModule(
        draft_model=drafter,
        target_lm_head=head,
        target_embed_tokens=embedding,
        mask_token_id=problem.shape.mask_token_id,
        block_size=problem.shape.block_size,
        attention_backend=config._attn_implementation,
        num_anchors=problem.anchor_RA.shape[1],
        loss_decay_gamma=default_gamma(problem.shape.block_size),
        loss_type="dflash",
    )

    def loss() -> Tensor:
        value: Tensor = module(problem.input_ids_RT, problem.features_RTC, problem.loss_mask_RT).loss
        return value

    return {"NeMo AutoModel": _stepper(module, drafter, loss)}
