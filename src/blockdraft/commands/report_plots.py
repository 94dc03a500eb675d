"""Plots of a report as inline SVG: lines over steps, and shares by slot over steps.

Colours are CSS variables of the page, so that one drawing serves light and dark. Every plot carries its numbers in
`data-plot`, from which the page's script reads values out under the pointer.
"""

import html
import json
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

WIDTH: Final = 560
HEIGHT: Final = 260
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 44
MOST_POINTS: Final = 400
"""Of a line; more are averaged, and a band shows the smallest and largest of each bin."""
COLORS: Final = 8
"""Colours of lines; a ninth line has the first one's colour and dashes."""


class Line(NamedTuple):
    """One quantity over steps; None and what is not finite is a gap."""

    name: str
    steps: Sequence[float]
    values: Sequence[float | None]
    has_dots: bool = False
    """For few and far values, such as evaluations."""
    is_faint: bool = False
    """Behind another line that says the same more calmly."""
    color: int | None = None
    """Number of its colour; its place among the lines when not given."""


class _Bin(NamedTuple):
    step: float
    mean: float | None
    low: float
    high: float


class _Axis(NamedTuple):
    low: float
    high: float
    ticks: list[float]


def line_plot(lines: Sequence[Line], *, unit: str, zero: bool = False, most: float | None = None) -> str:
    """Lines over steps. `unit` labels the y axis, which begins at 0 with `zero` and ends at `most` where given."""
    binned = [(line, _bins(line)) for line in lines]
    finite = [value for _, bins in binned for one in bins if one.mean is not None for value in (one.low, one.high)]
    steps = [one.step for _, bins in binned for one in bins]
    if not finite:
        return ""
    low = 0.0 if zero else min(finite)
    y = _axis(low, max(finite) if most is None else most, 5, is_fixed=most is not None)
    x = _axis(min(steps), max(steps), 6, is_fixed=True, whole=True)
    parts = [_frame(x, y, unit)]
    for index, (line, bins) in enumerate(binned):
        parts.append(_draw(line, bins, x, y, _color(index, line)))
    numbers = {
        "x": [x.low, x.high],
        "frame": [LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM],
        "unit": unit,
        "lines": [
            {"name": line.name, "points": [[one.step, _short(one.mean)] for one in bins if one.mean is not None]}
            for line, bins in binned
        ],
    }
    # A single line that is called like its axis needs no legend.
    is_named = [line.name for line in lines] != [unit]
    return _svg(parts, numbers, f"{unit} over steps") + (_legend(lines) if is_named else "") + _note(lines)


def slot_plot(steps: Sequence[float], share_by_slot: Sequence[Sequence[float | None]]) -> str:
    """Shares by slot as colours, slot 1 at the bottom. The scale ends where the data do."""
    num_slots = max((len(shares) for shares in share_by_slot), default=0)
    names = [str(slot) for slot in range(1, num_slots + 1)]
    known = [share for shares in share_by_slot for share in shares if share is not None]
    most = next((end for end in (0.1, 0.25, 0.5) if max(known, default=1.0) <= end), 1.0)
    return heat_plot(steps, share_by_slot, names, rows_are="slot", title="slot of the block", most=most)


def heat_plot(
    steps: Sequence[float],
    shares_by_step: Sequence[Sequence[float | None]],
    names: Sequence[str],
    *,
    rows_are: str,
    title: str,
    most: float,
) -> str:
    """Shares as colours: steps to the right, rows upwards from the first name; the scale goes from 0 to `most`."""
    if not names or not steps:
        return ""
    columns = _columns(steps, shares_by_step, len(names))
    right = WIDTH - RIGHT - 64
    width, height = (right - LEFT) / len(columns), (HEIGHT - TOP - BOTTOM) / len(names)
    parts = []
    for column, (step, shares) in enumerate(columns):
        for row, share in enumerate(shares):
            if share is not None:
                left, top = LEFT + column * width, HEIGHT - BOTTOM - (row + 1) * height
                about = html.escape(f"step {step:,.0f}, {rows_are} {names[row]}: {share:.1%}")
                parts.append(
                    f'<rect class="cell" x="{left:.2f}" y="{top:.2f}" width="{width:.2f}" height="{height:.2f}" '
                    f'fill="{heat(share / most)}"><title>{about}</title></rect>'
                )
    every = max(1, math.ceil(len(names) / 8))
    for row in range(0, len(names), every):
        middle, label = HEIGHT - BOTTOM - (row + 0.5) * height, html.escape(names[row])
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{middle + 4:.1f}" text-anchor="end">{label}</text>')
    for column in _labelled([step for step, _ in columns]):
        at, top = LEFT + (column + 0.5) * width, HEIGHT - BOTTOM + 18
        label = f"{columns[column][0]:,.0f}"
        parts.append(f'<text class="tick" x="{at:.1f}" y="{top}" text-anchor="middle">{label}</text>')
    parts.append(_titles(title, (LEFT + right) / 2))
    parts.append(_heat_scale(right + 18, most))
    parts.append(f'<text class="tick" x="{right + 18:.1f}" y="{TOP - 4}">share</text>')
    return _svg(parts, None, f"share by {rows_are} over steps")


