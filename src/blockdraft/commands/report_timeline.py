"""The timeline of a report: some steps with a lane per worker, from the spans that the run recorded."""

import html
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from blockdraft.commands.report_plots import nice_step

WIDTH: Final = 1180
LEFT: Final = 150
LANE: Final = 26
TOP: Final = 8
MOST_SPANS: Final = 4000
KINDS: Final = {
    "pack": "pack",
    "fill": "fill",
    "forward": "forward",
    "copy": "copy",
    "micro-batch": "micro",
    "sum of gradients": "sum",
    "update": "update",
    "exchange of weights": "exchange",
    "save": "save",
    "write": "write",
    "evaluate": "evaluate",
    "log": "log",
    "waiting for input": "wait",
    "waiting to hand over": "wait",
    "waiting for other drafters": "wait",
}
"""What a span is called, and the colour that it has; what is not here is grey."""


class Bar(NamedTuple):
    """One span, in milliseconds from the beginning of the timeline."""

    what: str
    start_ms: float
    end_ms: float
    step: int


class Lane(NamedTuple):
    """One worker."""

    name: str
    bars: list[Bar]


def read_lanes(trace: dict[str, Any]) -> list[Lane]:
    """A lane for each worker of a Chrome trace: its device's where that was timed, else its thread's."""
    names: dict[tuple[int, int], str] = {}
    bars: dict[tuple[int, int], list[Bar]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "M" and event["name"] == "thread_name":
            names[event["pid"], event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            start_ms = event["ts"] / 1e3
            bar = Bar(event["name"], start_ms, start_ms + event["dur"] / 1e3, event["args"]["step"])
            bars.setdefault((event["pid"], event["tid"]), []).append(bar)
    devices = {name.split(" on ")[0] for (process, _), name in names.items() if process == 2}
    return [
        Lane(name, sorted(bars.get(key, []), key=lambda bar: (bar.start_ms, -bar.end_ms)))
        for key, name in names.items()
        if key[0] == 2 or name not in devices
    ]


def timeline(trace: dict[str, Any]) -> str:
    """Lanes as SVG, with a scale in milliseconds and a legend; empty when no span was recorded."""
    lanes = read_lanes(trace)
    bars = [bar for lane in lanes for bar in lane.bars]
    if not bars:
        return ""
    # The spans that began before the first step shown, or end behind the last, are cut at the edges.
    end_ms = max(bar.end_ms for lane in lanes if lane.name.startswith("drafter") for bar in lane.bars)
    height = TOP + LANE * len(lanes) + 44
    parts = [_scale(end_ms, len(lanes))]
    left_out = max(0, len(bars) - MOST_SPANS)
    for row, lane in enumerate(lanes):
        top = TOP + row * LANE
        parts.append(
            f'<text class="lane" x="{LEFT - 10}" y="{top + 17}" text-anchor="end">{html.escape(lane.name)}</text>'
        )
        shown = lane.bars[: max(1, MOST_SPANS // len(lanes))] if left_out else lane.bars
        parts += [_draw(bar, top, end_ms, _is_inside(bar, lane.bars)) for bar in shown if bar.end_ms > 0]
    used = {bar.what for bar in bars}
    note = f'<p class="note">{left_out:,} spans more than fit are left out.</p>' if left_out else ""
    return (
        f'<div class="scroll"><svg class="timeline" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="timeline of workers">{"".join(parts)}</svg></div>{_legend(used)}{note}'
    )


def _is_inside(bar: Bar, bars: Sequence[Bar]) -> bool:
    """Whether another span of the lane encloses this one: it is drawn lower, on top of that."""
    return any(
        other is not bar and other.start_ms <= bar.start_ms and other.end_ms >= bar.end_ms and other.what != bar.what
        for other in bars
    )


def _draw(bar: Bar, top: float, end_ms: float, is_inside: bool) -> str:
    scale = (WIDTH - LEFT - 10) / end_ms
    left, right = LEFT + max(0.0, bar.start_ms) * scale, LEFT + min(end_ms, bar.end_ms) * scale
    kind = KINDS.get(bar.what, "other")
    y, height = (top + 11, LANE - 14) if is_inside else (top + 3, LANE - 6)
    label = f"{bar.what}, step {bar.step}: {bar.end_ms - bar.start_ms:.2f} ms"
    return (
        f'<rect class="span {kind}" x="{left:.2f}" y="{y}" width="{max(0.4, right - left):.2f}" height="{height}">'
        f"<title>{html.escape(label)}</title></rect>"
    )


def _scale(end_ms: float, num_lanes: int) -> str:
    bottom = TOP + num_lanes * LANE
    step = nice_step(end_ms / 10)
    unit, factor = ("s", 1e3) if end_ms >= 20_000 else ("ms", 1.0)
    step = nice_step(end_ms / factor / 10) * factor
    parts = []
    index = 0
    while index * step <= end_ms:
        at = LEFT + (WIDTH - LEFT - 10) * index * step / end_ms
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
        label = f"{index * step / factor:,.10g}"
        parts.append(f'<text class="tick" x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{label}</text>')
        index += 1
    middle = (LEFT + WIDTH - 10) / 2
    parts.append(f'<text class="title" x="{middle:.1f}" y="{bottom + 36}" text-anchor="middle">time, {unit}</text>')
    return "".join(parts)


def _legend(used: set[str]) -> str:
    known = [what for what in KINDS if what in used and KINDS[what] != "wait"]
    items = [(what, KINDS[what]) for what in known]
    items += [(what, "other") for what in sorted(used - set(KINDS))]
    if used & {what for what, kind in KINDS.items() if kind == "wait"}:
        items.append(("waiting (why: point at it)", "wait"))
    return (
        '<ul class="legend">'
        + "".join(
            f'<li><svg viewBox="0 0 14 10"><rect class="span {kind}" x="0.5" y="0.5" width="13" height="9"/></svg>'
            f"{html.escape(what)}</li>"
            for what, kind in items
        )
        + "</ul>"
    )
