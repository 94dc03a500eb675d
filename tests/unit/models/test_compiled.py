"""R rows, T context tokens, A anchors, L block size, Q = A * L block tokens, D width."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from blockdraft.models import compiled
from blockdraft.models.attention import bare_flex_attend, sdpa_attend
from blockdraft.models.blocks import block_positions, spread_blocks
from blockdraft.models.compiled import compile_alone, compile_drafter
from blockdraft.models.drafter import Drafter, drop_anchors
from blockdraft.training import buckets
from blockdraft.training.buckets import GradientBuckets
from integration.tiny import tiny_drafter, tiny_target
from unit.models.test_blocks import row


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    """Graphs are captured as on a GPU and then run as they are: no kernel is made on the CPU."""
    torch.compiler.reset()
    original, chosen = torch.compile, ["eager"]
    monkeypatch.setattr(compiled.torch, "compile", lambda function, **how: original(function, backend=chosen[0], **how))
    yield chosen
    torch.compiler.reset()


def build(**options) -> Drafter:
    drafter = tiny_drafter(tiny_target("llama"), 4)
    wide = Drafter(dataclasses.replace(drafter.shape, **options))
    wide.initialise(torch.Generator().manual_seed(0))
    return wide


def inputs(drafter: Drafter, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    document_RT, position_RT = row(*(20, 12) if seed else (9, 23))
    anchor_RA = torch.tensor([[3, 4, 7, 25]]) if seed else torch.tensor([[2, 8, 30, -1]])
    shape = drafter.shape
    features_RTC = torch.randn(1, 32, drafter.fc.in_features, generator=generator)
    first_RAD = torch.randn(1, 5, shape.hidden_size, generator=generator)
    return document_RT, position_RT, anchor_RA, features_RTC, first_RAD


def forward(run, drafter: Drafter, make_attend, seed: int) -> Tensor:
    document_RT, position_RT, anchor_RA, features_RTC, first_RAD = inputs(drafter, seed)
    block_position_RQ = block_positions(position_RT, anchor_RA, drafter.shape.block_size)
    attend = make_attend(drafter.shape, document_RT, position_RT, anchor_RA)
    return run(features_RTC, position_RT, first_RAD, block_position_RQ, attend)


OPTIONS = [{}, {"causal": True}, {"window": 5, "window_layers": (0,)}]


@pytest.mark.parametrize("how", ["stack", "layer"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_compiled_drafter_computes_what_the_plain_one_does(how, options):
    drafter = build(**options)
    run, plain = compile_drafter(drafter, how), compile_drafter(drafter, "nothing")
    for seed in (0, 1):
        gradients = []
        for one in (plain, run):
            drafter.zero_grad()
            forward(one, drafter, sdpa_attend, seed).square().mean().backward()
            gradients.append([weight.grad.clone() for weight in drafter.parameters() if weight.grad is not None])
        for found, wanted in zip(*gradients, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-4)


@torch.no_grad()  # flex_attention has no backward on a CPU
@pytest.mark.parametrize("how", ["stack", "layer"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_flex_attention_is_part_of_one_graph_for_any_anchors(how, options):
    drafter = build(**options)
    run, plain = compile_drafter(drafter, how), compile_drafter(drafter, "nothing")
    forward(run, drafter, bare_flex_attend, 0)
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed in (0, 1):
            wanted_RND = forward(plain, drafter, sdpa_attend, seed)
            found_RND = forward(run, drafter, bare_flex_attend, seed)
            torch.testing.assert_close(found_RND, wanted_RND, atol=1e-5, rtol=1e-4)


class Noted:
    """A sum of which only the start is noted."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def meet(self) -> None:
        pass

    def start(self, _bucket) -> None:
        self.log.append("sum")

    def wait(self) -> None:
        pass

    def drop(self) -> None:
        pass