def _labelled(steps: Sequence[float]) -> list[int]:
    """Columns under which their step is written: all, or those next to round steps."""
    if len(steps) <= 8:
        return list(range(len(steps)))
    ticks = _axis(steps[0], steps[-1], 6, is_fixed=True, whole=True).ticks
    return sorted({min(range(len(steps)), key=lambda column: abs(steps[column] - tick)) for tick in ticks})


def heat(share: float) -> str:
    """A colour for 0..1, dark to light, evenly spaced to the eye."""
    stops = [
        (38, 28, 82),
        (76, 52, 140),
        (142, 58, 142),
        (204, 78, 108),
        (242, 134, 72),
        (252, 206, 92),
        (252, 246, 190),
    ]
    at = min(1.0, max(0.0, share)) * (len(stops) - 1)
    index = min(int(at), len(stops) - 2)
    mixed = (round(a + (b - a) * (at - index)) for a, b in zip(stops[index], stops[index + 1], strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _columns(
    steps: Sequence[float], shares_by_step: Sequence[Sequence[float | None]], num_rows: int
) -> list[tuple[float, list[float | None]]]:
    """At most 96 columns, each the mean of the steps that fall into it."""
    size = max(1, math.ceil(len(steps) / 96))
    columns = []
    for start in range(0, len(steps), size):
        chosen = shares_by_step[start : start + size]
        shares: list[float | None] = []
        for row in range(num_rows):
            known = [one[row] for one in chosen if row < len(one)]
            finite = [value for value in known if value is not None and math.isfinite(value)]
            shares.append(sum(finite) / len(finite) if finite else None)
        columns.append((steps[min(start + size, len(steps)) - 1], shares))
    return columns


def _heat_scale(left: float, most: float) -> str:
    height = (HEIGHT - TOP - BOTTOM) / 40
    cells = [
        f'<rect class="cell" x="{left:.1f}" y="{TOP + index * height:.2f}" width="12" height="{height:.2f}" '
        f'fill="{heat(1 - (index + 0.5) / 40)}"/>'
        for index in range(40)
    ]
    ends = [
        f'<text class="tick" x="{left + 17:.1f}" y="{y:.1f}">{label}</text>'
        for label, y in (
            (f"{most:.0%}", TOP + 9),
            (f"{50 * most:.3g}%", (TOP + HEIGHT - BOTTOM) / 2 + 4),
            ("0%", HEIGHT - BOTTOM),
        )
    ]
    return "".join(cells + ends)


def _bins(line: Line) -> list[_Bin]:
    points = list(zip(line.steps, line.values, strict=True))
    size = max(1, math.ceil(len(points) / MOST_POINTS))
    found = []
    for start in range(0, len(points), size):
        chosen = points[start : start + size]
        finite = [value for _, value in chosen if value is not None and math.isfinite(value)]
        if finite:
            found.append(_Bin(chosen[-1][0], sum(finite) / len(finite), min(finite), max(finite)))
        else:
            found.append(_Bin(chosen[-1][0], None, 0.0, 0.0))
    return found


def _draw(line: Line, bins: list[_Bin], x: _Axis, y: _Axis, style: str) -> str:
    runs: list[list[_Bin]] = [[]]
    for one in bins:
        if one.mean is None:
            runs.append([])
        else:
            runs[-1].append(one)
    parts = []
    for run in filter(None, runs):
        if any(one.high > one.low for one in run):
            edge = [(one.step, one.high) for one in run] + [(one.step, one.low) for one in reversed(run)]
            corners = " ".join(f"{_at_x(step, x):.1f},{_at_y(value, y):.1f}" for step, value in edge)
            parts.append(f'<polygon class="band" style="{style}" points="{corners}"/>')
        at = [(_at_x(one.step, x), _at_y(one.mean if one.mean is not None else 0.0, y)) for one in run]
        if len(at) > 1:
            points = " ".join(f"{left:.1f},{top:.1f}" for left, top in at)
            parts.append(f'<polyline class="{_class(line)}" style="{style}" points="{points}"/>')
        if line.has_dots or len(at) == 1:
            parts += [f'<circle class="dot" style="{style}" cx="{a:.1f}" cy="{b:.1f}" r="3.2"/>' for a, b in at]
    return "".join(parts)


def _frame(x: _Axis, y: _Axis, unit: str) -> str:
    parts = []
    for tick in y.ticks:
        at = _at_y(tick, y)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        label = _spell(tick, y)
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    for tick in x.ticks:
        at = _at_x(tick, x)
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:,.0f}</text>'
        )
    base = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    return "".join(parts) + _titles(unit, (LEFT + WIDTH - RIGHT) / 2)


