"""N slots, D width, V ids of the head, R rows, T tokens, A anchors, S drafted slots, C captured layers."""

import math

import pytest
import torch
from torch import Tensor

from blockdraft.config import LossConfig, OptimConfig
from blockdraft.data.loader import Fill, Loader
from blockdraft.models.attention import sdpa_attend
from blockdraft.models.ends import Ends
from blockdraft.models.target import Target
from blockdraft.runtime.slots import Filler, Slot
from blockdraft.runtime.transfers import to_device
from blockdraft.runtime.warm_up import warm_up_drafter
from blockdraft.training.loss import dpace_weights, slot_kl, target_choice
from blockdraft.training.metrics import report
from blockdraft.training.step import DrafterStep, drafter_hidden, states_before
from integration.tiny import HYBRIDS, tiny_drafter, tiny_target
from unit.data.test_loader import BLOCK_SIZE, LENGTHS, config, store_of

CPU = torch.device("cpu")
NUM_SLOTS = BLOCK_SIZE - 1
VOCAB = 37
ONES = (1.0,) * BLOCK_SIZE


def random_head(**options) -> Ends:
    generator = torch.Generator().manual_seed(0)
    weight_VD = torch.randn(VOCAB, 12, generator=generator, dtype=torch.float64)
    return Ends(torch.nn.Embedding(VOCAB, 12).double(), weight_VD, **options)


def random_states(seed: int, num_slots: int = 50) -> Tensor:
    return torch.randn(num_slots, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# dpace


def reference_weights(ce: list[float], supervised: list[bool], alpha: float = 0.5) -> list[float]:
    """One block, written out: docs/algorithm.md, section 5."""
    reached, product = [], 1.0
    for loss, is_supervised in zip(ce, supervised, strict=True):
        product *= (1 - alpha) * math.exp(-loss) + alpha if is_supervised else 1.0
        reached.append(product)
    return [
        sum(reached[m] for m in range(k, len(ce)) if supervised[m]) if supervised[k] else 0.0 for k in range(len(ce))
    ]


def test_dpace_weights_equal_the_formula():
    generator = torch.Generator().manual_seed(0)
    ce_RAS = torch.rand(3, 20, 7, generator=generator) * 8
    # Gaps included: an unsupervised slot in the middle breaks nothing.
    supervised_RAS = torch.rand(3, 20, 7, generator=generator) < 0.7
    supervised_RAS[0, 0], supervised_RAS[0, 1] = True, False
    found_RAS = dpace_weights(ce_RAS.requires_grad_(), supervised_RAS)
    assert not found_RAS.requires_grad
    expected = [
        [reference_weights(ce, seen) for ce, seen in zip(*row, strict=True)]
        for row in zip(ce_RAS.double().tolist(), supervised_RAS.tolist(), strict=True)
    ]
    torch.testing.assert_close(found_RAS.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=1e-6)


def test_dpace_weighs_a_block_by_how_far_it_is_accepted():
    supervised_13 = torch.ones(1, 1, 3, dtype=torch.bool)
    certain = dpace_weights(torch.zeros(1, 1, 3), supervised_13)
    assert certain.tolist() == [[[3.0, 2.0, 1.0]]]
    hopeless = dpace_weights(torch.full((1, 1, 3), 100.0), supervised_13)
    torch.testing.assert_close(hopeless, torch.tensor([[[0.875, 0.375, 0.125]]]))


# kl


@pytest.mark.parametrize("options", [{}, {"logit_multiplier": 0.125}, {"logit_softcap": 3.0}], ids=str)
@pytest.mark.parametrize("chunk_rows", [1, 7, 4096])
def test_kl_and_its_gradient_equal_the_formula_in_float64(options, chunk_rows):
    ends, final_ND = random_head(**options), random_states(1)
    hidden_ND, weight_N = random_states(2).requires_grad_(), torch.linspace(0, 1, 50, dtype=torch.float64)
    found = slot_kl(hidden_ND, final_ND, ends, chunk_rows)
    (gradient_ND,) = torch.autograd.grad((found.kl_N * weight_N).sum(), hidden_ND)

    def probability(state_ND: Tensor) -> Tensor:
        product_NV = state_ND @ ends.head_weight.T * options.get("logit_multiplier", 1.0)
        cap = options.get("logit_softcap")
        logits_NV = product_NV if cap is None else torch.tanh(product_NV / cap) * cap
        return torch.exp(logits_NV) / torch.exp(logits_NV).sum(-1, keepdim=True)

    p_NV, q_NV = probability(final_ND), probability(hidden_ND)
    expected_N = (p_NV * torch.log(p_NV / q_NV)).sum(-1)
    (expected_ND,) = torch.autograd.grad((expected_N * weight_N).sum(), hidden_ND)
    assert found.kl_N.dtype == torch.float32
    torch.testing.assert_close(found.kl_N.double(), expected_N, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(gradient_ND, expected_ND, atol=2e-6, rtol=2e-6)
    assert torch.equal(found.drafted_N, q_NV.argmax(-1))
    assert torch.equal(found.target_N, p_NV.argmax(-1))
    assert torch.equal(target_choice(final_ND, ends, chunk_rows), p_NV.argmax(-1))


def test_kl_is_nothing_where_both_agree_and_positive_elsewhere():
    ends, state_ND = random_head(), random_states(1)
    assert slot_kl(state_ND, state_ND, ends, 16).kl_N.abs().max() < 1e-6
    assert (slot_kl(random_states(2), state_ND, ends, 16).kl_N > 0).all()


def test_no_logits_are_kept_for_the_backward():
    ends, kept = random_head(), list[torch.Size]()
    hidden_ND = random_states(2).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved.shape) or saved, lambda saved: saved):
        slot_kl(hidden_ND, random_states(1), ends, 7).kl_N.sum().backward()
    assert kept, "the hook saw nothing"
    # The head itself is VOCAB x 12; a chunk's logits would be 7 x VOCAB.
    assert [shape for shape in kept if shape[-1:] == (VOCAB,)] == []


