"""Clock and power of a GPU while something runs, and the rate that its matrix units keep up."""

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from blockdraft.commands.bench_timing import synchronize, time_once

QUERY: Final = "clocks.sm,clocks.max.sm,power.draw,power.limit"


class Sensed(NamedTuple):
    """Medians over the readings of one stretch of work, the first half left out."""

    clock_mhz: float
    most_clock_mhz: float
    watts: float
    most_watts: float
    readings: int

    def __str__(self) -> str:
        clock = f"clock {self.clock_mhz:,.0f} of {self.most_clock_mhz:,.0f} MHz"
        return f"{clock}, {self.watts:.0f} of {self.most_watts:.0f} W ({self.readings} readings)"


def parse_readings(text: str) -> Sensed | None:
    """Of nvidia-smi's lines; None where it printed none that hold four numbers."""
    lines = []
    for line in text.splitlines():
        try:
            numbers = [float(part) for part in line.split(",")]
        except ValueError:
            continue  # "[N/A]", or a line that was cut off when the tool was ended
        if len(numbers) == 4:
            lines.append(numbers)
    later = lines[len(lines) // 2 :]
    if not later:
        return None
    clock, most_clock, watts, most_watts = (statistics.median(column) for column in zip(*later, strict=True))
    return Sensed(clock, most_clock, watts, most_watts, len(later))


class Sustained(NamedTuple):
    """Of a function called without a pause."""

    median_ms: float
    """Over the second half of the calls."""
    sensed: Sensed | None
    """None where nvidia-smi is missing or does not answer."""


def sustain(device: torch.device, function: Callable[[], Any], seconds: float) -> Sustained:
    """Calls a function for so long without a pause: a GPU at its power limit lowers its clock only after a while."""
    function()
    synchronize(device)
    tool = shutil.which("nvidia-smi") if device.type == "cuda" else None
    reader = None
    if tool is not None:
        command = [tool, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", "-lms", "50", "-i", _number(device)]
        reader = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    times: list[float] = []
    text = ""
    try:
        started = time.monotonic()
        while time.monotonic() - started < seconds or not times:
            # A few at once, so that the device never waits for the host.
            times += time_once(device, [function] * 8)
    finally:
        if reader is not None:
            # Left alone it would read for ever.
            reader.terminate()
            text, _ = reader.communicate()
    return Sustained(statistics.median(times[len(times) // 2 :]), parse_readings(text))


def _number(device: torch.device) -> str:
    """What nvidia-smi calls this GPU, whatever CUDA_VISIBLE_DEVICES says."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


class SustainedRate(NamedTuple):
    """TFLOP/s of a large product, and what the GPU did."""

    rate: float
    sensed: Sensed | None

    def __str__(self) -> str:
        return f"{self.rate:.0f} TFLOP/s" + ("" if self.sensed is None else f", {self.sensed}")


def sustained_rate(device: torch.device, dtype: torch.dtype, size: int, seconds: float) -> SustainedRate:
    """TFLOP/s that the matrix units keep up: a large square product on random data, again and again."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    found = sustain(device, lambda: torch.mm(left, right), seconds)
    return SustainedRate(2 * size**3 / found.median_ms / 1e9, found.sensed)
