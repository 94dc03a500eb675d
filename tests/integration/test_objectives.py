"""Whole tiny runs with each objective and kind of label."""

import dataclasses
import math

import pytest

from blockdraft.commands.control import Control
from blockdraft.config import ConfigError
from blockdraft.runtime.diagnostics import Diagnostics
from integration.tiny_run import Files, assert_same_run, make_files, metrics, run_control, tiny_config

KINDS = [("ce", "data"), ("ce", "argmax"), ("dpace", "data"), ("dpace", "argmax"), ("kl", "data"), ("kl", "argmax")]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return make_files(tmp_path_factory.mktemp("objectives"))


def config_for(files: Files, run_dir, objective: str, labels: str, **changes):
    loss = {"objective": objective, "labels": labels, "draft_vocab": "full"}
    return tiny_config(files, run_dir, loss=loss, optim={"lr": 5e-3}, **changes)


def run_poisoned(config):
    """Drained slots are NaN: whatever is read too late, or never written, is seen."""
    return run_control(config, diagnostics=Diagnostics(poison=True))


@pytest.mark.parametrize(("objective", "labels"), KINDS)
def test_a_run_with_each_objective_lowers_its_loss(files, tmp_path, objective, labels):
    found = run_poisoned(config_for(files, tmp_path, objective, labels))
    losses = [line["loss"] for line in metrics(found.run_dir)]
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)
    assert sum(losses[-3:]) < sum(losses[:3])
    if (objective, labels) == ("ce", "data"):
        uniform = math.log(found.control.built.draft_vocab_size)
        assert losses[0] == pytest.approx(uniform, rel=0.05)


def test_final_states_come_through_any_number_of_targets_and_passes(files, tmp_path):
    runs = []
    for name, targets in (("one", ("cpu",)), ("two", ("cpu", "cpu"))):
        config = config_for(files, tmp_path / name, "kl", "argmax", runtime={"targets": targets, "reuse": 2})
        runs.append(run_poisoned(config).run_dir)
    assert_same_run(*runs)


def test_kl_over_a_draft_vocabulary(files, tmp_path):
    config = config_for(files, tmp_path, "kl", "data")
    config = dataclasses.replace(config, loss=dataclasses.replace(config.loss, draft_vocab="data"))
    assert all(math.isfinite(line["loss"]) for line in metrics(run_poisoned(config).run_dir))


def test_argmax_labels_over_a_draft_vocabulary_are_refused(files, tmp_path):
    config = config_for(files, tmp_path, "ce", "argmax")
    config = dataclasses.replace(config, loss=dataclasses.replace(config.loss, draft_vocab="data"))
    with pytest.raises(ConfigError, match=r"loss.labels argmax may be any id"):
        Control(config, tmp_path, lambda _line: None).run()
