"""Twenty steps give the recorded losses: to 1e-4, since other CPUs round otherwise."""

import pytest
import torch

from golden.record import RUNS, recorded, twenty_steps


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", RUNS)
def test_twenty_steps_give_the_recorded_losses(name, tmp_path):
    found, expected = twenty_steps(name, tmp_path), recorded(name)
    assert len(found) == len(expected) == 20
    for mine, its in zip(found, expected, strict=True):
        assert mine["loss"] == pytest.approx(its["loss"], rel=1e-4), f"step {its['step']}"
        assert mine["grad_norm"] == pytest.approx(its["grad_norm"], rel=1e-3), f"step {its['step']}"
        assert mine["lr"] == pytest.approx(its["lr"], rel=1e-9)
        # Which documents and anchors a step gets is exact on every machine.
        assert [mine[key] for key in ("step", "blocks", "tokens")] == [its[key] for key in ("step", "blocks", "tokens")]


def test_the_losses_fall():
    for name in RUNS:
        losses = [line["loss"] for line in recorded(name)]
        assert sum(losses[-5:]) < sum(losses[:5])
