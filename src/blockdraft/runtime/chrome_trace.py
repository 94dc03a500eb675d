"""Recorded spans as a Chrome trace: JSON that ui.perfetto.dev and chrome://tracing open.

Process 1 holds the threads, process 2 the devices, a lane for each worker in both; the channel's depth is a counter.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from blockdraft.runtime.spans import Record, Span

THREADS: Final = 1
DEVICES: Final = 2


class Window(NamedTuple):
    """Some steps, counted from 0, and the time that drafters spent on them."""

    first_step: int
    last_step: int
    start_s: float
    end_s: float


def last_steps(record: Record, most: int) -> Window | None:
    """The newest steps that every drafter's lane still holds whole; None when no step was recorded."""
    newest, oldest = -1, 0
    for lane in record.lanes:
        if lane.name.startswith("drafter") and (spans := lane.spans.copy()):
            newest = max(newest, spans[-1].step)
            # A ring that is full has dropped the beginning of its oldest step.
            oldest = max(oldest, spans[0].step + (len(spans) == spans.maxlen))
    return window(record, max(oldest, newest - most + 1), newest)


def window(record: Record, first_step: int, last_step: int) -> Window | None:
    """From the first thing that a drafter did for the first step to the last that it did for the last one."""
    spans = [
        span
        for lane in record.lanes
        if lane.name.startswith("drafter")
        for track in (lane.spans, *([lane.work.spans] if lane.work is not None else []))
        for span in track.copy()
        if first_step <= span.step <= last_step
    ]
    if not spans:
        return None
    steps = [span.step for span in spans]
    return Window(min(steps), max(steps), min(span.start_s for span in spans), max(span.end_s for span in spans))


def chrome_trace(record: Record, shown: Window) -> dict[str, Any]:
    """What every worker did in this time; `ts` is in microseconds from its beginning."""
    events: list[dict[str, Any]] = [_name(THREADS, None, "threads"), _name(DEVICES, None, "devices")]
    for index, lane in enumerate(record.lanes):
        events += _lane(THREADS, index, lane.name, lane.spans.copy(), shown)
        for place, track in enumerate((lane.work, lane.copies)):
            if track is not None and track.spans:
                name = f"{lane.name} on {lane.device}" if place == 0 else f"{lane.name}, copies"
                events += _lane(DEVICES, 2 * index + place, name, track.spans.copy(), shown)
    events += [
        {
            "ph": "C",
            "pid": THREADS,
            "name": "channel, filled slots",
            "ts": _microseconds(depth.at_s - shown.start_s),
            "args": {f"drafter {index}": count for index, count in enumerate(depth.filled)},
        }
        for depth in record.depths(shown.start_s)
        if depth.at_s <= shown.end_s
    ]
    steps = {"first_step": shown.first_step + 1, "last_step": shown.last_step + 1}
    return {"displayTimeUnit": "ms", "otherData": steps, "traceEvents": events}


def _lane(process: int, index: int, name: str, spans: Iterable[Span], shown: Window) -> Iterator[dict[str, Any]]:
    yield _name(process, index, name)
    yield {"ph": "M", "pid": process, "tid": index, "name": "thread_sort_index", "args": {"sort_index": index}}
    for span in spans:
        if span.end_s >= shown.start_s and span.start_s <= shown.end_s:
            yield {
                "ph": "X",
                "pid": process,
                "tid": index,
                "name": span.what,
                "ts": _microseconds(span.start_s - shown.start_s),
                "dur": _microseconds(span.end_s - span.start_s),
                "args": {"step": span.step + 1},
            }


def _name(process: int, thread: int | None, name: str) -> dict[str, Any]:
    event: dict[str, Any] = {"ph": "M", "pid": process, "args": {"name": name}}
    return event | ({"name": "process_name"} if thread is None else {"name": "thread_name", "tid": thread})


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)
