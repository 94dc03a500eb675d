"""The memory plan: components by device, the formula against measured peaks, what does not fit, what was reached."""

from dataclasses import replace

import pytest
import torch

from blockdraft.commands.bench_cases import presets
from blockdraft.config import (
    ConfigError,
    DataConfig,
    DrafterConfig,
    LossConfig,
    OptimConfig,
    RunConfig,
    RuntimeConfig,
    TargetConfig,
)
from blockdraft.data.loader import LoaderConfig
from blockdraft.data.packing import Bucket
from blockdraft.models.compiled import How
from blockdraft.models.drafter import Drafter, DrafterShape, TargetFacts
from blockdraft.models.outline import Outline
from blockdraft.runtime.memory_fit import compare, explain_shortage, knobs, say_plan
from blockdraft.runtime.memory_plan import (
    GIB,
    Sizes,
    drafter_parameters,
    micro_batch_bytes,
    page_locked_bytes,
    plan_memory,
    slot_bytes,
    spell_bytes,
    step_peak,
    weight_sizes,
)
from blockdraft.runtime.transfers import take_page_locked


def sizes(shape: DrafterShape, layer: int = 192_946_432) -> Sizes:
    facts = TargetFacts(
        hidden_size=shape.hidden_size,
        num_layers=shape.num_target_layers,
        vocab_size=shape.vocab_size,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=shape.intermediate_size,
        is_moe=False,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=40960,
        embedding_multiplier=1.0,
        logit_multiplier=1.0,
        logit_softcap=None,
    )
    ends = shape.vocab_size * shape.hidden_size
    outline = Outline("Made", facts, (layer,) * shape.num_target_layers, ends, ends, (2,), shape.hidden_size)
    return Sizes(outline, shape, shape.vocab_size, Bucket(2, 4096), 10, "stack")


LARGE = sizes(presets()["qwen3-8b"])
LARGER = sizes(presets()["qwen3.6-27b"])
DATA = DataConfig(row_length=4096, num_anchors=512)


def config(targets: tuple[str, ...] = ("cuda:0",), drafters: tuple[str, ...] = ("cuda:0",)) -> RunConfig:
    return RunConfig(
        target=TargetConfig(dtype="bfloat16"),
        drafter=DrafterConfig(dtype="bfloat16"),
        data=DATA,
        # The rows of a chunk of the runs that were measured.
        loss=LossConfig(chunk_rows=3840),
        runtime=RuntimeConfig(targets=targets, drafters=drafters),
    )


@pytest.mark.parametrize(
    ("at", "how", "chunk_rows", "measured_gib"),
    [
        (LARGE, "stack", 3840, 6.822),
        (LARGER, "stack", 3840, 9.068),
        (LARGE, "layer", 3840, 4.72),
        (LARGE, "layer", 1920, 4.22),
        (LARGER, "layer", 1920, 5.49),
        (LARGER, "layer", 1536, 5.49),
        (LARGE, "kernels", 2048, 4.51),
        (LARGER, "kernels", 2048, 5.86),
    ],
)
def test_the_steps_peak_is_what_was_measured(at: Sizes, how: How, chunk_rows: int, measured_gib: float) -> None:
    # H200, torch 2.11, above everything that stays (docs/performance.md, "Memory").
    chunked = replace(config(), loss=LossConfig(chunk_rows=chunk_rows))
    found = step_peak(chunked, at._replace(how=how))
    assert sum(found.values()) / GIB == pytest.approx(measured_gib, rel=0.01)


def test_a_whole_runs_total_is_what_was_measured() -> None:
    # benchmarks/device_memory.py, one H200 for both sides: 35.854 GiB allocated at most.
    whole = LARGE._replace(bucket=Bucket(1, 4304))
    assert plan_memory(config(), whole).total("cuda:0") / GIB == pytest.approx(35.854, rel=0.05)


@pytest.mark.parametrize("name", presets())
def test_parameters_are_counted_as_the_module_has_them(name: str) -> None:
    with torch.device("meta"):
        drafter = Drafter(presets()[name])
    assert drafter_parameters(presets()[name]) == sum(weight.numel() for weight in drafter.parameters())


