"""One DFlash step of ours beside the public trainers': same weights, anchors and data, float32 on a CPU, tiny shapes.

`make parity` runs it in an environment of its own with specforge, nemo-automodel and speculators; the exit code is 1
when anything differs. Anchors are fixed by replacing each trainer's sampler; nothing else of theirs is changed.

R rows, T context tokens, A anchors, L block positions, Q = A * L block tokens, D width, C captured layers.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from loguru import logger
from nemo_automodel.components.attention.dflash_mask import create_dflash_sdpa_mask as nemo_mask
from nemo_automodel.components.speculative.dflash.core import DFlashTrainerModule
from nemo_automodel.components.speculative.dflash.core import _context_doc_ids as nemo_documents
from nemo_automodel.components.speculative.dflash.draft_qwen3 import Qwen3DFlashDraftModel
from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel, create_dflash_sdpa_mask
from specforge.modeling.draft.dflash import DFlashDraftModel as SpecForgeModel
from speculators.convert.dflash.converter import DFlashConverter
from speculators.models.dflash import DFlashDraftModel as SpeculatorsModel
from speculators.models.dflash import core as speculators_core
from speculators.models.dflash.attention import create_anchor_block_mask_mod
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask
from transformers import Qwen3Config, Qwen3ForCausalLM

from blockdraft.config import LossConfig, OptimConfig
from blockdraft.data.anchors import block_labels, position_weights
from blockdraft.models.attention import sdpa_attend
from blockdraft.models.blocks import visibility
from blockdraft.models.drafter import Drafter, DrafterShape
from blockdraft.models.formats import load_export, published_config, save_export
from blockdraft.models.speculators import Verifier, load_speculators, save_speculators
from blockdraft.models.target import Target
from blockdraft.training.step import Blocks, DrafterStep, drafter_hidden

TOLERANCE = 1e-5
"""Largest difference over the largest value of the tensor."""
BLOCK, GAMMA, TOKENS, VOCAB, WIDTH, MASK = 8, 4.0, 48, 101, 32, 100
LAYER_IDS = (1, 3, 4)


class Check(NamedTuple):
    """A row of the table."""

    trainer: str
    case: str
    what: str
    difference: float
    limit: float
    is_equality: bool = True
    """False: a control, which must differ."""


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


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference over the largest value of theirs."""
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())


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


