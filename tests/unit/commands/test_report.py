"""A report's page, without a browser: what it shows, that it needs nothing else, what it says when nothing is there."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from blockdraft.cli import main
from blockdraft.commands.report import RunFiles, read_run
from blockdraft.commands.report_page import mean_shares, page, running_mean, throughput
from blockdraft.commands.report_plots import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Line, line_plot, nice_step
from blockdraft.commands.report_timeline import read_lanes, timeline
from blockdraft.config import RunConfig, TargetConfig, to_json

VOID = {"meta", "rect", "line", "circle", "polyline", "polygon", "i"}


class Page(HTMLParser):
    """Elements of a page with their attributes, and whether every one that opens is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.is_balanced = True
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        self.is_balanced &= bool(self.open) and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def step_line(step: int, **changes: Any) -> dict[str, Any]:
    line = {
        "step": step, "loss": 7.0 - step / 50, "accept": 1 + step / 100, "grad_norm": 1.0, "skipped_steps": 0,
        "accuracy_per_slot": [0.5, 0.25, 0.1], "tokens": 100 * step, "seconds": step / 2,
    }  # fmt: skip
    return line | changes


def sample(step: int, busy: float = 0.5) -> dict[str, Any]:
    shares = {"busy": busy, "for_input": 0.25, "to_hand_over": 0.125, "others": 0.0, "boundary": 0.0}
    return {
        "step": step, "seconds": step / 2, "workers": {"target 0": shares, "drafter 0": shares | {"busy": 0.75}},
        "channel": [1.5], "channel_depth": 2,
        "memory_gib": {"cuda:0": {"allocated": 10.0, "reserved": 12.0}, "host": {"resident": 3.0}},
    }  # fmt: skip


