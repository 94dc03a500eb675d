"""The plan's model of a run's speed: against every measured run, and at its limits."""

import json
from pathlib import Path
from typing import Any

import pytest

from blockdraft.commands.bench_cases import presets
from blockdraft.config import ConfigError, DataConfig, OptimConfig, RunConfig, RuntimeConfig, to_json
from blockdraft.runtime.stage_sources import measured_rates, step_flops
from blockdraft.runtime.stages import (
    Links,
    Stages,
    apart,
    best,
    drafter_rate,
    exchange_seconds,
    fewest_nodes,
    per_drafter,
    shared,
    splits,
    sum_seconds,
)

ROOT = Path(__file__).parents[3]
RUNS: list[dict[str, Any]] = json.loads((ROOT / "docs" / "measured_runs.json").read_text(encoding="utf-8"))
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
BALANCED = Stages(25_000, 25_000, 3_300, 2e9)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["run"][:60])
def test_the_models_error_on_every_measured_run_is_the_stated_one(run: dict[str, Any]) -> None:
    stages = Stages(run["target_tok_s"], run["drafter_tok_s"], run["micro_batch_tokens"], 2 * run["drafter_parameters"])
    if run["is_shared"]:
        found = shared(stages, 1, run["targets"], Links())
    else:
        found = apart(stages, 1, run["targets"], run["drafters"], Links())
    error = found.tok_s / run["measured_tok_s"] - 1
    assert error == pytest.approx(run["stated_error"], abs=0.006)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["run"][:60])
def test_every_error_is_stated_in_the_documentation(run: dict[str, Any]) -> None:
    (row,) = (line for line in PERFORMANCE.splitlines() if line.startswith(f"| {run['run']} |"))
    assert f"{run['measured_tok_s']:,}" in row
    assert f"{run['stated_error']:+.1%}" in row


def test_the_slower_side_sets_the_pace() -> None:
    found = apart(Stages(10_000, 30_000, 3_300, 0), 1, 2, 1, Links())
    assert (found.tok_s, found.limit, found.gpus) == (20_000, "targets", 3)
    found = apart(Stages(40_000, 30_000, 3_300, 0), 1, 2, 2, Links())
    assert (found.tok_s, found.limit) == (60_000, "drafters")
    assert apart(Stages(10_000, 30_000, 3_300, 0, reuse=3), 1, 1, 1, Links()).tok_s == 30_000


def test_the_best_split_follows_the_ratio_of_the_sides() -> None:
    def of_eight(target: float, drafter: float) -> tuple[int, int]:
        every = splits(Stages(target, drafter, 3_300, 0), 8, 8, Links(), may_share=False)
        found = best(every)
        assert found is not None
        return found.targets, found.drafters

    assert of_eight(25_000, 25_000) == (4, 4)
    assert of_eight(9_000, 15_000) == (5, 3)
    assert of_eight(70_000, 10_000) == (1, 7)


def test_one_gpu_holds_both_and_an_even_number_prefers_its_own() -> None:
    one = best(splits(BALANCED, 1, 8, Links()))
    assert one is not None and one.is_shared
    assert 12_500 < one.tok_s < 25_000
    assert best(splits(BALANCED, 1, 8, Links(), may_share=False)) is None
    eight = best(splits(BALANCED, 8, 8, Links()))
    assert eight is not None and eight.tok_s >= 4 * 25_000


def test_sums_cost_what_does_not_fit_behind_the_backward() -> None:
    assert sum_seconds(1e9, 1, 1, Links()) == 0
    assert sum_seconds(1e9, 1, 2, Links(inside=100)) == pytest.approx(0.01)
    assert sum_seconds(1e9, 2, 4, Links(between=10)) == pytest.approx(2 * 7 / 8 * 0.1)
    quick, slow = Links(inside=1e6), Links(inside=5.0)
    assert drafter_rate(BALANCED, 1, 2, quick, 25_000) == 25_000
    assert drafter_rate(BALANCED, 1, 2, slow, 25_000) < 10_000
    assert apart(BALANCED, 1, 4, 4, slow).limit == "sums of gradients"
    # More micro-batches a step share one sum.
    longer = BALANCED._replace(accumulation=16)
    assert per_drafter(longer, 1, 2) == 8
    assert drafter_rate(longer, 1, 2, slow, 25_000) > drafter_rate(BALANCED, 1, 2, slow, 25_000)


def test_an_exchange_of_weights_costs_its_bytes_whatever_the_backward_hides() -> None:
    links = Links(inside=100, between=1)
    assert exchange_seconds(1e9, 1, links) == 0
    assert exchange_seconds(1e9, 4, links) == pytest.approx(0.0075)
    quick = Links(inside=1000, between=1000)
    whole, divided = BALANCED._replace(gradient_bytes=0), BALANCED._replace(gradient_bytes=0, exchanged_bytes=2e9)
    # 3,300 tokens at 25,000 a second, and half of 2 GB at 1,000 GB/s.
    assert drafter_rate(whole, 1, 2, quick, 25_000) == 25_000
    assert drafter_rate(divided, 1, 2, quick, 25_000) == pytest.approx(3_300 / (3_300 / 25_000 + 1e-3))
    # Between nodes nothing is exchanged: each node holds a whole state.
    assert drafter_rate(divided, 8, 2, quick, 25_000) == drafter_rate(divided, 1, 2, quick, 25_000)
    assert apart(divided, 1, 6, 2, Links(inside=5)).limit == "exchanges of weights"
    assert shared(divided, 1, 8, Links(inside=5)).limit == "exchanges of weights"
    assert shared(divided._replace(gradient_bytes=4e9), 1, 8, Links(inside=5)).limit == "sums of gradients"


