"""`blockdraft bench` on tiny shapes; no test looks at how long anything took."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from blockdraft.cli import main
from blockdraft.commands.bench import Options, step_shape
from blockdraft.commands.bench_cases import make_drafter, make_problem, products, stack_step, useful_flops
from blockdraft.commands.bench_shapes import target_configs
from blockdraft.commands.bench_timing import kernel_class
from blockdraft.models.drafter import default_layer_ids
from integration.tiny import tiny_target
from unit.models.test_own_layers import added

ALONE = ("--shapes", "tiny", "--row-length", "96", "--num-layers", "2", "--steps", "2")
SMALL = (*ALONE, "--num-anchors", "9")


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("step", {"step_ms", "step_tflop", "step_share_of_rate", "step_busy", "update_ms", "update_share_of_step"}),
        ("target", {"target_1x96_tok_s", "target_8x12_tok_s", "target_1x96_share_of_rate"}),
        ("pipeline", {"pipeline_tok_s", "busy_target", "busy_drafter"}),
    ],
)
def test_each_measurement_runs_on_a_cpu_and_writes_its_numbers(what, names, tmp_path, capsys):
    file = tmp_path / "new" / "found.json"
    assert main(["bench", what, *(ALONE if what == "target" else SMALL), "--output", str(file), "--device", "cpu"]) == 0
    found = json.loads(file.read_text())
    assert {"device", "torch", "dtype", "matrix_rate_tflops", "options", *names} <= found.keys()
    assert all(found[name] > 0 for name in names)
    printed = capsys.readouterr().out
    assert "matrix rate" in printed
    assert what in printed


def test_shapes_of_a_target_of_ones_own(tmp_path):
    target = tiny_target("qwen3")
    target.model.save_pretrained(tmp_path)
    shape = step_shape(Options(what="step", target=str(tmp_path), num_layers=2, window=40))
    assert (shape.hidden_size, shape.vocab_size) == (target.hidden_size, target.ends.vocab_size)
    assert (shape.window, shape.window_layers) == (40, (0,))


def test_useful_work_counts_every_product_once():
    shape = step_shape(Options(what="step", shapes="tiny", num_layers=2))
    problem = make_problem(shape, 64, 5, torch.device("cpu"), torch.float32)
    block, drafted, context = 5 * 16, 5 * 15, 64
    heads, groups, width = 4 * 16, 2 * 16, 64

    def layer(asking: int, queries: int, known: int) -> int:
        """Of a layer in which so many slots of each block do more than give a key and a value."""
        rows = 5 * asking
        products = width * ((queries + rows) * heads + (known + context) * groups * 2 + 3 * rows * 96)
        return 2 * products + 4 * heads * (int(problem.anchor_RA.sum()) * asking + 5 * asking * 16)

    # The first layer's rows: of five anchors and of the mask token.
    stack = layer(16, 6, 6) + layer(15, drafted, block) + 2 * context * 2 * width * width
    assert useful_flops(shape, 64, problem.anchor_RA) == 3 * stack + 2 * 2 * drafted * width * shape.vocab_size


@pytest.mark.parametrize("num_layers", [1, 2, 4])
def test_the_listed_products_are_those_a_step_runs(num_layers):
    shape = step_shape(Options(what="step", shapes="tiny", num_layers=num_layers))
    problem = make_problem(shape, 64, 5, torch.device("cpu"), torch.float32)
    drafter = make_drafter(shape, torch.device("cpu"), torch.float32)
    forward = stack_step(problem, drafter, "kernels", "sdpa")
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: added}) as counter:
        forward().sum().backward()
    listed = sum(2 * one.m * one.n * one.k * one.times for one in products(shape, 64, 5))
    counts = counter.get_flop_counts()["Global"]
    assert counts[torch.ops.aten.mm] + counts[torch.ops.aten.addmm_] == listed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "one of --target and --shapes, found neither"),
        (("--shapes", "tiny", "--target", "x"), "one of --target and --shapes, found both"),
        (("--shapes", "tiny", "--steps", "0"), "--steps: expected at least 1, found 0"),
        (("--shapes", "tiny", "--row-length", "8", "--num-anchors", "8"), "fewer than the row's 8 tokens, found 8"),
    ],
)
def test_what_cannot_be_measured_is_refused(flags, message, capsys):
    assert main(["bench", "step", *flags]) == 2
    assert message in capsys.readouterr().err


def test_the_output_is_looked_at_before_anything_is_measured(tmp_path, capsys):
    assert main(["bench", "step", *SMALL, "--output", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert "expected the name of a file, found a directory" in said.err
    assert said.out == ""


@pytest.mark.parametrize("what", ["step", "pipeline"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--device", "gpu0"), "device: expected cpu or cuda:N, got 'gpu0'"),
        (("--device", "cuda:99"), "device: cuda:99 is not here"),
        (("--device", "cpu", "--attention", "flex"), "--attention flex has no backward on a CPU"),
    ],
)
def test_what_the_device_cannot_do_is_refused(what, flags, message, capsys):
    assert main(["bench", what, *SMALL, *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_target_alone_has_no_anchors(capsys):
    flags = ("--shapes", "tiny", "--row-length", "96", "--num-layers", "2", "--steps", "1", "--device", "cpu")
    assert main(["bench", "target", *flags]) == 0
    assert "target_1x96" in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(target_configs()))
def test_every_named_target_has_layers_for_the_default_drafter(name):
    ids = default_layer_ids(target_configs()[name].num_hidden_layers, Options(what="pipeline").num_layers)
    assert len(set(ids)) == Options(what="pipeline").num_layers


def test_every_kernel_of_a_layer_counts_as_elementwise():
    pytest.importorskip("triton")
    from blockdraft.models import layer_kernels, row_kernels

    names = [name for module in (layer_kernels, row_kernels) for name in vars(module) if name.endswith("_kernel")]
    assert len(names) > 12
    assert {kernel_class(name) for name in names} == {"fused elementwise"}
    assert kernel_class("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_NNT") == "products"
