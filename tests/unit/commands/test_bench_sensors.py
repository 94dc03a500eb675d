"""What is read of a GPU's clock and power, and what runs without a pause."""

import subprocess

import pytest
import torch

from blockdraft.commands import bench_sensors
from blockdraft.commands.bench_sensors import parse_readings, sustain

READINGS = """345, 1980, 120.50, 700.00
1980, 1980, 650.00, 700.00
[N/A], 1980, 699.00, 700.00
1500, 1980, 698.00, 700.00
1490, 1980, 699.00, 700.00
15"""


def test_readings_are_medians_of_the_second_half():
    found = parse_readings(READINGS)
    assert found is not None
    assert found.readings == 2
    assert (found.clock_mhz, found.most_clock_mhz) == (1495, 1980)
    assert (found.watts, found.most_watts) == (698.5, 700)
    assert str(found) == "clock 1,495 of 1,980 MHz, 698 of 700 W (2 readings)"


def test_no_answer_is_none():
    assert parse_readings("Failed to initialize NVML\n") is None
    assert parse_readings("") is None


def test_a_function_runs_for_as_long_as_asked_without_a_gpu():
    calls = []
    found = sustain(torch.device("cpu"), lambda: calls.append(1), seconds=0.0)
    assert len(calls) == 9
    assert found.median_ms >= 0
    assert found.sensed is None


def test_what_reads_the_gpu_ends_with_a_function_that_fails(monkeypatch):
    popen, readers = subprocess.Popen, []

    def start(_command, **options):
        readers.append(popen(["sleep", "60"], **options))
        return readers[-1]

    def fail(_device, _functions):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(bench_sensors, "_number", lambda _device: "GPU-0")
    monkeypatch.setattr(bench_sensors, "synchronize", lambda _device: None)
    monkeypatch.setattr(bench_sensors, "time_once", fail)
    monkeypatch.setattr(bench_sensors.shutil, "which", lambda _tool: "nvidia-smi")
    monkeypatch.setattr(bench_sensors.subprocess, "Popen", start)
    with pytest.raises(RuntimeError, match="out of memory"):
        sustain(torch.device("cuda"), lambda: None, seconds=1.0)
    assert [reader.poll() for reader in readers] == [-15]