def parts_of_backward(out: Tensor) -> list[torch.autograd.graph.Node]:
    """The compiled pieces of the backward that begins there."""
    seen: set[torch.autograd.graph.Node] = set()
    waiting = [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return [node for node in seen if "CompiledFunction" in node.name()]


@pytest.mark.parametrize("how", ["stack", "layer"])
def test_by_layers_gradients_are_there_before_the_backward_is_over(how, backend, monkeypatch):
    backend[0] = "aot_eager"
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    drafter = build()
    loss = forward(compile_drafter(drafter, how), drafter, sdpa_attend, 0).square().mean()
    parts, order = parts_of_backward(loss), []
    for part in parts:
        part.register_prehook(lambda _grads: order.append("part"))
    weights = dict(drafter.named_parameters())
    found = GradientBuckets(weights, lambda name: weights[name])
    found.begin(Noted(order))
    loss.backward()
    before_last = order[: len(order) - order[::-1].index("part")]
    if how == "stack":
        assert (len(parts), before_last.count("sum")) == (1, 0)
    else:
        # At least what belongs to the last layer and to the norm behind it.
        assert len(parts) >= drafter.shape.num_layers
        assert before_last.count("sum") > len(list(drafter.layers[-1].parameters()))
    assert order.count("sum") == len(weights)


def saved_bytes(drafter: Drafter, how) -> int:
    """What a forward keeps for its backward, without the weights and the inputs."""
    own = {weight.data_ptr() for weight in drafter.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward(compile_drafter(drafter, how), drafter, sdpa_attend, 0)
    assert out.requires_grad
    return sum(found.values())


def test_by_layers_less_is_kept_for_the_backward(backend):
    backend[0] = "aot_eager"
    wide = {"num_layers": 4, "hidden_size": 64, "intermediate_size": 256, "num_heads": 4, "head_dim": 16}
    drafter = build(**wide)
    assert saved_bytes(drafter, "layer") < 0.8 * saved_bytes(drafter, "stack")


def test_layers_alike_share_a_compiled_version():
    counts = []
    for num_layers in (4, 9):
        torch._dynamo.utils.counters.clear()
        drafter = build(num_layers=num_layers)
        forward(compile_drafter(drafter, "layer"), drafter, sdpa_attend, 0)
        counts.append(torch._dynamo.utils.counters["frames"]["ok"])
    assert counts[0] == counts[1] <= 4


def test_leaving_anchors_out_changes_no_other_slot():
    drafter = build()
    document_RT, position_RT, anchor_RA, features_RTC, first_RAD = inputs(drafter, 1)
    block_RQD = spread_blocks(first_RAD, drafter.shape.block_size)
    attend = sdpa_attend(drafter.shape, document_RT, position_RT, anchor_RA)
    block_position_RQ = block_positions(position_RT, anchor_RA, drafter.shape.block_size)
    whole_RQD = drafter(drafter.project(features_RTC), position_RT, block_RQD, block_position_RQ, attend)
    drafted_RND = compile_drafter(drafter, "nothing")(features_RTC, position_RT, first_RAD, block_position_RQ, attend)
    wanted_RND = whole_RQD.unflatten(1, (-1, drafter.shape.block_size))[:, :, 1:].flatten(1, 2)
    torch.testing.assert_close(drafted_RND, wanted_RND, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_without_rows_of_anchors_the_same_gradients_for_less_work(options):
    drafter = build(**options)
    document_RT, position_RT, anchor_RA, features_RTC, first_RAD = inputs(drafter, 1)
    block_RQD = spread_blocks(first_RAD, drafter.shape.block_size)
    shape = drafter.shape
    attend = sdpa_attend(shape, document_RT, position_RT, anchor_RA)
    block_position_RQ = block_positions(position_RT, anchor_RA, shape.block_size)
    target_RND = torch.randn(1, 4 * 3, shape.hidden_size, generator=torch.Generator().manual_seed(1))
    found: dict[bool, tuple[list[Tensor], int]] = {}
    for drafted_only in (False, True):
        drafter.zero_grad()
        with FlopCounterMode(display=False) as counter:
            hidden_RND = drafter(
                drafter.project(features_RTC), position_RT, block_RQD, block_position_RQ, attend,
                drafted_only=drafted_only,
            )  # fmt: skip
            if not drafted_only:
                hidden_RND = drop_anchors(hidden_RND, shape.block_size)
            loss = (hidden_RND * target_RND).mean()
            loss.backward()
        products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
        found[drafted_only] = ([loss.detach(), *(weight.grad for weight in drafter.parameters())], products)
    (whole, all_work), (drafted, work) = found[False], found[True]
    for mine, its in zip(drafted, whole, strict=True):
        assert float((mine - its).norm() / its.norm()) < 1e-5
    # Of the last layer's queries, attention output and MLP: forward, d(input) and d(weight) of 4 anchors.
    width, heads = shape.hidden_size, shape.num_heads * shape.head_dim
    assert all_work - work == 3 * 2 * 4 * (2 * width * heads + 3 * width * shape.intermediate_size)


def test_replicas_share_no_compiled_versions():
    def double(x: Tensor) -> Tensor:
        return x * 2

    one, two = compile_alone(double), compile_alone(double)
    one(torch.ones(3))
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="recompile"):
        two(torch.ones(3))