def our_blocks(data: Data, after_gap: bool = True) -> Blocks:
    """As the loader makes them."""
    labels = block_labels(
        data.input_ids_RT.numpy(),
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


def our_step(drafter: Drafter, target: Target, data: Data, after_gap: bool = True) -> Step:
    """The trainer's own step on one micro-batch, without the update."""
    step = DrafterStep(
        drafter,
        target.ends,
        target.ends,
        loss=LossConfig(gamma=GAMMA, after_gap=after_gap),
        optim=OptimConfig(),
        total_steps=1,
        make_attend=sdpa_attend,
    )
    blocks = our_blocks(data, after_gap)
    step.micro_batch(data.features_RTC, blocks, float(blocks.weight_RAS.sum()))
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


def specforge_step(drafter: Drafter, target: Target, data: Data, chunk_blocks: int) -> Step:
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


def packing(data: Data) -> tuple[Tensor, Tensor]:
    """Document lengths of each row, and how many tokens of its document follow each token."""
    length_RD = torch.nn.functional.one_hot(data.document_RT).sum(1)
    return length_RD, length_RD.gather(1, data.document_RT) - 1 - data.position_RT


def _gap(ours: Step, theirs: Step) -> float:
    return abs(ours.loss - theirs.loss) / abs(theirs.loss)


def compare_steps(trainer: str, case: str, ours: Step, theirs: Step) -> Iterator[Check]:
    """Loss, and the gradient that differs most."""
    yield Check(trainer, case, "loss", _gap(ours, theirs), TOLERANCE)
    assert ours.gradients.keys() == theirs.gradients.keys()
    worst, name = max((relative(ours.gradients[n], g), n) for n, g in theirs.gradients.items())
    yield Check(trainer, case, f"{len(theirs.gradients)} gradients, worst {name}", worst, TOLERANCE)


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


def compare_tables(trainer: str, case: str, ours: Tensor, theirs: Tensor) -> Check:
    """Entries of the visibility table that differ."""
    count = int((ours != theirs.view(ours.shape)).sum())
    return Check(trainer, case, f"visibility, {ours.numel():,} entries", float(count), 0.0)


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


def against_specforge(target: Target) -> Iterator[Check]:
    """Whole rows of one document; a block that runs past the end of its row; layers with and without a window."""
    data = make_data(target, [[2, 3, 9, 17, 30, 44], [0, 8, 12, 13, 39, 45]], [[TOKENS], [TOKENS]])
    for case, changes in (
        ("full attention", {}),
        ("window 12 in layer 1", {"window": 12, "window_layers": (1,), "window_causal": True}),
    ):
        drafter = make_drafter(**changes)
        ours = our_step(drafter, target, data)
        for chunk in (128, 2, 0):
            theirs = specforge_step(drafter, target, data, chunk)
            yield from compare_steps("SpecForge", f"{case}, chunks of {chunk or 'all'}", ours, theirs)
        window = drafter.shape.window
        table = specforge_table(data, window)
        yield compare_tables("SpecForge", case, seen_by_us(drafter.shape, data, window), table)
    # What would be missed if the comparison could not fail: our own default beside theirs, and a window one shorter.
    other = our_step(make_drafter(**changes), target, data, after_gap=False)
    yield Check("SpecForge", "control: our default stops at the first gap", "loss", _gap(other, ours), TOLERANCE, False)
    other = our_step(make_drafter(**changes | {"window": 11}), target, data)
    yield Check("SpecForge", "control: window 11 beside 12", "loss", _gap(other, ours), TOLERANCE, False)


def against_nemo(target: Target) -> Iterator[Check]:
    """One document a row, several documents a row, windows in all layers; an invalid block in each."""
    whole = make_data(target, [[2, 3, 9, 17, 30, 44], [0, 8, 12, 13, 39, -1]], [[TOKENS], [TOKENS]])
    # Its packing wants whole blocks inside their documents.
    packed = make_data(target, [[2, 3, 9, 22, 30, -1], [0, 10, 12, 13, 33, 40]], [[20, 28], [9, 12, 27]])
    window = {"window": 12, "window_layers": (0, 1, 2)}
    for case, data, changes in (
        ("full attention", whole, {}),
        ("several documents a row", packed, {}),
        ("window 12 in all layers", whole, window),
        ("window 12, several documents", packed, window),
    ):
        drafter = make_drafter(**changes)
        yield from compare_steps("NeMo", case, our_step(drafter, target, data), nemo_step(drafter, target, data))
        table = nemo_table(data, drafter.shape.window)
        yield compare_tables("NeMo", case, seen_by_us(drafter.shape, data, drafter.shape.window), table)


def against_speculators(target: Target, place: Path) -> Iterator[Check]:
    """Its class loads our export, and computes the same hidden states; what it writes, `import` reads."""
    data = make_data(target, [[2, 3, 9, 22, 30, 38]], [[20, 28]])
    drafter = make_drafter()
    verifier = Verifier(str(place / "target"), ["Qwen3ForCausalLM"])
    target.model.save_pretrained(place / "target")
    save_speculators(drafter, place / "export", verifier, torch.float32)
    theirs = SpeculatorsModel.from_pretrained(place / "export", dtype=torch.float32)
    found = theirs.state_dict()
    wrong = [name for name, weight in drafter.state_dict().items() if not torch.equal(found[name], weight)]
    yield Check("speculators", "our export in its class", "tensors that differ", float(len(wrong)), 0.0)
    unset = [name for name, weight in found.items() if weight.isnan().any()]
    yield Check("speculators", "our export in its class", "tensors left unset", float(len(unset)), 0.0)
    expected = ([layer + 1 for layer in LAYER_IDS], BLOCK, MASK, VOCAB)
    read = (theirs.target_layer_ids, theirs.block_size, theirs.mask_token_id, theirs.draft_vocab_size)
    yield Check("speculators", "our export in its class", "ids, block, mask, vocabulary", float(expected != read), 0.0)

    theirs.config.transformer_layer_config._attn_implementation = "sdpa"
    theirs._create_mask_fn = create_mask
    speculators_core.select_anchors = lambda *_arguments: (data.anchor_RA[0], data.anchor_RA[0] >= 0)
    hidden, *_ = theirs._backbone_forward(
        data.features_RTC,
        data.input_ids_RT,
        data.loss_mask_RT,
        data.last_hidden_RTD,
        data.document_RT,
        data.position_RT,
        max_anchors=data.anchor_RA.shape[1],
    )
    ours = drafter_hidden(drafter, target.ends, data.features_RTC, our_blocks(data), sdpa_attend)
    yield Check("speculators", "two documents", "hidden states", relative(ours.view(hidden.shape), hidden), TOLERANCE)
    table = speculators_table(data)
    yield compare_tables("speculators", "two documents", seen_by_us(drafter.shape, data, None), table)

    theirs.save_pretrained(place / "saved")
    again = load_speculators(place / "saved", num_target_layers=6).drafter
    yield equal_drafters("what it saves, read by import", drafter, again)
    save_export(drafter, place / "published", torch.float32)
    DFlashConverter().convert(place / "published", place / "converted", str(place / "target"), validate=False)
    again = load_speculators(place / "converted", num_target_layers=6).drafter
    yield equal_drafters("its converter on our published export", load_export(place / "published"), again)


def equal_drafters(case: str, ours: Drafter, again: Drafter) -> Check:
    """Whether shape and every tensor came back."""
    wrong = [name for name, weight in ours.state_dict().items() if not torch.equal(weight, again.state_dict()[name])]
    if again.shape != ours.shape:
        wrong.append("shape")
    return Check("speculators", case, "tensors and shape that differ", float(len(wrong)), 0.0)


def main() -> int:
    """Prints the table; 1 if anything differs."""
    torch.set_num_threads(1)
    logger.remove()
    target = Target(tiny_target(), LAYER_IDS)
    with tempfile.TemporaryDirectory() as place:
        checks = [*against_specforge(target), *against_nemo(target), *against_speculators(target, Path(place))]
    names = ("torch", "transformers", "specforge", "nemo-automodel", "speculators")
    print(", ".join(f"{name} {metadata.version(name)}" for name in names))
    print(f"float32, CPU, {TOKENS} tokens, blocks of {BLOCK}, gamma {GAMMA:g}, limit {TOLERANCE:g} relative\n")
    print("| trainer | case | what | difference | |\n|---|---|---|---|---|")
    failed = 0
    for check in checks:
        is_equal = check.difference <= check.limit
        failed += is_equal != check.is_equality
        verdict = ("equal" if is_equal else "differs") + ("" if is_equal == check.is_equality else ": WRONG")
        print(f"| {check.trainer} | {check.case} | {check.what} | {check.difference:.2g} | {verdict} |")
    print(f"\n{len(checks)} comparisons, {failed} wrong")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
