"""One DFlash step of ours beside the public trainers': same weights, anchors and data, float32 on a CPU, tiny shapes.

`make parity` runs it in an environment of its own with specforge, nemo-automodel and speculators; the exit code is 1
when anything is not as expected.
"""

import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
from loguru import logger
from parity_trainers import (
    BLOCK,
    GAMMA,
    LAYER_IDS,
    MASK,
    TOKENS,
    VOCAB,
    Step,
    make_data,
    make_drafter,
    nemo_step,
    nemo_table,
    our_blocks,
    our_step,
    seen_by_us,
    specforge_step,
    specforge_table,
    speculators_step,
    speculators_table,
    targets_choice,
    tiny_target,
    with_our_denominator,
)
from speculators.convert.dflash.converter import DFlashConverter
from speculators.models.dflash import DFlashDraftModel as SpeculatorsModel
from speculators.models.dflash import core as speculators_core
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from blockdraft.models.attention import sdpa_attend
from blockdraft.models.drafter import Drafter
from blockdraft.models.formats import load_export, save_export
from blockdraft.models.speculators import Verifier, load_speculators, save_speculators
from blockdraft.models.target import Target
from blockdraft.training.step import drafter_hidden

TOLERANCE = 1e-5
"""Largest difference over the largest value of the tensor."""


class Check(NamedTuple):
    """A row of the table."""

    trainer: str
    case: str
    what: str
    difference: float
    limit: float
    is_equality: bool = True
    """False: a control, which must differ."""


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference over the largest value of theirs."""
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())


def _gap(ours: Step, theirs: Step) -> float:
    return abs(ours.loss - theirs.loss) / abs(theirs.loss)


def compare_steps(trainer: str, case: str, ours: Step, theirs: Step) -> Iterator[Check]:
    """Loss, and the gradient that differs most."""
    yield Check(trainer, case, "loss", _gap(ours, theirs), TOLERANCE)
    assert ours.gradients.keys() == theirs.gradients.keys()
    worst, name = max((relative(ours.gradients[n], g), n) for n, g in theirs.gradients.items())
    yield Check(trainer, case, f"{len(theirs.gradients)} gradients, worst {name}", worst, TOLERANCE)


def compare_tables(trainer: str, case: str, ours: Tensor, theirs: Tensor) -> Check:
    """Entries of the visibility table that differ."""
    count = int((ours != theirs.view(ours.shape)).sum())
    return Check(trainer, case, f"visibility, {ours.numel():,} entries", float(count), 0.0)


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
        theirs = specforge_step(drafter, target, data, 128, "dpace")
        weighted = our_step(make_drafter(**changes), target, data, objective="dpace")
        yield from compare_steps("SpecForge", f"{case}, dpace", weighted, theirs)
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
    # Blocks within their documents: it has no boundary there.
    step = speculators_step(theirs, data)
    ours_step = our_step(drafter, target, data, wanted_RT=targets_choice(target, data))
    yield from compare_steps("speculators", "two documents", ours_step, with_our_denominator(step, data))
    yield Check("speculators", "control: its own denominator", "loss", _gap(ours_step, step), TOLERANCE, False)
    own = our_step(make_drafter(), target, data)
    yield Check("speculators", "control: the row's own tokens", "loss", _gap(own, ours_step), TOLERANCE, False)
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