def test_what_lies_where() -> None:
    def names(plan, device: str) -> set[str]:
        return {part.name for part in plan.parts if part.device == device}

    step = {"kept activations", "head chunk", "loss gradients"}
    stays = {"drafter weights", "masters", "moments", "slots"}
    shared = plan_memory(config(), LARGE)
    assert names(shared, "cuda:0") == {"target weights", "target forward"} | stays | step
    apart = plan_memory(config(drafters=("cuda:1",)), LARGE)
    assert names(apart, "cuda:0") == {"target weights", "target forward", "staging"}
    assert names(apart, "cuda:1") == {"embedding and head"} | stays | step
    divided = plan_memory(config(targets=("cuda:0+cuda:1",), drafters=("cuda:2",)), LARGE)
    whole = sum(part.bytes for part in apart.parts if part.name == "target weights")
    halves = [part.bytes for part in divided.parts if part.name == "target weights"]
    assert sum(halves) == whole and len(halves) == 2
    # Layers 34 and 35 lie behind the last captured one.
    assert whole == 2 * (34 * 192_946_432 + 2 * 151936 * 4096 + 4096)


def test_what_the_objective_and_the_config_add() -> None:
    def total(changed: RunConfig, at: Sizes = LARGE) -> int:
        return plan_memory(changed, at).total("cuda:0")

    base = config()
    kl = replace(base, loss=LossConfig(objective="kl", chunk_rows=3840))
    # Two layers more stay, and slots have a column more.
    assert total(kl) - total(base) == 2 * (2 * 192_946_432) + 2 * 2 * 4097 * 4096
    assert total(replace(base, optim=OptimConfig(accumulation=4))) - total(base) == 4 * drafter_parameters(LARGE.shape)
    deeper = replace(base, runtime=replace(base.runtime, channel_depth=4))
    assert total(deeper) - total(base) == 2 * 2 * 4097 * 5 * 4096
    small_head = LARGE._replace(head_rows=1000)
    assert total(base, small_head) < total(base)
    float8 = replace(base, target=TargetConfig(dtype="float8"))
    assert total(base) - total(float8) == 34 * 192_946_432
    kept = plan_memory(replace(base, runtime=replace(base.runtime, keep_features=True)), LARGE)
    assert kept.total("host") - plan_memory(base, LARGE).total("host") == 10 * 2 * 4097 * 5 * 4096
    loader = micro_batch_bytes(base, LARGE) + page_locked_bytes(base, LARGE)
    # bf16 weights, float32 masters and two moments, copied to be written.
    assert plan_memory(base, LARGE).total("host") == (2 + 4 + 8) * drafter_parameters(LARGE.shape) + loader
    rounded = replace(base, optim=OptimConfig(optimizer="adamw_bf16"))
    assert plan_memory(rounded, LARGE).total("host") == (2 + 4 + 4) * drafter_parameters(LARGE.shape) + loader
    assert total(base) - total(rounded) == 4 * drafter_parameters(LARGE.shape)
    float32 = replace(base, drafter=replace(base.drafter, dtype="float32"))
    assert plan_memory(float32, LARGE).total("host") == 12 * drafter_parameters(LARGE.shape) + loader


def test_small_chunks_and_small_rows_move_the_peak() -> None:
    tight = replace(config(), loss=LossConfig(chunk_rows=128))
    assert "backward" in step_peak(tight, LARGE)
    few = replace(config(), data=DataConfig(row_length=256, num_anchors=16))
    assert set(step_peak(few, LARGE)) == {"weight gradients"}


def test_a_row_budget_takes_its_share_of_the_loss() -> None:
    half = step_peak(config(), LARGE._replace(row_budget=3840))
    whole, capped = step_peak(config(), LARGE), step_peak(config(), LARGE._replace(row_budget=10**6))
    # Chunks of at most 3,840 rows: one for two; d(hidden) in float32 of half the rows, which are copied out.
    assert half["head chunk"] == whole["head chunk"]
    assert whole["loss gradients"] - half["loss gradients"] == (3840 * 4 - 3840 * 2) * 4096
    # Never more rows than slots, whatever a plan for fewer anchors was handed; taking rows out costs their copy.
    assert capped["loss gradients"] - whole["loss gradients"] == 7680 * 4096 * 2


def test_the_plan_says_totals_in_units() -> None:
    line = plan_memory(config(), LARGE).lines()[0]
    assert line.startswith("memory plan, cuda:0: 36.07 GiB = target weights 14.54 GiB, ")
    assert (spell_bytes(3 * GIB), spell_bytes(2**20)) == ("3.00 GiB", "1.0 MiB")


def test_a_knob_frees_what_it_says_and_the_largest_comes_first() -> None:
    base = config()
    found = knobs(base, LARGE, "cuda:0")
    assert [knob.saved for knob in found] == sorted((knob.saved for knob in found), reverse=True)
    saved = {knob.change: knob.saved for knob in found}
    halved = replace(base, loss=LossConfig(chunk_rows=1920))
    before, after = (plan_memory(one, LARGE).total("cuda:0") for one in (base, halved))
    assert saved["--loss.chunk-rows 1920"] == before - after > GIB / 2
    assert {"--data.num-anchors 256", "--runtime.channel-depth 1", "--drafter.num-layers 4"} <= set(saved)
    assert any("drafter on another GPU" in change for change in saved)