def trace() -> dict[str, Any]:
    def lane(process: int, thread: int, name: str) -> dict[str, Any]:
        return {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": name}}

    def span(process: int, thread: int, name: str, ts: float, dur: float) -> dict[str, Any]:
        return {"ph": "X", "pid": process, "tid": thread, "name": name, "ts": ts, "dur": dur, "args": {"step": 7}}

    return {
        "otherData": {"first_step": 7, "last_step": 8},
        "traceEvents": [
            lane(1, 0, "loader"), lane(1, 1, "target 0"), lane(1, 2, "drafter 0"), lane(2, 4, "drafter 0 on cuda:1"),
            span(1, 1, "fill", 0, 9000), span(1, 1, "forward", 500, 8000), span(1, 2, "micro-batch", 0, 900),
            span(2, 4, "micro-batch", 1000, 6000), span(2, 4, "waiting for input", 7000, 3000),
        ],
    }  # fmt: skip


def run_files(**changes: Any) -> RunFiles:
    steps = [step_line(step) for step in range(1, 101)]
    evaluations = [
        {"step": step, "eval/pairs": 1 + step / 50, "eval_slots/pairs": [0.5, 0.2, 0.0], "eval_seconds": 1.0}
        for step in (0, 50, 100)
    ]
    whole = RunFiles(
        name="runs/mine",
        config=json.loads(to_json(RunConfig())),
        environment={"torch": "2.13.0", "data": {"documents": 512, "drops": {"empty reply": 3}, "padding_share": 0.05}},
        steps=steps,
        evaluations=evaluations,
        samples=[sample(step) for step in range(1, 101, 5)],
        timeline=trace(),
        unreadable=[],
    )
    return whole._replace(**changes)


def empties(text: str) -> list[str]:
    return re.findall(r'<p class="(?:card )?empty">([^<]*)</p>', text)


def test_every_part_is_there_and_drawn():
    text = page(run_files())
    found = Page(text)
    assert found.is_balanced and found.open == []
    assert empties(text) == []
    for title in (
        "Loss", "Acceptance length", "Draft tokens that are right, by slot", "Acceptance by slot, held out: pairs",
        "Throughput", "Busy", "Channel", "Memory", "Where the time went", "Timeline of the last steps", "Data",
        "Machine and versions", "optim", "runtime",
    ):  # fmt: skip
        assert title in found.texts, title
    for label in ("loss, nats", "tokens per verification", "slot of the block", "tokens/s", "% of the time", "share",
                  "filled slots", "norm of all gradients", "GiB", "optimizer step", "time, ms"):  # fmt: skip
        assert label in found.texts, label
    assert "dropped: empty reply" in found.texts
    assert found.text.count("runs/mine") >= 1


def test_the_head_says_which_run_of_what_target_and_drafter_when_and_where():
    config = json.loads(to_json(RunConfig(target=TargetConfig(path="Qwen/Qwen3-8B"))))
    drafter = {"num_layers": 5, "hidden_size": 4096, "block_size": 16, "target_layer_ids": [1, 33], "parameters": 105e7}
    environment = {
        "started": ["2026-11-30T01:02:03+00:00"], "target_class": "Qwen3ForCausalLM", "target_layers": 36,
        "draft_vocab": 151936, "drafter": drafter,
    }  # fmt: skip
    text = page(run_files(config=config, environment=environment))
    assert "<title>mine: a drafter for Qwen3-8B</title>" in text
    lines = Page(text.split("</header>")[0].split("<header>")[1]).texts
    assert lines == [
        "mine: a drafter for Qwen3-8B",
        "Drafter: 5 layers of width 4,096, blocks of 16 (anchor included), 1,050.0 M parameters; reads target layers "
        "1, 33",
        "Target: Qwen/Qwen3-8B (Qwen3ForCausalLM, 36 layers); targets on cpu; drafters on cpu",
        "Run directory runs/mine; begun 2026-11-30 01:02 UTC",
    ]
    assert "Knowing nothing gives ln 151,936 = 11.93." in text
    tables = Page(text.split("<h2>Data and machine")[1].split("<script>")[0]).text
    assert "trainable parameters" in tables and "{" not in tables
    environment["started"].append("2026-12-01T10:00:00+00:00")
    again = page(run_files(config=config, environment=environment))
    assert "begun 2026-11-30 01:02 UTC, gone on 2026-12-01 10:00 UTC (start 2)" in again
    older = page(run_files(config=config | {"loss": {"objective": "kl"}}))
    assert "Drafter: 5 layers, blocks of 16 (anchor included)" in older and "was not recorded" in older
    assert "Divergence of the draft tokens" in older and "Knowing nothing" not in older


def test_every_line_of_a_plot_has_points_inside_its_frame():
    plots = [attributes for tag, attributes in Page(page(run_files())).elements if "data-plot" in attributes]
    assert len(plots) == 7
    for plot in plots:
        numbers = json.loads(plot["data-plot"])
        assert numbers["unit"]
        for line in numbers["lines"]:
            assert len(line["points"]) >= 2, (numbers["unit"], line["name"])
    for points in re.findall(r'<polyline[^>]* points="([^"]*)"', page(run_files())):
        for pair in points.split():
            left, top = map(float, pair.split(","))
            assert LEFT - 0.1 <= left <= WIDTH - RIGHT + 0.1
            assert TOP - 0.1 <= top <= HEIGHT - BOTTOM + 0.1


def test_the_page_needs_nothing_else():
    text = page(run_files())
    for tag, attributes in Page(text).elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not {"src", "href", "xlink:href", "action", "srcset"} & attributes.keys(), (tag, attributes)
    assert "url(" not in text
    assert "@import" not in text
    # A name of XML, never loaded.
    assert set(re.findall(r"https?://[^\"'\s<)]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|EventSource|import)\s*\(", text)


def test_names_cannot_become_markup():
    bad = "<script>alert(1)</script>"
    config = run_files().config | {"run_dir": bad}
    evaluations = [{"step": 0, f"eval/{bad}": 1.0, "eval_seconds": 1.0}]
    environment = {"torch": bad, "data": {"drops": {bad: 1}}}
    text = page(run_files(name=bad, config=config, evaluations=evaluations, environment=environment))
    assert bad not in text
    assert text.count("<script>") == 1
    assert Page(text).is_balanced


def test_what_was_not_recorded_is_said():
    nothing = run_files(environment={}, steps=[], evaluations=[], samples=[], timeline={})
    said = empties(page(nothing))
    assert "No step was recorded yet." in said
    assert "Nothing was held out: eval.prompts is empty." in said
    assert said.count("Not recorded: there is no workers.jsonl in this run directory, or it is empty.") == 4
    assert "Not recorded: a run writes timeline.json when it ends, and this one has none." in said
    assert "Not recorded: there is no environment.json." in said
    assert "<svg" not in page(nothing).split("<h2>Data and machine")[0]
    older = run_files(evaluations=[{"step": 0, "eval/pairs": 1.0, "eval_seconds": 1.0}])
    assert "Not recorded by this run." in empties(page(older))


def test_numbers_that_are_not_finite_are_gaps_and_skipped_steps_are_said():
    steps = [step_line(step) for step in range(1, 21)]
    steps[9] = step_line(10, loss=None, grad_norm=None, skipped_steps=1)
    steps[-1]["skipped_steps"] = 1
    text = page(run_files(steps=steps))
    assert "1 steps were skipped: their gradients were not finite." in text
    loss = next(part for part in text.split('<div class="card">') if "<h3>Loss" in part)
    assert loss.count("<polyline") == 2
    assert "nan" not in text.lower().replace("naming", "")


def test_many_workers_are_rows_of_colours():
    shares = sample(1)["workers"]["target 0"]
    names = [*(f"target {i}" for i in range(5)), *(f"drafter {i}" for i in range(3))]
    samples = [
        sample(step) | {"workers": {name: shares | {"busy": i / 10} for i, name in enumerate(names)}}
        for step in range(1, 30)
    ]
    text = page(run_files(samples=samples))
    part = next(part for part in text.split('<div class="card">') if "<h3>Busy" in part)
    assert part.count('class="cell"') == 8 * 29 + 40
    assert "step 1, worker target 3: 30.0%" in part
    # The first worker is on top.
    level = {name: float(re.search(rf'y="([\d.]+)" text-anchor="end">{name}<', part)[1]) for name in names}
    assert sorted(names, key=level.__getitem__) == names


def test_one_step_is_a_dot():
    drawn = line_plot([Line("loss", [1], [2.5])], unit="loss")
    assert drawn.count("<circle") == 1
    assert line_plot([Line("loss", [1, 2], [None, math.nan])], unit="loss") == ""


def test_many_steps_are_averaged_and_their_spread_is_kept():
    values = [1.0 if step % 2 else 3.0 for step in range(5000)]
    drawn = line_plot([Line("loss", range(5000), values)], unit="loss")
    points = json.loads(re.search(r'data-plot="([^"]*)"', drawn)[1].replace("&quot;", '"'))["lines"][0]["points"]
    assert 200 <= len(points) <= 400
    assert all(1.8 < value < 2.2 for _, value in points)
    assert drawn.count('class="band"') == 1
    assert "A point is the mean of 13 steps, shaded from the smallest to the largest of them." in drawn
    assert "shaded" not in line_plot([Line("loss", range(400), values[:400])], unit="loss")
    assert len(page(run_files(steps=[step_line(step) for step in range(1, 50_001)]))) < 600_000


def test_throughput_counts_over_a_resume():
    # Seconds begin at zero again after step 3; tokens go on.
    seconds = [1, 2, 3, 1, 2]
    lines = [step_line(step, seconds=at) for step, at in enumerate(seconds, start=1)]
    assert throughput(lines).values == [100, 100, None, 100]
    assert "0 min 05 s" in page(run_files(steps=lines))


def test_running_mean_leaves_out_what_is_no_number():
    assert running_mean([1.0, None, 3.0, 5.0], 2) == [1.0, 1.0, 3.0, 4.0]
    assert running_mean([None], 2) == [None]


def test_shares_are_weighted_by_time():
    first, second = sample(2, busy=0.1), sample(8, busy=0.9)
    assert mean_shares([first, second])["target 0"]["busy"] == pytest.approx((0.1 * 1 + 0.9 * 3) / 4)


@pytest.mark.parametrize(
    ("rough", "whole", "expected"),
    [(0.3, False, 0.5), (0.02, False, 0.02), (7.0, True, 10), (0.2, True, 1), (1.0, True, 1)],
)
def test_steps_of_an_axis_are_round(rough, whole, expected):
    assert nice_step(rough, whole) == pytest.approx(expected)


def test_a_worker_with_a_device_shows_the_device():
    lanes = read_lanes(trace())
    assert [lane.name for lane in lanes] == ["loader", "target 0", "drafter 0 on cuda:1"]
    drawn = timeline(trace())
    assert "micro-batch, step 7: 6.00 ms" in drawn
    assert "micro-batch, step 7: 0.90 ms" not in drawn
    # What lies inside another span is drawn on top of it.
    assert drawn.index("fill, step 7") < drawn.index("forward, step 7")


def test_a_directory_is_read_and_a_half_written_line_left_out(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(to_json(RunConfig()))
    lines = [json.dumps(step_line(step)) for step in range(1, 4)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 4, "lo')
    found = read_run(run)
    assert len(found.steps) == 3
    assert found.unreadable == ["metrics.jsonl:4"]
    assert main(["report", str(run)]) == 0
    assert f"written: {run / 'report.html'}" in capsys.readouterr().out
    assert "metrics.jsonl:4" in (run / "report.html").read_text(encoding="utf-8")


def test_a_directory_without_a_run_is_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert f"{tmp_path}: expected a run directory with a config.json, found none" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert main(["report", str(tmp_path)]) == 2
    assert "expected JSON" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_said(tmp_path, capsys):
    (tmp_path / "config.json").write_text(to_json(RunConfig()))
    (tmp_path / "file").write_text("")
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "file" / "x.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_the_command_loads_no_torch():
    import subprocess
    import sys

    code = "import sys, blockdraft.commands.report_page; print('torch' in sys.modules)"
    root = Path(__file__).parents[3] / "src"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
