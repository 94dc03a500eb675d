"""Whole runs whose head gets supervised rows only, beside runs whose head gets all."""

import dataclasses
import shutil

import pytest

from blockdraft.data import loader
from blockdraft.training.checkpoint import list_checkpoints, newest_checkpoint
from integration.tiny_run import assert_same_run, make_files, metrics, run_control, tiny_config

CHANGES = {
    # More anchors than most rows have eligible ones.
    "data": {"num_anchors": 60},
    "runtime": {"targets": ("cpu",), "drafters": ("cpu", "cpu"), "topology": "pool"},
    "optim": {"accumulation": 2},
    "loss": {"objective": "kl"},
    "steps": 6,
    "save_every": 3,
}


def test_a_run_with_a_budget_learns_the_same_and_resumes_bit_for_bit(tmp_path, monkeypatch):
    files = make_files(tmp_path)
    config = tiny_config(files, tmp_path / "counted", **CHANGES)
    counted = run_control(config)
    said = [line for line in counted.lines if line.startswith("rows of the head: ")]
    assert len(said) == 1
    loader_of_run = counted.control.pipeline.loader
    assert f"{loader_of_run.row_budget:,} of a micro-batch's {loader_of_run.num_slots:,} slots" in said[0]

    shutil.copytree(tmp_path / "counted", tmp_path / "parts")
    shutil.rmtree(list_checkpoints(tmp_path / "parts" / "checkpoints")[-1])
    checkpoint = newest_checkpoint(tmp_path / "parts")
    assert checkpoint is not None
    resumed = run_control(dataclasses.replace(config, run_dir=str(tmp_path / "parts")), resume=checkpoint)
    assert_same_run(resumed.run_dir, counted.run_dir)

    monkeypatch.setattr(loader, "MOST_COUNTED", 0)
    plain = run_control(dataclasses.replace(config, run_dir=str(tmp_path / "plain")))
    assert not any(line.startswith("rows of the head: ") for line in plain.lines)
    for one, other in zip(metrics(counted.run_dir), metrics(plain.run_dir), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert [one[key] for key in ("accept", "blocks", "tokens")] == [
            other[key] for key in ("accept", "blocks", "tokens")
        ]