def test_a_plan_that_fits_is_said_and_no_more() -> None:
    lines: list[str] = []
    say_plan(config(), LARGE, lines.append, {"cuda:0": 80 * GIB, "host": 10**15})
    assert [line for line in lines if line.startswith("warning")] == []


def test_a_plan_that_may_not_fit_warns_with_what_helps() -> None:
    lines: list[str] = []
    say_plan(config(), LARGE, lines.append, {"cuda:0": 32 * GIB, "host": 10**15})
    assert lines[-1].startswith(
        "warning: memory of cuda:0: the plan's 36.07 GiB may not fit into 32.00 GiB; what helps:"
    )


def test_what_cannot_fit_is_refused() -> None:
    absurd = replace(config(), data=replace(DATA, num_anchors=4096, num_rows=64))
    with pytest.raises(ConfigError, match=r"keep 48\.21 GiB there \(2\d{3}\.\d+ GiB at its peak\); what helps: "):
        say_plan(absurd, LARGE, lambda _line: None, {"cuda:0": 80 * GIB, "host": 10**15})
    with pytest.raises(ConfigError, match=r"expected at most 20\.00 GiB, found that the run has to keep 28\.52 GiB"):
        say_plan(config(), LARGE, lambda _line: None, {"cuda:0": 20 * GIB, "host": 10**15})


@pytest.mark.parametrize(("row_length", "is_halved"), [(16, False), (31, False), (32, True)])
def test_what_helps_is_said_of_rows_as_short_as_a_block_too(row_length: int, is_halved: bool) -> None:
    short = replace(config(), data=DataConfig(row_length=row_length, num_rows=4096, num_anchors=row_length))
    with pytest.raises(ConfigError, match=r"memory of cuda:0: .* what helps: ") as refused:
        say_plan(short, LARGE, lambda _line: None, {"cuda:0": 20 * GIB, "host": 10**15})
    assert (f"--data.row-length {row_length // 2} " in str(refused.value)) is is_halved


@pytest.mark.parametrize(("beta2", "is_named"), [(0.99, True), (0.999, False)])
def test_moments_in_bfloat16_help_where_betas_allow_them(beta2: float, is_named: bool) -> None:
    base = replace(config(), optim=OptimConfig(betas=(0.9, beta2)))
    found = [knob.change for knob in knobs(base, LARGE, "cuda:0")]
    assert any("adamw_bf16" in change for change in found) is is_named


def test_a_cpu_and_the_host_share_one_memory() -> None:
    on_cpu = config(("cpu",), ("cpu",))
    plan = plan_memory(on_cpu, LARGE)
    together = plan.total("cpu") + plan.total("host")
    lines: list[str] = []
    holds = max(plan.total("cpu"), plan.total("host"), plan.total("cpu", resident=True) + plan.total("host")) + 1
    assert plan.total("cpu") < holds < together
    say_plan(on_cpu, LARGE, lines.append, {"cpu": holds, "host": holds})
    assert lines[-1].startswith(f"warning: memory of cpu and host: the plan's {spell_bytes(together)} may not fit into")
    say_plan(on_cpu, LARGE, lines.append, {"cpu": together, "host": together})
    assert lines[-1].startswith("memory plan, host")


def test_the_loader_holds_two_steps_or_all_passes_of_a_slot() -> None:
    # Labels, flags and weights of 512 x 15 slots, and the anchors; ids, documents and positions of the tokens.
    one, fill = 512 * (15 * 13 + 8), 3 * 8 * 4096
    base = config()
    assert micro_batch_bytes(base, LARGE) == 2 * (one + fill)
    assert micro_batch_bytes(base, LARGE._replace(row_budget=800)) == 2 * (one + 8 * 800 + fill)
    assert micro_batch_bytes(replace(base, optim=OptimConfig(accumulation=4)), LARGE) == 8 * (one + fill)
    assert micro_batch_bytes(replace(base, runtime=replace(base.runtime, reuse=5)), LARGE) == 5 * one + fill


