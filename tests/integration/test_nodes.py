"""Several processes, one a node, on this machine: the same arithmetic, and no node outlives another."""

import dataclasses
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from blockdraft import cli
from blockdraft.commands.run_directory import hold
from blockdraft.config import RunConfig, to_json
from blockdraft.training.checkpoint import list_checkpoints
from integration.test_drafters import assert_close_run
from integration.tiny_run import Files, make_files, metrics, run_control, tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.alone]

SOURCE = Path(cli.__file__).parents[1]
TWO = ("cpu", "cpu")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return make_files(tmp_path_factory.mktemp("nodes"))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def saved_config(config: RunConfig, root: Path, node: int) -> str:
    """Each node has a run directory of its own."""
    saved = root / f"node{node}.json"
    saved.write_text(to_json(dataclasses.replace(config, run_dir=str(root / f"node{node}"))))
    return str(saved)


def be_node(saved: str, environment: dict[str, str], said: Path, errors: Path) -> None:
    """A node, in a process forked from one that has imported everything."""
    os.environ.update(environment)
    for path, descriptor in ((said, 1), (errors, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, descriptor)
    torch.set_num_threads(1)
    sys.exit(cli.main(["train", saved]))


class Nodes:
    """Both nodes of a run; killed at the end of a test, whatever happened."""

    def __init__(self, config: RunConfig, root: Path, *, other: RunConfig | None = None) -> None:
        self.root, port = root, str(free_port())
        forks = multiprocessing.get_context("forkserver")
        # Each import of torch and transformers takes seconds; the server of forks does it once.
        forks.set_forkserver_preload(["blockdraft.commands.control", "transformers.models.qwen3.modeling_qwen3"])
        self.processes = []
        for node, one in enumerate((config, other or config)):
            world = {"WORLD_SIZE": "2", "RANK": str(node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            arguments = (saved_config(one, root, node), world, *self._files(node))
            self.processes.append(forks.Process(target=be_node, args=arguments))
            self.processes[-1].start()

    def _files(self, node: int) -> tuple[Path, Path]:
        return self.root / f"node{node}.out", self.root / f"node{node}.err"

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(self, *_error: object) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)
            process.close()

    def stop(self, node: int) -> None:
        os.kill(self.processes[node].pid, signal.SIGTERM)

    def await_line(self, is_it: Callable[[str], bool]) -> None:
        """Reads node 0's console up to such a line."""
        while not any(is_it(line) for line in self.said(0).splitlines(keepends=True) if line.endswith("\n")):
            if not self.processes[0].is_alive():
                raise AssertionError("node 0 ended early: " + self._files(0)[1].read_text())
            time.sleep(0.01)

    def said(self, node: int) -> str:
        file = self._files(node)[0]
        return file.read_text() if file.is_file() else ""

    def end(self, seconds: float = 60.0) -> list[tuple[int, str, str]]:
        """Waits; exit code, output and errors of each."""
        for process in self.processes:
            process.join(seconds)
            assert process.exitcode is not None, f"still running after {seconds:.0f} s"
        return [
            (process.exitcode, self.said(node), self._files(node)[1].read_text())
            for node, process in enumerate(self.processes)
        ]


def is_step(step: int) -> Callable[[str], bool]:
    """Whether a line is of that step or a later one."""
    return lambda line: "| loss " in line and int(line.split("step ")[1].split("/")[0].replace(",", "")) >= step


def by_torchrun(config: RunConfig, root: Path) -> list[tuple[int, str, str]]:
    """Both nodes of a run as a cluster starts them, to their end; exit code, output and errors of each."""
    port, started = free_port(), []
    for node in range(2):
        where = f"--nnodes 2 --node-rank {node} --nproc-per-node 1 --master-addr 127.0.0.1 --master-port {port}"
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *where.split(), "-m", "blockdraft.cli", "train",
                 saved_config(config, root, node)],
                env=os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            )
        )  # fmt: skip
    try:
        found = [process.communicate(timeout=60) for process in started]
        return [(process.returncode, *texts) for process, texts in zip(started, found, strict=True)]
    finally:
        for process in started:
            if process.poll() is None:
                # torchrun has the node as a child.
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate(timeout=10)


@pytest.mark.parametrize(
    ("topology", "targets", "shard", "is_torchrun"),
    [("pool", ("cpu",), False, True), ("pairs", TWO, False, False), ("pool", ("cpu",), True, False)],
)
def test_two_nodes_of_two_drafters_equal_four_drafters(files, tmp_path, topology, targets, shard, is_torchrun):
    runtime = {"topology": topology, "targets": targets, "drafters": TWO}
    config = tiny_config(files, tmp_path, optim={"accumulation": 4, "shard": shard}, runtime=runtime)
    if is_torchrun:
        ended = by_torchrun(config, tmp_path)
    else:
        with Nodes(config, tmp_path) as nodes:
            ended = nodes.end()
    (code, said, errors), (other_code, other_said, other_errors) = ended
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
        nodes.await_line(is_step(3))
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


def test_a_directory_that_another_run_writes_to_ends_all_nodes(files, tmp_path):
    with hold(tmp_path / "node0"), Nodes(endless(files, tmp_path), tmp_path) as nodes:
        (code, _, errors), (other_code, _, other_errors) = nodes.end()
    assert (code, other_code) == (2, 1)
    assert f"error: run_dir {tmp_path}/node0: another run is writing there" in errors
    assert "node 0" in other_errors and "Traceback" not in other_errors
    assert not (tmp_path / "node0").exists() and not (tmp_path / "node1").exists()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stop_of_one_node_before_the_first_step_stops_all_with_the_same_words(files, tmp_path, victim):
    with Nodes(endless(files, tmp_path), tmp_path) as nodes:
        # Both have joined then, and no step begins before both have built everything.
        nodes.await_line(lambda line: "memory plan, cpu" in line)
        nodes.stop(victim)
        for code, said, errors in nodes.end():
            assert code == 0, errors
            assert "stopped before the first step: nothing was trained" in said
            assert "error" not in errors and "Traceback" not in errors
    assert not (tmp_path / "node1").exists()


def test_a_stop_asked_of_any_node_stops_all_after_the_same_step(files, tmp_path):
    with Nodes(endless(files, tmp_path), tmp_path) as nodes:
        nodes.await_line(is_step(3))
        nodes.stop(1)
        (code, said, errors), (other_code, _, other_errors) = nodes.end()
    assert (code, other_code) == (0, 0), errors + other_errors
    last = metrics(tmp_path / "node0")[-1]["step"]
    assert f"stopped after step {last}" in said
    assert [path.name for path in list_checkpoints(tmp_path / "node0" / "checkpoints")] == [f"step_{last:08d}"]