# The target's final states


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3", "gemma3", *HYBRIDS])
def test_the_final_column_is_what_the_head_reads(name):
    target = tiny_target(name, layer_ids=(1, 3))
    ids_BS = torch.tensor([list(range(3, 30)), list(range(40, 67))])
    columns: dict[int, Tensor] = {}
    target.capture_with_final(ids_BS, columns.__setitem__)
    assert list(columns) == [0, 1, 2]
    output = target.model(ids_BS, use_cache=False, output_hidden_states=True)
    assert torch.equal(columns[2], output.hidden_states[-1])
    torch.testing.assert_close(target.ends.logits(columns[2]), output.logits, atol=1e-5, rtol=1e-5)
    # The captured layers are the same, and the next capture stops early again.
    assert torch.equal(torch.cat([columns[0], columns[1]], dim=-1), target.features(ids_BS))
    again: list[int] = []
    target.capture(ids_BS, lambda column, _hidden: again.append(column))
    assert again == [0, 1]


def test_slot_k_is_foretold_one_token_before_it():
    state_RTD = torch.arange(2 * 6).view(2, 6, 1).float()
    found = states_before(state_RTD, torch.tensor([[0, 3], [-1, 5]]), 3)
    assert found[..., 0].tolist() == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [11, 11, 11]]]


# The step


def step_for(target: Target, loss: LossConfig) -> DrafterStep:
    return DrafterStep(
        tiny_drafter(target, BLOCK_SIZE),
        target.ends,
        target.ends,
        loss=loss,
        optim=OptimConfig(lr=1e-3, warmup=0.0),
        total_steps=10,
        make_attend=sdpa_attend,
    )


def filled(target: Target, fill: Fill, num_rows: int, with_final: bool = True) -> Slot:
    width = target.hidden_size * (len(target.layer_ids) + with_final)
    slot = Slot(num_rows, 32, width, torch.float32, CPU)
    slot.buffer.fill_(float("nan"))
    Filler(target, num_rows, 32, with_final=with_final).fill(slot, fill)
    return slot


def first_fill(**changes) -> Fill:
    (fill,) = Loader(store_of(LENGTHS), config(**changes)).fills(0, 1)  # type: ignore[arg-type]
    return fill