@pytest.mark.parametrize("count", [1, 2])
def test_page_locked_blocks_are_the_hosts_and_those_that_a_run_takes(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    loader_config = LoaderConfig(
        row_length=4096, num_rows=2, num_anchors=512, sort_window=8, target_tokens=8192, block_size=16,
        weight_L=(1.0,) * 16, after_gap=False, seed=0, num_drafters=count, accumulation=count, reuse=3,
    )  # fmt: skip
    taken: list[int] = []

    def empty(size: int, *, dtype: torch.dtype, pin_memory: bool) -> None:
        assert dtype is torch.uint8 and pin_memory
        taken.append(size)

    monkeypatch.setattr("blockdraft.runtime.transfers.torch.empty", empty)
    take_page_locked(loader_config, count, 700, 4)
    devices = ("cuda:0",) * count
    base = replace(config(devices, devices), data=replace(DATA, num_rows=2, target_tokens=8192))
    base = replace(base, runtime=replace(base.runtime, reuse=3, channel_depth=4))
    plan = plan_memory(base, LARGE._replace(row_budget=700))
    (part,) = (part for part in plan.parts if part.name == "page-locked blocks")
    assert (part.device, part.bytes, part.passes) == ("host", sum(taken), False)
    assert "page-locked blocks" in plan.lines()[-1] and plan.lines()[-1].startswith("memory plan, host: ")
    for target, is_locked in (("cpu", False), ("cuda:0", True)):
        mixed = plan_memory(replace(base, runtime=replace(base.runtime, targets=(target,), drafters=("cpu",))), LARGE)
        assert ("page-locked" in " ".join(mixed.lines())) == is_locked


def test_masks_of_plain_attention_are_counted() -> None:
    # Two rows of 512 x 16 slots, each with the row's tokens and slots beside it: a boolean, and bfloat16 in each layer.
    rows = replace(config(), data=DataConfig(row_length=1024, num_rows=2, num_anchors=512))
    plain = LARGE._replace(how="nothing")
    assert step_peak(rows, plain)["attention masks"] == 2 * 8192 * (1024 + 8192) * (1 + 5 * 2)
    windowed = replace(LARGE.shape, window=32, window_layers=(0,))
    assert step_peak(rows, plain._replace(shape=windowed))["attention masks"] == 2 * 8192 * (1024 + 8192) * (2 + 5 * 2)


def test_plan_and_reached_stand_side_by_side() -> None:
    plan = plan_memory(config(drafters=("cpu",)), LARGE)
    planned = plan.total("cuda:0")
    cpu, gpu = compare(plan, {"cuda:0": planned * 100 // 104})[:2]
    assert gpu.endswith("(+4.0% off)") and gpu.startswith("memory of cuda:0: planned")
    assert cpu.endswith("torch counts no peak there")


def test_running_out_of_memory_is_answered_with_the_plan() -> None:
    lines = explain_shortage(config(("cpu",), ("cpu",)), LARGE)
    assert lines[0].startswith("out of memory")
    assert any(line.startswith("memory plan, cpu") for line in lines)
    assert any(line.startswith("what helps on cpu: ") and "--data.num-anchors 256 frees" in line for line in lines)


def test_weights_are_those_of_the_module() -> None:
    with torch.device("meta"):
        drafter = Drafter(LARGE.shape)
    assert sorted(weight_sizes(LARGE.shape)) == sorted(weight.numel() for weight in drafter.parameters())


@pytest.mark.parametrize("count", [2, 3])
def test_a_divided_state_takes_a_share_of_each_drafters_device(count: int) -> None:
    base = config()
    devices = tuple(f"cuda:{index + 1}" for index in range(count))
    base = replace(base, runtime=replace(base.runtime, topology="pool", targets=("cuda:0",), drafters=devices))
    divided = replace(base, optim=replace(base.optim, shard=True))
    before, after = plan_memory(base, LARGE), plan_memory(divided, LARGE)
    whole = 12 * drafter_parameters(LARGE.shape)
    saved = [before.total(device) - after.total(device) for device in devices]
    # Each keeps its share; together they keep one whole state.
    assert sum(saved) == (count - 1) * whole
    assert all(abs(one - whole * (count - 1) / count) < 0.02 * whole for one in saved)
    assert before.total("host") == after.total("host")
    found = {knob.change: knob.saved for knob in knobs(base, LARGE, "cuda:1")}
    assert found["--optim.shard"] == saved[0]
    assert not any("--optim.shard" in knob.change for knob in knobs(divided, LARGE, "cuda:1"))


def test_a_drafter_alone_is_told_of_another_to_divide_with() -> None:
    found = {knob.change: knob.saved for knob in knobs(config(), LARGE, "cuda:0")}
    change = "--optim.shard and another of --runtime.drafters"
    # Features for the other one are staged here.
    freed = found[change] + 2 * slot_bytes(config(), LARGE)
    assert abs(freed - 6 * drafter_parameters(LARGE.shape)) < 0.02 * 12 * drafter_parameters(LARGE.shape)
