"""The drafter without a compiler beside the plain one: numbers, gradients and their order, work, and what is kept.

R rows, T context tokens, A anchors, L block size, D width.
"""

import dataclasses
import sys

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from blockdraft.models.attention import sdpa_attend
from blockdraft.models.blocks import block_positions
from blockdraft.models.compiled import compile_drafter
from blockdraft.models.drafter import Drafter
from blockdraft.models.joined_weights import joined
from blockdraft.models.layer_ops import EAGER_OPS
from blockdraft.models.own_layers import KernelDrafter, check_current
from blockdraft.training import buckets
from blockdraft.training.buckets import GradientBuckets
from integration.tiny import tiny_drafter, tiny_target
from interpreted import run_interpreted
from unit.models.test_blocks import row
from unit.models.test_compiled import Noted

OPTIONS = (
    {},
    {"causal": True},
    {"num_layers": 3, "window": 5, "window_layers": (0, 1)},
    {"window": 5, "window_layers": (1,)},
    {"num_layers": 1},
)


def build(**options) -> Drafter:
    shape = tiny_drafter(tiny_target("llama"), 4).shape
    drafter = Drafter(dataclasses.replace(shape, **options))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in drafter.parameters():
            # Weights of norms too, so that none could be left out unseen.
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2 + (weight.dim() == 1))
    return drafter


def problem(drafter: Drafter) -> tuple[Tensor, ...]:
    """Two rows, the first of two documents; the last block of the second is invalid."""
    generator = torch.Generator().manual_seed(0)
    rows = [row(20, 12), row(9, 20, padding=3)]
    document_RT, position_RT = (torch.cat(parts) for parts in zip(*rows, strict=True))
    anchor_RA = torch.tensor([[3, 4, 7, 25], [2, 8, 20, -1]])
    features_RTC = torch.randn(2, 32, drafter.fc.in_features, generator=generator)
    first_RAD = torch.randn(2, 5, drafter.shape.hidden_size, generator=generator)
    # The mask token's embedding, which an invalid block has in slot 0 too.
    first_RAD[:, -1] = first_RAD[0, -1]
    first_RAD[1, 3] = first_RAD[0, -1]
    return document_RT, position_RT, anchor_RA, features_RTC, first_RAD


def forward(run, drafter: Drafter, numbers: tuple[Tensor, ...], make_attend=sdpa_attend) -> Tensor:
    document_RT, position_RT, anchor_RA, features_RTC, first_RAD = numbers
    block_position_RQ = block_positions(position_RT, anchor_RA, drafter.shape.block_size)
    attend = make_attend(drafter.shape, document_RT, position_RT, anchor_RA)
    return run(features_RTC, position_RT, first_RAD.to(drafter.dtype), block_position_RQ, attend)


