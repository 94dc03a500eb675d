"""Gradients that are not finite: the step is skipped on all drafters, counted, and too many end the run."""

import dataclasses
import json
import math
import threading

import pytest
import torch
from safetensors.torch import load_file

from blockdraft.commands import train
from blockdraft.commands.skips import NonFinite
from blockdraft.runtime.pipeline import DrafterStep
from blockdraft.training.checkpoint import list_checkpoints, read_state
from integration.tiny_run import Files, make_files, metrics, run_control, tiny_config, worker_threads

TWO = {"drafters": ("cpu", "cpu")}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return make_files(tmp_path_factory.mktemp("nonfinite"))


def is_warm_up(blocks) -> bool:
    return bool((blocks.document_RT < 0).all())


@pytest.fixture
def poison(monkeypatch):
    """Features of some micro-batches (from 1) become NaN at one drafter; returns each one's state after every step."""

    def arm(drafter: int, numbers: set[int]) -> dict[str, list[torch.Tensor]]:
        whole, finish = DrafterStep.micro_batch, DrafterStep.finish
        calls = dict.fromkeys(("drafter 0", "drafter 1"), 0)
        kept: dict[str, list[torch.Tensor]] = {name: [] for name in calls}

        def micro_batch(self, features_RTC, blocks, denominator):
            name = threading.current_thread().name
            calls[name] += not is_warm_up(blocks)
            is_hit = name == f"drafter {drafter}" and calls[name] in numbers and not is_warm_up(blocks)
            whole(self, features_RTC * float("nan") if is_hit else features_RTC, blocks, denominator)

        def finished(self, step):
            found = finish(self, step)
            flat = torch.cat([value.flatten().double() for value in self.optimizer.state_tensors().values()])
            kept[threading.current_thread().name].append(flat)
            return found

        monkeypatch.setattr(DrafterStep, "micro_batch", micro_batch)
        monkeypatch.setattr(DrafterStep, "finish", finished)
        return kept

    return arm


def test_one_drafter_of_two_makes_both_skip(files, tmp_path, poison):
    kept = poison(1, {3})
    config = tiny_config(files, tmp_path, steps=6, optim={"accumulation": 2}, runtime=TWO)
    ran = run_control(config)
    first, second = kept["drafter 0"], kept["drafter 1"]
    assert len(first) == len(second) == 6
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    # Masters, moments and step counters stay; the steps around it change them.
    assert torch.equal(first[1], first[2])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[2], first[3])
    assert torch.isfinite(first[-1]).all()
    lines = metrics(tmp_path)
    assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 1, 1, 1]
    assert [line["loss"] is None for line in lines] == [step == 3 for step in range(1, 7)]
    said = [line for line in ran.lines if "skipped on" in line or "| skipped" in line]
    assert said[0] == (
        "warning: step 3 skipped on all drafters, its gradients are not finite (1 skipped of at most 10)"
    )
    assert "| skipped 1" in said[-1]
    assert not (tmp_path / "nonfinite").exists()
    # The count survives a resume.
    assert read_state(list_checkpoints(tmp_path / "checkpoints")[-1])["skipped_steps"] == 1
    resumed = run_control(dataclasses.replace(config, steps=7), resume=list_checkpoints(tmp_path / "checkpoints")[-1])
    assert metrics(resumed.run_dir)[-1]["skipped_steps"] == 1


def test_too_many_end_the_run_with_the_micro_batch_written_out(files, tmp_path, poison, capsys):
    poison(1, {2, 4, 5})
    changes = {"accumulation": 2, "max_skipped": 2}
    config = tiny_config(files, tmp_path, steps=400, save_every=3, optim=changes, runtime=TWO)
    with pytest.raises(NonFinite, match=r"3 steps had gradients .* optim\.max_skipped allows 2; the last was step 5"):
        run_control(config)
    assert worker_threads() == []
    (file,) = (tmp_path / "nonfinite").glob("*.safetensors")
    assert file.name == "step_00000005_drafter_1_micro_batch_0.safetensors"
    assert [path.name[-1] for path in list_checkpoints(tmp_path / "checkpoints")][:1] == ["3"]
    again = run_control(tiny_config(files, tmp_path / "b", steps=1, optim={"accumulation": 2}, runtime=TWO)).control
    loader = again.built.loader
    fill = next(fill for fill in loader.fills(4, 5) if fill.number % 2 == 1)
    one, found = fill.passes[0], load_file(file)
    for name, value in (("input_ids", one.input_ids_RT), ("anchor", one.anchor_RA), ("label", one.label_RAS)):
        assert torch.equal(found[name], value), name
    facts = json.loads(file.with_suffix(".json").read_text())
    assert (facts["step"], facts["drafter"], facts["fill"]) == (5, 1, fill.number)
    assert facts["features_min"] == facts["loss"] == "nan"
    assert not facts["is_finite"]
    for place in facts["documents"]:
        ids = torch.tensor(loader.store[place["document"]].input_ids)
        assert torch.equal(
            one.input_ids_RT[place["row"], place["start"] : place["start"] + place["length"]], ids.long()
        )
    # As a command: exit code 1, and what to do.
    poison(1, {1, 2, 3})
    assert train.run(dataclasses.replace(config, run_dir=str(tmp_path / "c")), train.Options()) == 1
    assert "raise optim.max_skipped and go on with --resume auto" in capsys.readouterr().err


def test_a_fault_of_the_backward_writes_every_micro_batch_of_the_step(files, tmp_path, monkeypatch):
    whole, calls = DrafterStep.micro_batch, []

    def overflow(self, features_RTC, blocks, denominator):
        whole(self, features_RTC, blocks, denominator)
        calls.append(not is_warm_up(blocks))
        if sum(calls) == 3:
            self.drafter.fc.weight.grad.fill_(math.inf)

    monkeypatch.setattr(DrafterStep, "micro_batch", overflow)
    changes = {"accumulation": 3, "max_skipped": 0}
    with pytest.raises(NonFinite, match="1 steps had gradients"):
        run_control(tiny_config(files, tmp_path, optim=changes, runtime={"reuse": 2}))
    names = sorted(path.name for path in (tmp_path / "nonfinite").glob("*.json"))
    assert names == [f"step_00000001_drafter_0_micro_batch_{i}.json" for i in range(3)]
    assert all(json.loads((tmp_path / "nonfinite" / name).read_text())["is_finite"] for name in names)