def gradients_of(step: DrafterStep, slot: Slot, one) -> list[Tensor]:
    step.micro_batch(slot.features_RTC, to_device(one, CPU), one.denominator)
    return [gradient.clone() for gradient in step.optimizer.gradients()]


def target_logits(target: Target, one) -> Tensor:
    """The target's own logits one token before each drafted slot, each document alone, [R, A, S, V]."""
    logits_RTV = torch.zeros(*one.input_ids_RT.shape, target.vocab_size)
    for row in range(len(one.input_ids_RT)):
        for number in one.document_RT[row].unique().tolist():
            here_T = one.document_RT[row] == number
            if number >= 0:
                ids_1S = one.input_ids_RT[row][here_T][None]
                logits_RTV[row, here_T] = target.model(ids_1S, use_cache=False).logits[0]
    out = torch.zeros(*one.label_RAS.shape, target.vocab_size)
    for r, a, s in one.supervised_RAS.nonzero().tolist():
        out[r, a, s] = logits_RTV[r, one.anchor_RA[r, a] + s]
    return out


def reference_gradients(target: Target, slot: Slot, one, loss_of) -> list[Tensor]:
    """Gradients by plain autograd over whole logits; `loss_of(drafter's log probabilities)` is the loss."""
    step = step_for(target, LossConfig())
    width = step.drafter.fc.in_features
    blocks = to_device(one, CPU)
    hidden_RALD = drafter_hidden(step.drafter, step.ends, slot.features_RTC[..., :width], blocks, sdpa_attend)
    loss_of(target.ends.logits(hidden_RALD[:, :, 1:]).log_softmax(-1)).backward()
    return [gradient.clone() for gradient in step.optimizer.gradients()]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    assert any((gradient != 0).any() for gradient in expected)
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, its, atol=2e-6, rtol=1e-4)


def test_kl_of_a_step_is_against_the_targets_own_distribution():
    target, fill = tiny_target("qwen3", initializer_range=0.1), first_fill()
    (one,), slot = fill.passes, filled(tiny_target("qwen3", initializer_range=0.1), fill, 2)
    with torch.no_grad():
        log_p_RASV = target_logits(target, one).log_softmax(-1)

    def loss_of(log_q_RASV: Tensor) -> Tensor:
        kl_RAS = (log_p_RASV.exp() * (log_p_RASV - log_q_RASV)).sum(-1)
        return (kl_RAS * one.weight_RAS).sum() / one.weight_RAS.sum()

    step = step_for(target, LossConfig(objective="kl", chunk_rows=5))
    assert_close(gradients_of(step, slot, one), reference_gradients(target, slot, one, loss_of))


@pytest.mark.parametrize("objective", ["ce", "kl"])
def test_labels_may_be_the_targets_own_choice(objective):
    target, fill = tiny_target("qwen3"), first_fill()
    (one,), slot = fill.passes, filled(target, fill, 2)
    with torch.no_grad():
        choice_RAS = target_logits(target, one).argmax(-1)
    assert (choice_RAS != one.label_RAS)[one.supervised_RAS].any()
    own = one._replace(label_RAS=torch.where(one.supervised_RAS, choice_RAS, 0))
    by_argmax = step_for(target, LossConfig(objective=objective, labels="argmax"))
    by_data = step_for(target, LossConfig(objective=objective))
    assert_close(gradients_of(by_argmax, slot, one), gradients_of(by_data, slot, own))
    found, expected = report(by_argmax.finish(0)), report(by_data.finish(0))
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert found._replace(loss=0.0) == expected._replace(loss=0.0)