def lose(hidden_RND: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(hidden_RND.shape, generator=generator).to(hidden_RND.device)
    return (hidden_RND * weights.to(hidden_RND.dtype)).sum()


def results(run, drafter: Drafter, numbers: tuple[Tensor, ...], make_attend=sdpa_attend) -> dict[str, Tensor]:
    drafter.zero_grad()
    hidden_RND = forward(run, drafter, numbers, make_attend)
    lose(hidden_RND).backward()
    gradients = {name: weight.grad for name, weight in drafter.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    return {"hidden": hidden_RND.detach()} | gradients


def distance(found: Tensor, reference: Tensor) -> float:
    return float((found.double() - reference.double()).norm() / reference.double().norm())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_numbers_and_gradients_are_the_plain_drafters(options):
    drafter = build(**options)
    numbers = problem(drafter)
    plain = results(compile_drafter(drafter, "nothing"), drafter, numbers)
    found = results(compile_drafter(drafter, "kernels"), drafter, numbers)
    for name, wanted in plain.items():
        assert distance(found[name], wanted) < (1e-6 if name == "hidden" else 1e-5), name


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_in_bfloat16_no_further_from_exact_than_the_plain_drafter(options):
    drafter = build(**options).to(torch.bfloat16)
    numbers = problem(drafter)
    numbers = (*numbers[:3], *(value.bfloat16() for value in numbers[3:]))
    plain = results(compile_drafter(drafter, "nothing"), drafter, numbers)
    found = results(compile_drafter(drafter, "kernels"), drafter, numbers)
    wide = Drafter(drafter.shape).double()
    wide.load_state_dict(drafter.state_dict())
    exact = results(compile_drafter(wide, "nothing"), wide, (*numbers[:3], *(value.double() for value in numbers[3:])))
    # Of all matrices together: single ones are off by chance at these widths.
    for names in (["hidden"], [name for name in plain if name != "hidden"]):
        mine, its = (sum(distance(one[name], exact[name]) for name in names) for one in (found, plain))
        assert mine <= 1.05 * its


def test_float64_stays_float64():
    drafter = build().double()
    numbers = problem(drafter)
    numbers = (*numbers[:3], *(value.double() for value in numbers[3:]))
    plain = results(compile_drafter(drafter, "nothing"), drafter, numbers)
    found = results(compile_drafter(drafter, "kernels"), drafter, numbers)
    # The plain norms compute in float32.
    assert all(distance(found[name], wanted) < 1e-6 for name, wanted in plain.items())


def added(_into, one, two, out_shape: tuple[int, int]) -> int:
    """Operations of a product that is added in place, of its shapes."""
    assert (one[0], two[1]) == out_shape
    return 2 * one[0] * one[1] * two[1]


def products(run, drafter: Drafter, numbers: tuple[Tensor, ...]) -> int:
    """Operations of all matrix products of a forward and backward."""
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: added}) as counter:
        results(run, drafter, numbers)
    counts = counter.get_flop_counts()["Global"]
    return sum(count for one, count in counts.items() if one in (torch.ops.aten.mm, torch.ops.aten.addmm_))


@pytest.mark.parametrize("num_layers", [1, 2, 4])
def test_the_first_layer_multiplies_a_mask_tokens_row_once(num_layers):
    drafter = build(num_layers=num_layers)
    numbers, shape = problem(drafter), drafter.shape
    heads, groups = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    blocks, first, drafted = 2 * 4 * 4, 2 * 5, 2 * 4 * 3
    asking = drafted if num_layers == 1 else blocks
    less = (asking - first) * heads + (blocks - first) * 2 * groups
    plain, found = (products(compile_drafter(drafter, how), drafter, numbers) for how in ("nothing", "kernels"))
    # Forward, d(input) and d(weight) of queries, keys and values.
    assert plain - found == 3 * 2 * shape.hidden_size * less


def test_nothing_depends_on_what_a_tensor_holds():
    # Tensors without numbers: whatever read one would raise.
    drafter = build(num_layers=3).to("meta")
    numbers = tuple(value.to("meta") for value in problem(drafter))
    hidden_RND = forward(compile_drafter(drafter, "kernels"), drafter, numbers)
    hidden_RND.sum().backward()
    assert hidden_RND.shape == (2, 12, drafter.shape.hidden_size)
    assert all(weight.grad is not None for weight in drafter.parameters())


