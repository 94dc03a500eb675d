"""The optimizer's state divided over two GPUs: NCCL carries the weights, and a save copies from both."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from blockdraft.config import OptimConfig, RunConfig
from blockdraft.runtime import saver as module
from blockdraft.runtime.distributed import GradientSum, c10d
from blockdraft.runtime.meeting import Meeting
from blockdraft.runtime.saver import Saver
from blockdraft.runtime.spans import Lane
from blockdraft.training.checkpoint import Contents, list_checkpoints
from blockdraft.training.optim import MasterOptimizer, merged_state
from blockdraft.training.shards import Seat

SIZES = ((512, 768), (768,), (96, 512), (512, 512), (96,), (1000, 24), (512,))
GPUS = ("cuda:0", "cuda:1")


class Crew:
    """A thread for each device, each with a stream of its own as a run's workers have; the first error ends all."""

    def __init__(self, devices: tuple[str, ...]) -> None:
        self.devices = tuple(map(torch.device, devices))
        self.store = c10d.HashStore()
        self.errors: list[BaseException] = []
        self.launches = Meeting(len(devices), self._check)

    def _check(self) -> None:
        if self.errors:
            raise RuntimeError("another drafter ended")

    def run(self, body: Callable[[int, GradientSum], None]) -> None:
        def work(number: int, device: torch.device) -> None:
            try:
                if device.type == "cuda":
                    torch.cuda.set_device(device)
                    torch.cuda.set_stream(torch.cuda.Stream(device))
                count = len(self.devices)
                total = GradientSum(
                    self.store, number, count, device, 60.0, self.launches.meet, near=count, launch=self.launches
                )
                body(number, total)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                self.launches.meet()
                total.drop()
            except BaseException as error:
                self.errors.append(error)

        threads = [
            threading.Thread(target=work, args=(number, device), daemon=True)
            for number, device in enumerate(self.devices)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads)
        if self.errors:
            raise self.errors[0]


def net_on(device: torch.device) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(size, generator=generator).to(device, torch.bfloat16)) for size in SIZES]
    return nn.ParameterList(weights)


def gradients_at(step: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    scale = float("nan") if step == 4 else 3.0
    return [(torch.randn(size, generator=generator) * scale).to(device, torch.bfloat16) for size in SIZES]


def take_step(net: nn.Module, optimizer: MasterOptimizer, step: int) -> Tensor:
    optimizer.keep_gradients()
    for weight, gradient in zip(net.parameters(), gradients_at(step, next(net.parameters()).device), strict=True):
        weight.grad = gradient
    norm = optimizer.step(0.7)
    optimizer.await_weights()
    return norm


def divided_steps(devices: tuple[str, ...], optimizer_name: str, steps: int) -> tuple[Any, Any, Any]:
    """Nets, optimizers and norms of drafters that divide the state."""
    config = OptimConfig(optimizer=optimizer_name, weight_decay=0.1)
    crew = Crew(devices)
    nets = [net_on(device) for device in crew.devices]
    optimizers = [MasterOptimizer(net, config, Seat(number, len(nets))) for number, net in enumerate(nets)]
    norms: list[list[float]] = [[] for _ in nets]

    def body(number: int, total: GradientSum) -> None:
        optimizers[number].rehearse()
        optimizers[number].share_all(total)
        for step in range(steps):
            total.meet()
            norms[number].append(float(take_step(nets[number], optimizers[number], step)))

    crew.run(body)
    return nets, optimizers, norms


def compare(devices: tuple[str, ...], optimizer_name: str) -> None:
    nets, optimizers, norms = divided_steps(devices, optimizer_name, 8)
    device = torch.device(devices[0])
    net = net_on(device)
    whole = MasterOptimizer(net, OptimConfig(optimizer=optimizer_name, weight_decay=0.1))
    whole.rehearse()
    expected = [float(take_step(net, whole, step)) for step in range(8)]
    for found in norms:
        assert [one for one in found if one == one] == [one for one in expected if one == one]
    state, own = merged_state(optimizers), whole.state_tensors()
    for name, value in own.items():
        assert torch.equal(state[name].to(device), value), name
    for other in nets:
        for mine, its in zip(other.parameters(), net.parameters(), strict=True):
            assert torch.equal(mine.to(device), its)
    assert {str(value.device) for value in state.values()} == {str(torch.device(name)) for name in devices}


def save_beside(devices: tuple[str, ...], root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafter 0 saves after step 3 while both go on; the copies are held back so that a later update could overtake."""
    config = OptimConfig(weight_decay=0.1)
    crew = Crew(devices)
    nets = [net_on(device) for device in crew.devices]
    optimizers = [MasterOptimizer(net, config, Seat(number, len(nets))) for number, net in enumerate(nets)]
    copy = module.Snapshot._copy

    def late(self: module.Snapshot, contents: Contents) -> Contents:
        for side in self.sides.values():
            with torch.cuda.stream(side.stream):
                torch.cuda._sleep(100_000_000)
        return copy(self, contents)

    monkeypatch.setattr(module.Snapshot, "_copy", late)

    def contents_at(steps_done: int) -> Contents:
        weights = {name: weight.detach() for name, weight in nets[0].named_parameters()}
        return Contents(steps_done, weights, merged_state(optimizers), optimizers[0].skipped, {}, RunConfig())

    errors: list[str] = []
    saver = Saver(
        root, 2, contents_at=contents_at, fail=errors.append, tick=lambda: None, check=lambda: None,
        await_metrics=lambda _step, _is_over: True, say=lambda _line: None, lane=Lane("writer", torch.device("cpu"), 9),
    )  # fmt: skip
    saver.prepare()

    def body(number: int, total: GradientSum) -> None:
        optimizers[number].rehearse()
        optimizers[number].share_all(total)
        for step in range(8):
            total.meet()
            saver.before_update(crew.devices[number])
            take_step(nets[number], optimizers[number], step)
            if number == 0 and step == 2:
                saver.save(3)

    crew.run(body)
    saver.finish(lambda: None)
    assert not errors
    _, early, _ = divided_steps(devices, "adamw", 3)
    (directory,) = list_checkpoints(root)
    saved = load_file(directory / "optimizer.safetensors")
    for name, value in merged_state(early).items():
        assert torch.equal(saved[name], value.cpu()), name


pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("optimizer_name", ["adamw", "adamw_bf16", "muon"])
def test_a_divided_update_is_that_of_one_gpu(optimizer_name: str) -> None:
    compare(GPUS, optimizer_name)


def test_a_save_has_both_gpus_state_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_beside(GPUS, tmp_path, monkeypatch)
