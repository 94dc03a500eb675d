"""What a run leaves beside its numbers: samples of its workers, a timeline of its last steps, a trace on request."""

import json
from pathlib import Path
from typing import Any

import pytest

from blockdraft.commands import observing, train
from blockdraft.config import ConfigError
from blockdraft.runtime.diagnostics import Diagnostics
from blockdraft.runtime.workers import WorkerError
from integration.test_resume import forget_after
from integration.tiny_run import Files, make_files, metrics, run_control, tiny_config


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return make_files(tmp_path_factory.mktemp("observing"))


@pytest.fixture(scope="module")
def traced(files, tmp_path_factory) -> tuple[Path, list[str]]:
    """Two targets and two drafters, 16 steps, of which three are traced."""
    runtime = {"targets": ("cpu", "cpu"), "drafters": ("cpu", "cpu")}
    config = tiny_config(files, tmp_path_factory.mktemp("traced"), steps=16, optim={"accumulation": 4}, runtime=runtime)
    ran = run_control(config, diagnostics=Diagnostics(trace_steps=3, count_waits=3))
    return ran.run_dir, ran.lines


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def lanes(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found[names[event["pid"], event["tid"]]].append(event)
    return found


def test_waits_that_were_asked_for_without_a_gpu_are_said_not_to_be_counted(traced):
    _, lines = traced
    assert [line for line in lines if "waits for a GPU" in line] == ["waits for a GPU: not counted, no worker has one"]


def test_a_trace_says_where_it_is_and_has_the_steps_asked_for(traced):
    run_dir, lines = traced
    path = run_dir / "trace_steps_11_13.json"
    assert f"trace: {path}, open it in https://ui.perfetto.dev" in lines
    trace = read(path)
    assert trace["otherData"] == {"first_step": 11, "last_step": 13}
    drawn = lanes(trace)
    assert list(drawn) == ["loader", "target 0", "target 1", "drafter 0", "drafter 1", "writer", "control"]
    for drafter in ("drafter 0", "drafter 1"):
        spans = drawn[drafter]
        of_step = [span["name"] for span in spans if span["args"]["step"] == 12]
        assert of_step.count("micro-batch") == 2
        assert of_step.count("waiting for input") == 2
        assert of_step.count("update") == of_step.count("sum of gradients") == 1
    forwards = [span for name in ("target 0", "target 1") for span in drawn[name] if span["name"] == "forward"]
    fills = [span for name in ("target 0", "target 1") for span in drawn[name] if span["name"] == "fill"]
    assert len(forwards) >= len(fills) >= 8
    assert {span["name"] for span in drawn["control"]} == {"log"}


def test_spans_of_a_thread_do_not_cross_each_other(traced):
    for spans in lanes(read(traced[0] / "trace_steps_11_13.json")).values():
        open_until: list[float] = []
        for span in sorted(spans, key=lambda one: (one["ts"], -one["dur"])):
            while open_until and open_until[-1] <= span["ts"] + 0.2:
                open_until.pop()
            # Inside whatever is open, to the rounding of the file.
            assert all(span["ts"] + span["dur"] <= end + 0.3 for end in open_until)
            open_until.append(span["ts"] + span["dur"])


def test_a_trace_counts_the_channel(traced):
    events = [e for e in read(traced[0] / "trace_steps_11_13.json")["traceEvents"] if e["ph"] == "C"]
    assert len(events) >= 12
    assert all(set(event["args"]) == {"drafter 0", "drafter 1"} for event in events)
    assert all(0 <= count <= 2 for event in events for count in event["args"].values())


def test_every_run_leaves_a_timeline_and_samples(traced):
    run_dir, _ = traced
    timeline = read(run_dir / "timeline.json")
    assert timeline["otherData"] == {"first_step": 1, "last_step": 16}
    assert {"save"} <= {span["name"] for span in lanes(timeline)["drafter 0"]}
    assert {"write"} <= {span["name"] for span in lanes(timeline)["writer"]}
    samples = [json.loads(line) for line in (run_dir / "workers.jsonl").read_text().splitlines()]
    assert samples[-1]["step"] == 16
    for sample in samples:
        assert set(sample["workers"]) == {"target 0", "target 1", "drafter 0", "drafter 1"}
        for shares in sample["workers"].values():
            assert set(shares) == {"busy", "for_input", "to_hand_over", "others", "boundary"}
            assert all(0 <= share <= 1 for share in shares.values())
        assert len(sample["channel"]) == 2
        assert sample["channel_depth"] == 2
        assert sample["memory_gib"]["host"]["resident"] > 0.1
    assert any(sample["workers"]["drafter 0"]["busy"] > 0 for sample in samples)


def test_a_run_without_the_flag_writes_no_trace_and_the_same_numbers(traced, files, tmp_path):
    runtime = {"targets": ("cpu", "cpu"), "drafters": ("cpu", "cpu")}
    config = tiny_config(files, tmp_path, steps=16, optim={"accumulation": 4}, runtime=runtime)
    ran = run_control(config)
    assert sorted(path.name for path in tmp_path.glob("t*.json")) == ["timeline.json"]
    assert not any("trace" in line for line in ran.lines)
    assert metrics(tmp_path) == metrics(traced[0])


def test_a_resumed_run_goes_on_with_its_samples(files, tmp_path):
    config = tiny_config(files, tmp_path / "whole")
    run_control(config)
    checkpoint = forget_after(tmp_path / "whole", tmp_path / "parts", 5)
    run_control(tiny_config(files, tmp_path / "parts"), resume=checkpoint, diagnostics=Diagnostics(trace_steps=50))
    steps = [json.loads(line)["step"] for line in (tmp_path / "parts" / "workers.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    assert {1, 5, 6, 10} <= set(steps)
    # More steps were asked for than there are.
    assert read(tmp_path / "parts" / "trace_steps_6_10.json")["otherData"] == {"first_step": 6, "last_step": 10}


def test_a_run_that_dies_leaves_its_last_steps(files, tmp_path):
    def delay(worker: str, number: int) -> None:
        if worker == "drafter 0" and number == 6:
            raise RuntimeError("gone")

    with pytest.raises(WorkerError):
        run_control(tiny_config(files, tmp_path), delay=delay)
    assert read(tmp_path / "timeline.json")["otherData"]["last_step"] in (6, 7)


def test_a_full_disk_does_not_hide_why_the_run_ended(files, tmp_path, monkeypatch):
    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    def delay(worker: str, number: int) -> None:
        if worker == "drafter 0" and number == 6:
            raise RuntimeError("the first error")

    lines: list[str] = []
    monkeypatch.setattr(observing.Observer, "_write", full)
    with pytest.raises(WorkerError, match="the first error"):
        run_control(tiny_config(files, tmp_path), delay=delay, say=lambda _control, line: lines.append(line))
    assert any("could not be written: [Errno 28] No space left on device" in line for line in lines)


def test_a_number_of_steps_below_zero_is_refused():
    with pytest.raises(ConfigError, match=r"--trace is a number of steps and must be at least 0 .no trace., got -1"):
        train.Options(trace=-1)
