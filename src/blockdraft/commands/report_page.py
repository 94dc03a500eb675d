"""A run's page: what was recorded, as tiles, plots, a timeline and tables."""

import html
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from blockdraft.commands.report import RunFiles
from blockdraft.commands.report_head import drafter_rows, head, loss_is, title
from blockdraft.commands.report_plots import Line, heat_plot, line_plot, slot_plot
from blockdraft.commands.report_style import SCRIPT, STYLE
from blockdraft.commands.report_timeline import timeline

SHARES = {
    "busy": ("busy", "--c2"),
    "for_input": ("waiting for input", "--c4"),
    "to_hand_over": ("waiting to hand over", "--c6"),
    "others": ("waiting for other drafters", "--c3"),
    "boundary": ("saving, evaluating", "--c5"),
}
"""Fields of a sample, with their names and colours."""
MOST_LINES = 4
"""Workers that one plot shows as lines."""
OWN_CARDS = ("data", "drafter", "started")
"""Parts of environment.json that stand elsewhere than in its table."""


def page(found: RunFiles) -> str:
    """The whole page, without anything that it would have to load."""
    parts = [
        head(found),
        _tiles(found),
        _alerts(found),
        "<h2>Learning</h2>",
        _cards(_learning(found)),
        "<h2>Speed</h2>",
        _cards(_speed(found)),
        "<h2>Workers</h2>",
        _workers(found),
        "<h2>Data and machine</h2>",
        _columns(
            [
                _table_card("Drafter", drafter_rows(found), "Not recorded by this run."),
                _data(found),
                *_environment(found),
            ]
        ),
        "<h2>Configuration</h2>",
        _columns(_config(found.config)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title(found))}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + f"\n<script>{SCRIPT}</script>\n</body></html>\n"
    )


def _tiles(found: RunFiles) -> str:
    tiles = []
    if found.steps:
        last, total = found.steps[-1], found.config.get("steps")
        tiles.append((f"{last['step']:,}" + (f" of {total:,}" if total else ""), "optimizer steps"))
        tiles.append((_count(last["tokens"]), "tokens trained on"))
        tiles.append((_from_to([line["loss"] for line in found.steps]), "loss, first and last step, nats"))
        tiles.append((_spell_seconds(_seconds(found.steps)), "of steps, start-up left out"))
    for name in _sets(found):
        lengths = [line[f"eval/{name}"] for line in found.evaluations if f"eval/{name}" in line]
        tiles.append((_from_to(lengths), f"held-out acceptance length, {name}"))
    rates = [value for value in throughput(found.steps).values if value is not None]
    if rates:
        tiles.append((_count(median(rates)), "tokens per second, median"))
    for side in ("target", "drafter"):
        shares = [value["busy"] for name, value in mean_shares(found.samples).items() if name.startswith(side)]
        if shares:
            tiles.append((f"{sum(shares) / len(shares):.0%}", f"{side} busy"))
    if not tiles:
        return '<p class="card empty">No step was recorded yet.</p>'
    cells = [f'<div class="tile"><b>{html.escape(b)}</b><span>{html.escape(s)}</span></div>' for b, s in tiles]
    return f'<div class="tiles">{"".join(cells)}</div>'


def _alerts(found: RunFiles) -> str:
    lines = []
    skipped = found.steps[-1].get("skipped_steps") if found.steps else 0
    if skipped:
        lines.append(f"{skipped:,} steps were skipped: their gradients were not finite.")
    if found.unreadable:
        shown = ", ".join(found.unreadable[:5]) + (" and others" if len(found.unreadable) > 5 else "")
        lines.append(f"Lines that could not be read, left out here: {shown}.")
    return "".join(f'<p class="alert">{html.escape(line)}</p>' for line in lines)


# Plots


