"""What belongs to a thread: no worker leaves an autograd graph behind, none allocates on another's device."""

import threading
from collections import defaultdict

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from blockdraft.commands.control import Control
from blockdraft.models.target import Target
from blockdraft.runtime.slots import Filler
from blockdraft.training.step import DrafterStep
from integration.tiny_run import Files, make_files, run_control, tiny_config


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return make_files(tmp_path_factory.mktemp("modes"))


class Devices(TorchDispatchMode):
    """Notes the device of everything that an operation returns in this thread."""

    def __init__(self, seen: set[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.seen.update(str(leaf.device) for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        return out


def watch_devices(monkeypatch) -> dict[str, set[str]]:
    """Devices that each worker's work touched, by the name of its thread."""
    seen: dict[str, set[str]] = defaultdict(set)

    def watched(original):
        def call(*args, **kwargs):
            with Devices(seen[threading.current_thread().name]):
                return original(*args, **kwargs)

        return call

    monkeypatch.setattr(Filler, "fill", watched(Filler.fill))
    for name in ("micro_batch", "finish"):
        monkeypatch.setattr(DrafterStep, name, watched(getattr(DrafterStep, name)))
    return seen


def allocate_elsewhere(*_arguments: object) -> None:
    torch.empty(3, device="meta")


@pytest.mark.parametrize("is_astray", [False, True])
def test_every_worker_allocates_on_its_own_device_alone(files, tmp_path, monkeypatch, is_astray):
    seen = watch_devices(monkeypatch)

    def stray(control: Control, line: str) -> None:
        if line.startswith("warm-up") and is_astray:
            control.built.targets[0].layers[1].register_forward_hook(allocate_elsewhere)

    run_control(tiny_config(files, tmp_path, runtime={"targets": ("cpu", "cpu")}), say=stray)
    assert seen["drafter 0"] == {"cpu"}
    assert seen["target 1"] == {"cpu"}
    # The check itself sees a tensor that lies elsewhere.
    assert seen["target 0"] == ({"cpu", "meta"} if is_astray else {"cpu"})


def test_targets_outputs_keep_no_graph(files, tmp_path, monkeypatch):
    """Grad mode is on in every thread that starts, and a target's weights may ask for gradients."""
    graphs: list[str] = []
    modes: dict[str, bool] = {}
    fill = Filler.fill

    def look(self: Filler, slot, content) -> None:
        modes[threading.current_thread().name] = torch.is_grad_enabled()
        fill(self, slot, content)
        if slot.buffer.requires_grad or slot.buffer.grad_fn is not None:
            graphs.append(str(slot.buffer.grad_fn))

    monkeypatch.setattr(Filler, "fill", look)

    def thaw(control: Control, line: str) -> None:
        if line.startswith("warm-up"):
            control.built.targets[0].model.requires_grad_(True)

    run_control(tiny_config(files, tmp_path), say=thaw)
    assert modes == {"target 0": True}
    assert graphs == []


def test_without_its_cure_a_capture_does_keep_one(files):
    """What the test above looks for."""
    target = Target.load(tiny_config(files, files.target).target, layer_ids=(1, 2))
    target.model.requires_grad_(True)
    kept: list[torch.Tensor] = []
    ids_BS = torch.randint(3, 90, (1, 8))
    target.capture(ids_BS, lambda _column, hidden_BSD: kept.append(hidden_BSD))
    assert [hidden_BSD.requires_grad for hidden_BSD in kept] == [False, False]
    kept.clear()
    Target.capture_plain.__wrapped__(target, ids_BS, lambda _column, hidden_BSD: kept.append(hidden_BSD))
    assert [hidden_BSD.requires_grad for hidden_BSD in kept] == [True, True]
