"""Steps of other trainers on the same problem, where their packages are installed.

R rows, T context tokens, C captured layers.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from blockdraft.commands.bench_cases import Problem
from blockdraft.data.anchors import default_gamma
from blockdraft.models.formats import published_config

PEERS: Final = ("specforge", "nemo", "speculators")


def peer_steps(
    problem: Problem, dtype: torch.dtype, names: Iterable[str], attempt: Callable[[str, Callable[[], None]], None]
) -> dict[str, Callable[[], Tensor]]:
    """Forward and backward of each peer that could be built; gradients are dropped at the end of the step."""
    makers = dict(zip(PEERS, (_specforge, _nemo, _speculators), strict=True))
    steps: dict[str, Callable[[], Tensor]] = {}
    for name in names:
        attempt(f"building {name}", lambda make=makers[name]: steps.update(make(problem, dtype)))
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
    is_checked = False

    def step() -> Tensor:
        nonlocal is_checked
        value = loss()
        value.backward()
        if not is_checked:
            _check_gradients(drafter)
            is_checked = True
        drafter.zero_grad(set_to_none=True)
        return value.detach()

    # Buffers of their own (NeMo's) start on the CPU.
    module.to(next(drafter.parameters()).device).train()
    return step


def _check_gradients(drafter: nn.Module) -> None:
    """A step that leaves a weight without gradient does less than is timed."""
    for name, weight in drafter.named_parameters():
        if weight.requires_grad and (weight.grad is None or not bool(weight.grad.any())):
            raise ArithmeticError(f"the step leaves {name} without a gradient")


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


def _speculators(problem: Problem, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

    shape, device = problem.shape, problem.features_RTC.device
    on_gpu = device.type == "cuda"
    layer = _config(problem)
    if on_gpu:
        layer._attn_implementation = "simple_flex_attention"
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=shape.vocab_size,
        block_size=shape.block_size,
        # It counts the embedding's output as layer 0.
        aux_hidden_state_layer_ids=[index + 1 for index in shape.target_layer_ids],
        mask_token_id=shape.mask_token_id,
    )
    head, embedding = _ends(problem)
    with torch.device(device):
        drafter = DFlashDraftModel(config).to(dtype)
        last_RTD = torch.randn(*problem.input_ids_RT.shape, shape.hidden_size, dtype=dtype)
    # What it reads from the target's checkpoint, NaN without one.
    drafter.embed_tokens = embedding
    drafter.lm_head = drafter.verifier_lm_head = head
    nn.init.ones_(drafter.verifier_norm.weight)
    steps = {}
    # Its fused kernels need a GPU, and Dynamo of torch 2.11 refuses them: two of its tuners share a list.
    for backend in ("fused", "eager") if on_gpu else ("eager",):
        loss_config = resolve_loss_config("ce", backend)

        def loss(loss_config: Any = loss_config) -> Tensor:
            value: Tensor = drafter(
                hidden_states=problem.features_RTC,
                input_ids=problem.input_ids_RT,
                loss_mask=problem.loss_mask_RT,
                verifier_last_hidden_states=last_RTD,
                document_ids=problem.document_RT,
                loss_config=loss_config,
                gamma=default_gamma(shape.block_size),
                max_anchors=problem.anchor_RA.shape[1],
                per_position_loss_weight="fixed-exp-decay",
            )[1]
            return value

        steps[f"speculators, {backend} loss"] = _stepper(drafter, drafter, loss)
    return steps