def test_many_nodes_are_alike_and_leftover_gpus_stay_out() -> None:
    found = best(splits(BALANCED, 1000, 8, Links()))
    assert found is not None
    assert (found.nodes, found.gpus) == (125, 1000)
    twelve = best(splits(BALANCED, 12, 8, Links()))
    assert twelve is not None and twelve.gpus == 8
    wide = best(splits(BALANCED, 8, 8, Links(), gpus_per_target=3))
    assert wide is not None and wide.gpus_per_target == 3 and not wide.is_shared
    assert "targets over 3 GPUs each" in wide.spell()


def test_nodes_that_sums_take_longer_than_are_left_out_and_nearly_as_fast_is_told_apart() -> None:
    for between, nodes, fewer in ((1.0, 1, 1), (2.1, 8, 1), (50.0, 8, 8)):
        every = list(splits(BALANCED, 64, 8, Links(between=between)))
        found = best(every)
        assert found is not None and found.nodes == nodes
        near = fewest_nodes(every, found)
        assert near.nodes == fewer and near.tok_s >= 0.95 * found.tok_s


@pytest.mark.parametrize(("name", "tflop"), [("qwen3-8b", 75.1), ("qwen3.6-27b", 128.8)])
def test_useful_work_of_a_step_is_that_of_the_benchmark(name: str, tflop: float) -> None:
    config = RunConfig(data=DataConfig(row_length=4096, num_anchors=512))
    assert step_flops(config, presets()[name]) / 1e12 == pytest.approx(tflop, rel=0.002)


def write_run(path: Path, *, samples: int = 4) -> Path:
    config = RunConfig(runtime=RuntimeConfig(targets=("cpu", "cpu"), drafters=("cpu",)))
    (path / "config.json").write_text(to_json(config))
    steps = [{"step": step, "tokens": 1000 * step, "seconds": step / 10} for step in range(1, 41)]
    (path / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in [*steps, {"step": 40, "eval/x": 1}])
    )
    workers = {"target 0": {"busy": 0.6}, "target 1": {"busy": 0.4}, "drafter 0": {"busy": 0.8}}
    lines = [{"step": 10 * number, "seconds": number, "workers": workers} for number in range(1, samples + 1)]
    (path / "workers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_rates_of_a_run_are_its_pace_by_how_busy_each_side_was(tmp_path: Path) -> None:
    found = measured_rates(write_run(tmp_path))
    # 10,000 tokens/s by two targets, half busy, and one drafter, busy for four fifths.
    assert found.target_tok_s == pytest.approx(10_000)
    assert found.drafter_tok_s == pytest.approx(12_500)
    assert "10,000 tokens/s, targets busy 50%, drafters 80%" in found.source


def test_of_a_resumed_run_the_last_start_is_measured(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    workers = {"target 0": {"busy": 0.5}, "target 1": {"busy": 0.5}, "drafter 0": {"busy": 0.5}}
    with (run / "metrics.jsonl").open("a") as file:
        for step in range(41, 61):
            file.write(json.dumps({"step": step, "tokens": 1000 * step, "seconds": (step - 40) / 5}) + "\n")
    with pytest.raises(ConfigError, match=r"expected a run of some seconds .* 20 steps and 0 samples"):
        measured_rates(run)  # Its workers are those of the first start.
    with (run / "workers.jsonl").open("a") as file:
        for seconds in (1, 2, 3):
            file.write(json.dumps({"step": 40 + 5 * seconds, "seconds": seconds, "workers": workers}) + "\n")
    assert "5,000 tokens/s, targets busy 50%, drafters 50%" in measured_rates(run).source


def test_a_run_that_divided_its_state_has_the_exchange_in_its_rate(tmp_path: Path) -> None:
    write_run(tmp_path)
    for drafters, expected in ((("cpu",), False), (("cpu", "cpu"), True)):
        runtime, optim = RuntimeConfig(targets=("cpu",), drafters=drafters), OptimConfig(accumulation=2, shard=True)
        config = RunConfig(runtime=runtime, optim=optim)
        (tmp_path / "config.json").write_text(to_json(config))
        assert measured_rates(tmp_path).has_exchange is expected


def test_a_run_that_shows_too_little_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a run of some seconds .* 40 steps and 0 samples"):
        measured_rates(write_run(tmp_path, samples=1))
    (tmp_path / "workers.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"expected a run directory with workers\.jsonl, found none"):
        measured_rates(tmp_path)