@pytest.mark.parametrize(("objective", "labels"), [("kl", "data"), ("kl", "argmax"), ("ce", "data"), ("ce", "argmax")])
def test_what_counts_as_right_is_the_chosen_label(objective, labels):
    # The drafter's choice, the target's and the data's differ in turn, so that no count is that of another label.
    target, fill = tiny_target("qwen3", initializer_range=0.1), first_fill()
    (one,), slot = fill.passes, filled(target, fill, 2)
    step = step_for(target, LossConfig(objective=objective, labels=labels, chunk_rows=5))
    width = step.drafter.fc.in_features
    with torch.no_grad():
        blocks, choice_RAS = to_device(one, CPU), target_logits(target, one).argmax(-1)
        hidden_RALD = drafter_hidden(step.drafter, step.ends, slot.features_RTC[..., :width], blocks, sdpa_attend)
        drafted_RAS = target.ends.logits(hidden_RALD[:, :, 1:]).argmax(-1)
    is_met_RAS = torch.rand(drafted_RAS.shape, generator=torch.Generator().manual_seed(0)) < 0.7
    one = one._replace(label_RAS=torch.where(is_met_RAS & one.supervised_RAS, drafted_RAS, one.label_RAS))
    wanted_RAS = one.label_RAS if labels == "data" else choice_RAS
    gradients_of(step, slot, one)
    found = report(step.finish(0))
    hits_RAS = (drafted_RAS == wanted_RAS) & one.supervised_RAS
    counts_S, slots_S = hits_RAS.sum((0, 1)), one.supervised_RAS.sum((0, 1))
    assert found.accuracy_per_slot == pytest.approx((counts_S / slots_S).tolist())
    runs = []
    for hits, seen in zip(hits_RAS.flatten(0, 1).tolist(), one.supervised_RAS.flatten(0, 1).tolist(), strict=True):
        scored = [hit for hit, is_seen in zip(hits, seen, strict=True) if is_seen]
        if seen[0]:
            runs.append([*scored, False].index(False))
    assert found.acceptance_length == pytest.approx(1 + sum(runs) / len(runs))
    # Almost nothing that a random drafter says is right but where the data were made to say it.
    assert (found.accuracy > 0.5) is (labels == "data")


def test_dpace_of_a_step_equals_the_formula():
    target, fill = tiny_target("qwen3"), first_fill(weight_L=ONES)
    (one,), slot = fill.passes, filled(target, fill, 2, with_final=False)
    assert one.denominator == int(one.supervised_RAS.sum())

    def loss_of(log_q_RASV: Tensor) -> Tensor:
        ce_RAS = -log_q_RASV.gather(-1, one.label_RAS[..., None])[..., 0]
        weights = [
            [reference_weights(ce, seen) for ce, seen in zip(*row, strict=True)]
            for row in zip(ce_RAS.tolist(), one.supervised_RAS.tolist(), strict=True)
        ]
        return (ce_RAS * torch.tensor(weights)).sum() / one.supervised_RAS.sum()

    step = step_for(target, LossConfig(objective="dpace", chunk_rows=5))
    assert_close(gradients_of(step, slot, one), reference_gradients(target, slot, one, loss_of))


@pytest.mark.parametrize("objective", ["ce", "dpace", "kl"])
def test_how_rows_fall_into_micro_batches_does_not_matter(objective):
    # Case 7.
    target = tiny_target("qwen3", initializer_range=0.1)
    fill = first_fill(num_rows=4, weight_L=ONES if objective == "dpace" else config().weight_L)
    (one,), slot = fill.passes, filled(target, fill, 4)
    assert len(set(one.supervised_RAS.sum((1, 2)).tolist())) > 1, "rows that weigh alike would hide a mean"
    loss = LossConfig(objective=objective, labels="argmax")
    whole, parts = step_for(target, loss), step_for(target, loss)
    expected = gradients_of(whole, slot, one)
    for row in (2, 0, 3, 1):
        tensors = {key: value[row : row + 1] for key, value in one._asdict().items() if isinstance(value, Tensor)}
        blocks = to_device(one._replace(**tensors), CPU)
        parts.micro_batch(slot.features_RTC[row : row + 1], blocks, one.denominator)
    assert_close([gradient.clone() for gradient in parts.optimizer.gradients()], expected)
    assert report(parts.finish(0)).loss == pytest.approx(report(whole.finish(0)).loss, rel=1e-5)


@pytest.mark.parametrize("loss", [LossConfig(objective="kl"), LossConfig(objective="dpace", labels="argmax")], ids=str)
def test_warm_up_works_for_every_objective(loss):
    target = tiny_target("llama")
    loader = Loader(store_of(LENGTHS), config())  # type: ignore[arg-type]
    (fill,) = loader.fills(0, 1)
    step = step_for(target, loss)
    warm_up_drafter(step, filled(target, fill, 2), loader)
    assert report(step.finish(0)).blocks == 0
