"""Case 23 on a CPU: a thousand steps keep memory flat and every queue bounded."""

from pathlib import Path

import pytest

from blockdraft.commands.control import Control
from blockdraft.data.template import Encoded
from integration.tiny_run import make_files, metrics, run_control, tiny_config, worker_threads

pytestmark = pytest.mark.alone

MIB = 2**20
SETTLED, STEPS, DEPTH = 300, 1000, 2


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.timeout(180)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory of the process from /proc")
def test_a_thousand_steps_keep_memory_flat_and_queues_bounded(tmp_path):
    documents = [Encoded(list(range(3, 3 + length)), [0] * 3 + [1] * (length - 3)) for length in range(16, 40)]
    files = make_files(tmp_path, documents=documents)
    memory: dict[int, int] = {}
    deepest = {"channel": 0, "fills": 0, "reports": 0}

    def look(control: Control, line: str) -> None:
        if not line.startswith("step "):
            return
        pipeline = control.pipeline
        assert pipeline is not None
        step = int(line.split()[1].split("/")[0].replace(",", ""))
        memory[step] = resident_bytes()
        queued = max(len(lane) for lane in pipeline.channel._queued)
        for name, found in (
            ("channel", pipeline.channel.in_flight()),
            ("fills", queued),
            ("reports", pipeline.reports.qsize()),
        ):
            deepest[name] = max(deepest[name], found)

    data = {"row_length": 40, "num_rows": 1, "num_anchors": 2, "target_tokens": 40}
    config = tiny_config(
        files, tmp_path / "run", steps=STEPS, save_every=STEPS, data=data, runtime={"channel_depth": DEPTH}
    )
    ran = run_control(config, say=look)
    assert len(metrics(ran.run_dir)) == STEPS
    grown = max(memory[step] for step in memory if step > SETTLED) - memory[SETTLED]
    # A slot is 10 KB: one kept per step would be 7 MiB.
    assert grown < 4 * MIB, f"{grown / MIB:.1f} MiB in {STEPS - SETTLED} steps"
    assert deepest["channel"] <= DEPTH
    assert deepest["fills"] <= 8
    # What drafters report is read as it comes.
    assert deepest["reports"] < 40
    assert worker_threads() == []
