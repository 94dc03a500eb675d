"""The demo's picture: acceptance length over training steps beside its controls, as SVG for light and dark pages."""

import html
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

WIDTH, HEIGHT = 900, 400
LEFT, RIGHT, TOP, BOTTOM = 58, 312, 66, 46
LABEL_HEIGHT: Final = 17
KEY: Final = "Dots: the few prompts watched in training. Rhombus: the exported drafter on all prompts."
STYLE: Final = """
svg { --page: #ffffff; --ink: #1d2026; --soft: #5d6470; --grid: #e6e7ea; --c0: #1f6fb2; --c1: #c8500a; }
@media (prefers-color-scheme: dark) {
  svg { --page: #14161a; --ink: #e8eaee; --soft: #a2aab6; --grid: #2e333b; --c0: #6db3f2; --c1: #ff9a5c; }
}
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif; }
text { fill: var(--soft); }
.head { font-size: 16px; font-weight: 600; fill: var(--ink); }
.named { fill: var(--c); }
.strong { font-weight: 600; }
.page { fill: var(--page); }
.grid { stroke: var(--grid); }
.line { stroke: var(--c); stroke-width: 2.5; fill: none; stroke-linejoin: round; }
.control { stroke: var(--c); stroke-width: 1.3; stroke-dasharray: 5 4; }
.dot { fill: var(--c); stroke: var(--page); stroke-width: 1.5; }
"""


class Curve(NamedTuple):
    """What was measured on one set of prompts."""

    name: str
    points: Sequence[tuple[int, float]]
    """(step, acceptance length) of the prompts watched in training."""
    after: float
    """Of the exported drafter, on all prompts of the set."""
    ngram: float
    """Of the n-gram table, on the same."""


class _Label(NamedTuple):
    value: float
    text: str
    style: str


def picture(title: str, curves: Mapping[str, Curve]) -> str:
    """The whole file; colours go by the curves' order."""
    last = max(step for curve in curves.values() for step, _ in curve.points)
    tops = [value for curve in curves.values() for value in (curve.after, curve.ngram, *(v for _, v in curve.points))]
    high = 0.5 * (int(max(tops) / 0.5) + 1)

    def place(step: float, value: float) -> tuple[float, float]:
        across, up = (WIDTH - LEFT - RIGHT) / last, (HEIGHT - TOP - BOTTOM) / (high - 1)
        return LEFT + step * across, HEIGHT - BOTTOM - (value - 1) * up

    parts, labels = [_frame(title, last, high, place(0, 1)[1])], [_Label(1.0, "1.00  plain decoding", "")]
    right = place(last, 1)[0]
    for number, curve in enumerate(curves.values()):
        color = f"--c:var(--c{number})"
        level = place(0, curve.ngram)[1]
        parts.append(
            f'<line class="control" style="{color}" x1="{LEFT}" x2="{right}" y1="{level:.1f}" y2="{level:.1f}"/>'
        )
        at = [place(step, value) for step, value in curve.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        parts.append(f'<polyline class="line" style="{color}" points="{path}"/>')
        parts += [f'<circle class="dot" style="{color}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>' for x, y in at]
        x, y = place(last, curve.after)
        # A rhombus: measured on more prompts than the dots.
        parts.append(f'<path class="dot" style="{color}" d="M{x:.1f} {y - 8:.1f}l8 8l-8 8l-8 -8z"/>')
        labels.append(
            _Label(curve.after, f"{curve.after:.2f}  drafter, {curve.name}", f'class="named strong" style="{color}"')
        )
        labels.append(
            _Label(curve.ngram, f"{curve.ngram:.2f}  5-gram table, {curve.name}", f'class="named" style="{color}"')
        )
    parts += _place_labels(labels, right + 14, [place(0, label.value)[1] for label in labels])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{html.escape(title)}"><style>{STYLE}</style>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _frame(title: str, last: int, high: float, base: float) -> str:
    parts = [
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text class="head" x="{LEFT}" y="22">{html.escape(title)}</text>',
        f'<text x="{LEFT}" y="43">{KEY}</text>',
    ]
    right = WIDTH - RIGHT
    for index in range(round((high - 1) / 0.5) + 1):
        value = 1 + 0.5 * index
        level = base - (HEIGHT - TOP - BOTTOM) * (value - 1) / (high - 1)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{level:.1f}" y2="{level:.1f}"/>')
        parts.append(f'<text x="{LEFT - 10}" y="{level + 4.5:.1f}" text-anchor="end">{value:.1f}</text>')
    for index in range(5):
        at = LEFT + (right - LEFT) * index / 4
        parts.append(f'<text x="{at:.1f}" y="{base + 20:.1f}" text-anchor="middle">{last * index / 4:,.0f}</text>')
    middle, height = (LEFT + right) / 2, (TOP + base) / 2
    parts.append(f'<text x="{middle:.1f}" y="{HEIGHT - 6}" text-anchor="middle">optimizer steps</text>')
    parts.append(
        f'<text x="16" y="{height:.1f}" text-anchor="middle" transform="rotate(-90 16 {height:.1f})">'
        "acceptance length, tokens per verification</text>"
    )
    return "\n".join(parts)


def _place_labels(labels: Sequence[_Label], left: float, levels: Sequence[float]) -> list[str]:
    """Beside their values, moved apart where they would cover each other."""
    order = sorted(range(len(labels)), key=lambda index: -levels[index])
    found, below = [], float("inf")
    for index in order:
        below = min(levels[index], below - LABEL_HEIGHT)
        label = labels[index]
        found.append(f'<text {label.style} x="{left:.1f}" y="{below + 4.5:.1f}">{html.escape(label.text)}</text>')
    return found