def test_gradients_come_half_a_layer_at_a_time_and_are_not_copied(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    drafter = build(num_layers=3)
    made: set[int] = set()
    original = torch.mm

    def noted(*matrices: Tensor) -> Tensor:
        found = original(*matrices)
        made.add(found.untyped_storage().data_ptr())
        return found

    order: list[str] = []
    hidden_RND = forward(compile_drafter(drafter, "kernels"), drafter, problem(drafter))
    waiting, seen = [hidden_RND.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            if node.name() in ("_EnterBackward", "_LeaveBackward"):
                node.register_prehook(lambda _gradients: order.append("half"))
    weights = dict(drafter.named_parameters())
    found = GradientBuckets(weights, lambda name: weights[name])
    found.begin(Noted(order))
    monkeypatch.setattr(torch, "mm", noted)
    lose(hidden_RND).backward()
    sums = [order[:place].count("sum") for place, what in enumerate(order) if what == "half"]
    # Behind the final norm, each layer's MLP with its norm, then the rest of the layer: its five matrices and norms.
    assert sums == [1, 5, 12, 16, 23, 27]
    assert order.count("sum") == len(weights)
    matrices = [weight.grad for weight in weights.values() if weight.dim() == 2]
    assert all(gradient.untyped_storage().data_ptr() in made and gradient.is_contiguous() for gradient in matrices)


def test_a_second_backward_is_an_error_and_no_other_gradient():
    # The first one has written over what the forward kept.
    drafter = build()
    loss = lose(forward(compile_drafter(drafter, "kernels"), drafter, problem(drafter)))
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="a second backward"):
        loss.backward()


def test_ranges_of_the_context_are_made_once_for_layers_alike(monkeypatch):
    pytest.importorskip("triton")
    from blockdraft.models import block_attention

    made: list[tuple[int, int | None]] = []

    def ranges(_position_RT, anchor_RA: Tensor, _length, num_slots: int, window: int | None) -> tuple[Tensor, Tensor]:
        made.append((num_slots, window))
        return (anchor_RA.repeat_interleave(num_slots, 1),) * 2

    def spans(low_RQ: Tensor, *_others) -> Tensor:
        return low_RQ

    def output(query_RQHE: Tensor, *_others) -> tuple[Tensor]:
        return (query_RQHE,)

    monkeypatch.setattr(block_attention, "launch_ranges", ranges)
    monkeypatch.setattr(block_attention, "launch_spans", spans)
    monkeypatch.setattr(torch.ops.blockdraft, "block_attention", output)
    drafter = build(num_layers=5, head_dim=16, window=5, window_layers=(1, 2))
    forward(compile_drafter(drafter, "kernels"), drafter, problem(drafter), block_attention.kernel_attend)
    # Full, windowed, and the last layer's without slot 0.
    assert made == [(4, None), (4, 5), (3, None)]


def compare() -> None:
    """Run in a process of its own, where kernels are interpreted: theirs and the attention's, beside plain ones."""
    from blockdraft.models.block_attention import kernel_attend
    from blockdraft.models.layer_triton import TRITON_OPS
    from unit.models.test_block_attention import let_numbers_index

    let_numbers_index()
    # First, middle and last layers, and one that is all of these.
    for options in ({"num_layers": 3, "window": 5, "window_layers": (0, 1)}, {"num_layers": 1, "causal": True}):
        drafter = build(head_dim=16, **options)
        numbers = problem(drafter)
        plain = results(KernelDrafter(drafter, EAGER_OPS), drafter, numbers)
        found = results(KernelDrafter(drafter, TRITON_OPS), drafter, numbers, kernel_attend)
        for name, wanted in plain.items():
            far = distance(found[name], wanted)
            assert far < 1e-5, (options, name, far)
    sys.stdout.write("interpreted alike\n")


def test_with_interpreted_kernels_numbers_and_gradients_are_the_same():
    pytest.importorskip("triton")
    run_interpreted("from unit.models.test_own_layers import compare; compare()")


def test_weights_of_the_same_rows_lie_side_by_side_and_stay_themselves():
    drafter = build()
    before = {name: weight.detach().clone() for name, weight in drafter.named_parameters()}
    owners = dict(drafter.named_parameters())
    run = KernelDrafter(drafter)
    places = {name: weight.data_ptr() for name, weight in drafter.named_parameters()}
    KernelDrafter(drafter)
    for name, weight in drafter.named_parameters():
        assert weight is owners[name]
        assert weight.data_ptr() == places[name]
        assert torch.equal(weight, before[name])
        assert weight.is_contiguous()
    attention = drafter.layers[0].self_attn
    weights = attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight
    assert torch.equal(joined(*weights), torch.cat(weights))
    drafter.layers[0].mlp.up_proj.weight.data = drafter.layers[0].mlp.up_proj.weight.data.clone()
    with pytest.raises(RuntimeError, match=r"expected side by side in memory, found apart: .* make another one"):
        forward(run, drafter, problem(drafter))


def test_a_thread_whose_current_device_is_another_is_told_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    check_current(torch.device("cuda:0"))
    check_current(torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"lies on cuda:1, .* is cuda:0: call torch.cuda.set_device\(1\)"):
        check_current(torch.device("cuda:1"))
