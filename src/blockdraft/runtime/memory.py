"""Whether the memory of a run's GPUs stays flat: peaks per 50 steps, what is reserved, retries of the allocator."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

WINDOW_STEPS = 50
SETTLED_STEPS = 20
"""From this step on the reserved memory has to be constant."""
GIB = 2**30


class DeviceMemory(NamedTuple):
    """What was seen on one device, in bytes."""

    bound: int | None
    """What lies there between two steps, and what each worker on it takes beside that at most; None: not known."""
    peaks: tuple[int, ...]
    """Of each 50 steps, and of what is left at the end if nothing else was seen."""
    reserved: tuple[int, ...]
    """Every amount that was reserved after some step, from step 20 on."""
    retries: int

    @property
    def is_flat(self) -> bool:
        """Nothing was reserved after step 20, and the allocator never had to ask twice."""
        return len(set(self.reserved)) <= 1 and self.retries == 0

    def spell(self, device: torch.device) -> str:
        """A line for the log."""
        peaks = _spread(self.peaks) + ("" if self.bound is None else f" (at most {self.bound / GIB:.3f} expected)")
        reserved = _spread(self.reserved) if self.reserved else f"not measured: fewer than {SETTLED_STEPS} steps"
        verdict = "flat" if self.is_flat else "NOT flat"
        return (
            f"memory of {device}: {verdict}; peak {peaks} per {WINDOW_STEPS} steps, "
            f"reserved {reserved} from step {SETTLED_STEPS} on, {self.retries} allocator retries"
        )


class MemoryWatch:
    """Follows the GPUs of a run; does nothing for CPUs. One thread calls it; no call waits for a device."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        """Devices of all workers, repetitions allowed."""
        self.devices = sorted({device for device in devices if device.type == "cuda"}, key=str)
        self._steps = 0
        self._retries = dict.fromkeys(self.devices, 0)
        self._at_rest = dict.fromkeys(self.devices, 0)
        self._taken: dict[torch.device, list[int]] = {device: [] for device in self.devices}
        self._peaks: dict[torch.device, list[int]] = {device: [] for device in self.devices}
        self._reserved: dict[torch.device, list[int]] = {device: [] for device in self.devices}

    def expect(self, device: torch.device, taken: int) -> None:
        """A worker's warm-up: what it took at most beside what it keeps."""
        self._taken[device].append(taken)

    def begin(self) -> None:
        """Everybody is warm."""
        for device in self.devices:
            self._retries[device] = _retries(device)
            self._at_rest[device] = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)

    def step(self) -> None:
        """A step is done."""
        self._steps += 1
        for device in self.devices:
            if self._steps >= SETTLED_STEPS:
                self._keep(device)
            if self._steps % WINDOW_STEPS == 0:
                self._peaks[device].append(torch.cuda.max_memory_allocated(device))
                torch.cuda.reset_peak_memory_stats(device)

    def _keep(self, device: torch.device) -> None:
        now, seen = torch.cuda.memory_reserved(device), self._reserved[device]
        if not seen or seen[-1] != now:
            seen.append(now)

    def found(self) -> dict[torch.device, DeviceMemory]:
        """What was seen so far."""
        return {
            device: DeviceMemory(
                self._at_rest[device] + sum(self._taken[device]) if self._taken[device] else None,
                tuple(self._peaks[device] or [torch.cuda.max_memory_allocated(device)]),
                tuple(self._reserved[device]),
                _retries(device) - self._retries[device],
            )
            for device in self.devices
        }

    def describe(self) -> list[str]:
        """A line for each device."""
        return [memory.spell(device) for device, memory in self.found().items()]


def _retries(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


def _spread(values: tuple[int, ...]) -> str:
    low, high = min(values) / GIB, max(values) / GIB
    return f"{low:.3f} GiB" if low == high else f"{low:.3f} to {high:.3f} GiB"