def _learning(found: RunFiles) -> list[tuple[str, str, str]]:
    steps = [line["step"] for line in found.steps]
    loss = [line["loss"] for line in found.steps]
    lines = [Line("loss, nats", steps, loss)]
    if len(steps) >= 60:
        size = max(5, len(steps) // 25)
        lines = [
            Line("each step", steps, loss, is_faint=True, color=0),
            Line(f"mean of {size} steps", steps, running_mean(loss, size), color=0),
        ]
    accept = [Line("training, teacher-forced", steps, [line.get("accept") for line in found.steps], is_faint=True)]
    accept += [
        Line(
            f"held out: {name}",
            [line["step"] for line in found.evaluations],
            [line.get(f"eval/{name}") for line in found.evaluations],
            has_dots=True,
        )
        for name in _sets(found)
    ]
    no_steps = "No step was recorded yet."
    cards = [
        ("Loss", loss_is(found),
         line_plot(lines, unit="loss, nats") or _empty(no_steps)),
        ("Acceptance length", "Tokens per forward of the target; plain decoding is 1. Teacher-forced: behind the "
         "data's own text; held out: by replay of the target's answers.",
         line_plot(accept, unit="tokens per verification") or _empty(no_steps)),
        ("Draft tokens that are right, by slot", "Training, teacher-forced: share of the blocks, each slot by itself.",
         slot_plot(steps, [line.get("accuracy_per_slot", []) for line in found.steps]) or _empty(no_steps)),
    ]  # fmt: skip
    norms = [Line("before clipping", steps, [line.get("grad_norm") for line in found.steps])]
    about = f"Clipped at {found.config.get('optim', {}).get('clip', 'a length that config.json does not say')}."
    plot = line_plot(norms, unit="norm of all gradients", zero=True)
    cards.append(("Gradient norm", about, plot or _empty(no_steps)))
    for name in _sets(found):
        with_slots = [line for line in found.evaluations if f"eval_slots/{name}" in line]
        plot = slot_plot([line["step"] for line in with_slots], [line[f"eval_slots/{name}"] for line in with_slots])
        about = "Share of the rounds that accept a slot's token, and so all slots before it."
        cards.append((f"Acceptance by slot, held out: {name}", about, plot or _empty("Not recorded by this run.")))
    if not _sets(found):
        text = "Nothing was held out: eval.prompts is empty."
        cards.append(("Acceptance by slot, held out", "Measured by replay during the run.", _empty(text)))
    return cards


def _speed(found: RunFiles) -> list[tuple[str, str, str]]:
    # The last step may have a second sample, of the time until the run's end.
    samples = list({line["step"]: line for line in reversed(found.samples)}.values())[::-1]
    steps = [line["step"] for line in samples]
    workers = list(dict.fromkeys(name for line in samples for name in line["workers"]))
    depth = max((line["channel_depth"] for line in samples), default=1)
    rings = max((len(line["channel"]) for line in samples), default=0)
    channel = [
        Line(f"drafter {ring}", steps, [line["channel"][ring] if ring < len(line["channel"]) else None
                                        for line in samples])
        for ring in range(rings)
    ]  # fmt: skip
    places = dict.fromkeys(
        (device, kind) for line in samples for device, kinds in line["memory_gib"].items() for kind in kinds
    )
    memory = [
        Line(f"{device} {kind}", steps, [line["memory_gib"].get(device, {}).get(kind) for line in samples])
        for device, kind in places
    ]
    missing = _empty("Not recorded: there is no workers.jsonl in this run directory, or it is empty.")
    return [
        ("Throughput", "Document tokens trained on per second, saving and evaluating included.",
         line_plot([throughput(found.steps)], unit="tokens/s", zero=True)
         or _empty("Fewer than two steps were recorded.")),
        ("Busy", "Share of the time that each worker computed.",
         _busy_plot(samples, workers) or missing),
        ("Channel", f"Filled slots of each drafter's ring, of {depth}.",
         line_plot(channel, unit="filled slots", zero=True, most=float(depth)) or missing),
        ("Memory", "What each GPU's allocator has given out and holds, and the process on the host.",
         line_plot(memory, unit="GiB", zero=True) or missing),
    ]  # fmt: skip


def _busy_plot(samples: Sequence[Mapping[str, Any]], workers: Sequence[str]) -> str:
    """Lines of a few workers; more would cover each other, so they become rows of colours."""
    steps = [line["step"] for line in samples]
    shares = [[line["workers"].get(name, {}).get("busy") for name in workers] for line in samples]
    if len(workers) > MOST_LINES:
        rows = [list(reversed(one)) for one in shares]
        return heat_plot(steps, rows, list(reversed(workers)), rows_are="worker", title="", most=1.0)
    lines = [
        Line(name, steps, [None if one[index] is None else 100 * one[index] for one in shares])
        for index, name in enumerate(workers)
    ]
    return line_plot(lines, unit="% of the time", zero=True, most=100.0)


def throughput(steps: Sequence[Mapping[str, Any]]) -> Line:
    """Tokens per second between steps, each over a fiftieth of the run, so that single steps do not jump."""
    size = max(1, len(steps) // 50)
    chosen = list(steps[::size])
    if steps and chosen[-1] is not steps[-1]:
        chosen.append(steps[-1])
    at, rates = [], []
    for before, after in itertools.pairwise(chosen):
        seconds, tokens = after["seconds"] - before["seconds"], after["tokens"] - before["tokens"]
        at.append(after["step"])
        # A resumed run counts its seconds from zero again.
        rates.append(tokens / seconds if seconds > 0 and tokens > 0 else None)
    return Line("tokens/s", at, rates)


def running_mean(values: Sequence[float | None], size: int) -> list[float | None]:
    """Of the last `size` values that are numbers."""
    found: list[float | None] = []
    for end in range(1, len(values) + 1):
        known = [value for value in values[max(0, end - size) : end] if value is not None and math.isfinite(value)]
        found.append(sum(known) / len(known) if known else None)
    return found


# Workers


def mean_shares(samples: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each worker over the whole run, every sample by the seconds that it stands for."""
    sums: dict[str, dict[str, float]] = {}
    weights: dict[str, float] = {}
    before = 0.0
    for line in samples:
        weight = line["seconds"] - before if line["seconds"] > before else line["seconds"]
        before = line["seconds"]
        for name, shares in line["workers"].items():
            weights[name] = weights.get(name, 0.0) + weight
            for field, share in shares.items():
                total = sums.setdefault(name, {})
                total[field] = total.get(field, 0.0) + weight * share
    return {
        name: {field: value / max(1e-9, weights[name]) for field, value in total.items()}
        for name, total in sums.items()
    }


def _workers(found: RunFiles) -> str:
    shares = mean_shares(found.samples)
    if shares:
        body = _share_table(shares)
    else:
        body = _empty("Not recorded: there is no workers.jsonl in this run directory, or it is empty.")
    cards = [f'<div class="card"><h3>Where the time went</h3><p>Mean over the run.</p>{body}</div>']
    shown = found.timeline.get("otherData", {})
    drawn = timeline(found.timeline) if found.timeline else ""
    if drawn:
        steps = f"Steps {shown['first_step']:,} to {shown['last_step']:,}"
        about = f"{steps}; a lane is a worker: its device where that was timed, else its thread."
    else:
        about = "What each worker did, step by step."
        drawn = _empty("Not recorded: a run writes timeline.json when it ends, and this one has none.")
    cards.append(f'<div class="card"><h3>Timeline of the last steps</h3><p>{about}</p>{drawn}</div>')
    return '<div style="display:grid;gap:14px">' + "".join(cards) + "</div>"


def _share_table(shares: Mapping[str, Mapping[str, float]]) -> str:
    heads = "".join(f'<th class="number">{html.escape(name)}</th>' for name, _ in SHARES.values())
    rows = [f"<tr><th>worker</th><th>share of the time</th>{heads}</tr>"]
    for name, found in shares.items():
        bar = "".join(
            f'<i style="width:{100 * found.get(field, 0.0):.2f}%;background:var({color})" title="{label}"></i>'
            for field, (label, color) in SHARES.items()
        )
        cells = "".join(f'<td class="number">{found.get(field, 0.0):.0%}</td>' for field in SHARES)
        rows.append(f'<tr><td>{html.escape(name)}</td><td><div class="bar">{bar}</div></td>{cells}</tr>')
    keys = "".join(
        f'<li><svg viewBox="0 0 14 10"><rect width="14" height="10" fill="var({color})"/></svg>{label}</li>'
        for label, color in SHARES.values()
    )
    return f'<div class="scroll"><table class="shares">{"".join(rows)}</table></div><ul class="legend">{keys}</ul>'


# Tables


def _data(found: RunFiles) -> str:
    data = found.environment.get("data")
    if not data:
        return _table_card("Data", {}, "Not recorded by this run.")
    rows = {
        name.replace("_", " "): _spell(value) for name, value in data.items() if name not in ("drops", "padding_share")
    }
    if "padding_share" in data:
        rows["padding of the target's tokens"] = f"{data['padding_share']:.1%}"
    drops = data.get("drops", {})
    rows |= {f"dropped: {reason}": f"{count:,}" for reason, count in drops.items()}
    if not drops:
        rows["dropped"] = "no row"
    return _table_card("Data", rows, "")


def _environment(found: RunFiles) -> list[str]:
    rows = {name.replace("_", " "): _spell(value) for name, value in found.environment.items() if name not in OWN_CARDS}
    return [_table_card("Machine and versions", rows, "Not recorded: there is no environment.json.")]


def _config(config: Mapping[str, Any]) -> list[str]:
    plain = {name: _spell(value) for name, value in config.items() if not isinstance(value, dict)}
    cards = [_table_card("run", plain, "Empty.")]
    for section, values in config.items():
        if isinstance(values, dict):
            cards.append(_table_card(section, {name: _spell(value) for name, value in values.items()}, "Empty."))
    return cards


def _table_card(title: str, rows: Mapping[str, str], empty: str) -> str:
    cells = [f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in rows.items()]
    body = f"<table>{''.join(cells)}</table>" if rows else _empty(empty)
    return f'<div class="card"><h3>{html.escape(title)}</h3>{body}</div>'


def _cards(cards: Iterable[tuple[str, str, str]]) -> str:
    found = [
        f'<div class="card"><h3>{html.escape(title)}</h3><p>{html.escape(about)}</p>'
        f'<div class="plot-box">{body}</div></div>'
        for title, about, body in cards
    ]
    return f'<div class="cards">{"".join(found)}</div>'


def _columns(cards: Iterable[str]) -> str:
    return f'<div class="columns">{"".join(cards)}</div>'


def _empty(text: str) -> str:
    return f'<p class="empty">{html.escape(text)}</p>'


# Words


def _sets(found: RunFiles) -> list[str]:
    names = (key.removeprefix("eval/") for line in found.evaluations for key in line if key.startswith("eval/"))
    return list(dict.fromkeys(names))


def _seconds(steps: Sequence[Mapping[str, Any]]) -> float:
    """Of all starts of a run: each counts from zero."""
    total, before = 0.0, 0.0
    for line in steps:
        total += line["seconds"] - before if line["seconds"] >= before else line["seconds"]
        before = line["seconds"]
    return total


def _from_to(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "not finite"
    return f"{known[0]:.2f} → {known[-1]:.2f}" if len(known) > 1 else f"{known[0]:.2f}"


def _count(value: float) -> str:
    for factor, letter in ((1e9, " G"), (1e6, " M"), (1e4, "k")):
        if value >= factor:
            return f"{value / (1e3 if letter == 'k' else factor):.3g}{letter}"
    return f"{value:,.0f}"


def _spell(value: object) -> str:
    if value is None:
        return "not set"
    if value == "" or value == []:
        return "none"
    if isinstance(value, list):
        return ", ".join(str(one) for one in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _spell_seconds(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
