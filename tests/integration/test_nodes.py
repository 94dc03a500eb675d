"""Several processes, one a node, on this machine: the same arithmetic, and no node outlives another."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from blockdraft import cli
from blockdraft.config import RunConfig, to_json
from blockdraft.training.checkpoint import list_checkpoints
from integration.test_drafters import assert_close_run
from integration.tiny_run import Files, make_files, metrics, run_control, tiny_config

pytestmark = pytest.mark.slow

SOURCE = Path(cli.__file__).parents[1]
TWO = ("cpu", "cpu")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return make_files(tmp_path_factory.mktemp("nodes"))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start(config: RunConfig, root: Path, node: int, port: int, *, torchrun: bool = False) -> subprocess.Popen[str]:
    """One node of two; each has a run directory of its own."""
    mine = dataclasses.replace(config, run_dir=str(root / f"node{node}"))
    saved = root / f"node{node}.json"
    saved.write_text(to_json(mine))
    command = [sys.executable]
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    if torchrun:
        where = f"--nnodes 2 --node-rank {node} --nproc-per-node 1 --master-addr 127.0.0.1 --master-port {port}"
        command += ["-m", "torch.distributed.run", *where.split()]
    else:
        environment |= {"WORLD_SIZE": "2", "RANK": str(node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command += ["-m", "blockdraft.cli", "train", str(saved)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


class Nodes:
    """Both nodes of a run; killed at the end of a test, whatever happened."""

    def __init__(self, config: RunConfig, root: Path, *, other: RunConfig | None = None, torchrun: bool = False):
        port = free_port()
        configs = (config, other or config)
        self.processes = [start(one, root, node, port, torchrun=torchrun) for node, one in enumerate(configs)]

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(self, *_error: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                # torchrun has the node as a child.
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=10)

    def await_line(self, words: str) -> None:
        """Reads node 0's console up to a line with these words."""
        assert self.processes[0].stdout is not None
        if not any(words in line for line in self.processes[0].stdout):
            raise AssertionError("node 0 ended early: " + self.end()[0][2])

    def await_step(self, step: int) -> None:
        """Reads node 0's console up to a step."""
        assert self.processes[0].stdout is not None
        for line in self.processes[0].stdout:
            if "| loss " in line and int(line.split("step ")[1].split("/")[0].replace(",", "")) >= step:
                return
        raise AssertionError("node 0 ended early: " + self.end()[0][2])

    def end(self, seconds: float = 60.0) -> list[tuple[int, str, str]]:
        """Waits; exit code, output and errors of each."""
        found = []
        for process in self.processes:
            said, errors = process.communicate(timeout=seconds)
            found.append((process.returncode, said, errors))
        return found


@pytest.mark.parametrize(
    ("topology", "targets", "shard"), [("pool", ("cpu",), False), ("pairs", TWO, False), ("pool", ("cpu",), True)]
)
def test_two_nodes_of_two_drafters_equal_four_drafters(files, tmp_path, topology, targets, shard):
    runtime = {"topology": topology, "targets": targets, "drafters": TWO}
    config = tiny_config(files, tmp_path, optim={"accumulation": 4, "shard": shard}, runtime=runtime)
    with Nodes(config, tmp_path, torchrun=topology == "pool") as nodes:
        (code, said, errors), (other_code, other_said, other_errors) = nodes.end()
    assert (code, other_code) == (0, 0), errors + other_errors
    assert "2 nodes with 2 drafters each" in said
    assert "done: 10 steps" in said
    assert "step" not in other_said
    assert not (tmp_path / "node1").exists()
    runtime |= {"drafters": TWO * 2, "targets": targets * 2}
    whole = run_control(tiny_config(files, tmp_path / "whole", optim={"accumulation": 4}, runtime=runtime))
    assert_close_run(tmp_path / "node0", whole.run_dir)


def endless(files: Files, root: Path, **changes) -> RunConfig:
    optim = {"accumulation": 2} | changes.pop("optim", {})
    return tiny_config(files, root, steps=100_000, save_every=100_000, optim=optim, **changes)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_node_ends_the_other(files, tmp_path, victim):
    with Nodes(endless(files, tmp_path), tmp_path) as nodes:
        nodes.await_step(3)
        nodes.processes[victim].kill()
        started = time.monotonic()
        code, _, errors = nodes.end(60)[1 - victim]
        seconds = time.monotonic() - started
    assert code == 1, errors
    assert seconds < 30
    assert "still running" not in errors
    assert "error: " in errors
    assert "NodeLost" in errors or "is gone" in errors
    assert "Traceback" in errors


def test_a_node_that_fails_tells_the_others_why(files, tmp_path):
    config = endless(files, tmp_path)
    other = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=0.5))
    with Nodes(config, tmp_path, other=other) as nodes:
        (code, _, errors), (other_code, _, other_errors) = nodes.end()
    message = "optim.lr: node 0 has 0.001, node 1 has 0.5; all nodes need the same"
    assert other_code == 2
    assert f"error: {message}" in other_errors
    assert code == 1
    assert f"error: node 1 failed: ConfigError: {message}" in errors


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stop_of_one_node_before_the_first_step_stops_all_with_the_same_words(files, tmp_path, victim):
    with Nodes(endless(files, tmp_path), tmp_path) as nodes:
        # Both have joined then, and no step begins before both have built everything.
        nodes.await_line("memory plan, cpu")
        nodes.processes[victim].send_signal(signal.SIGTERM)
        for code, said, errors in nodes.end():
            assert code == 0, errors
            assert "stopped before the first step: nothing was trained" in said
            assert "error" not in errors and "Traceback" not in errors
    assert not (tmp_path / "node1").exists()


def test_a_stop_asked_of_any_node_stops_all_after_the_same_step(files, tmp_path):
    with Nodes(endless(files, tmp_path), tmp_path) as nodes:
        nodes.await_step(3)
        nodes.processes[1].send_signal(signal.SIGTERM)
        (code, said, errors), (other_code, _, other_errors) = nodes.end()
    assert (code, other_code) == (0, 0), errors + other_errors
    last = metrics(tmp_path / "node0")[-1]["step"]
    assert f"stopped after step {last}" in said
    assert [path.name for path in list_checkpoints(tmp_path / "node0" / "checkpoints")] == [f"step_{last:08d}"]