def _titles(unit: str, middle: float) -> str:
    height = (TOP + HEIGHT - BOTTOM) / 2
    return (
        f'<text class="title" x="{middle:.1f}" y="{HEIGHT - 6}" text-anchor="middle">optimizer step</text>'
        f'<text class="title" x="14" y="{height}" text-anchor="middle" transform="rotate(-90 14 {height})">'
        f"{html.escape(unit)}</text>"
    )


def _svg(parts: Sequence[str], numbers: object, label: str) -> str:
    data = f' data-plot="{html.escape(json.dumps(numbers))}"' if numbers is not None else ""
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(label)}"{data}>'
        f"{''.join(parts)}</svg>"
    )


def _legend(lines: Sequence[Line]) -> str:
    items = [
        f'<li><svg viewBox="0 0 22 8"><line class="{_class(line)}" style="{_color(index, line)}" x1="1" x2="21" y1="4" '
        f'y2="4"/></svg>{html.escape(line.name)}</li>'
        for index, line in enumerate(lines)
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _note(lines: Sequence[Line]) -> str:
    """What the bands are, where there are any."""
    size = max(math.ceil(len(line.steps) / MOST_POINTS) for line in lines)
    if size == 1:
        return ""
    return f'<p class="note">A point is the mean of {size} steps, shaded from the smallest to the largest of them.</p>'


def _class(line: Line) -> str:
    return "line faint" if line.is_faint else "line"


def _color(index: int, line: Line) -> str:
    number = index if line.color is None else line.color
    dashes = ";stroke-dasharray:6 3" if number >= COLORS else ""
    return f"--c:var(--c{number % COLORS}){dashes}"


def _at_x(step: float, x: _Axis) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (step - x.low) / max(1e-9, x.high - x.low)


def _at_y(value: float, y: _Axis) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - y.low) / max(1e-9, y.high - y.low)


def _axis(low: float, high: float, most: int, *, is_fixed: bool, whole: bool = False) -> _Axis:
    """Round ticks; the ends are moved out to ticks unless they are fixed."""
    if high <= low:
        low, high = (low - 0.5, high + 0.5) if whole or low else (0.0, 1.0)
    step = nice_step((high - low) / most, whole)
    if not is_fixed:
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    first = math.ceil(low / step - 1e-9)
    return _Axis(low, high, [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)])


def nice_step(rough: float, whole: bool = False) -> float:
    """The next of 1, 2, 5 times a power of ten; at least 1 with `whole`."""
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return max(1.0, step) if whole else step


def _spell(tick: float, axis: _Axis) -> str:
    step = axis.ticks[1] - axis.ticks[0] if len(axis.ticks) > 1 else max(abs(tick), 1e-9)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    if abs(axis.high) >= 1e5 and step >= 1e3:
        return f"{tick / 1e3:,.0f}k"
    return f"{tick:,.{digits}f}"


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
