"""Runs whose weights lie side by side in memory, as on a GPU: resumed, divided and exported as others are."""

import pytest
import torch

from blockdraft.commands import build
from blockdraft.commands.export import export
from blockdraft.models.attention import sdpa_attend
from blockdraft.models.joined_weights import joined
from integration.test_drafters import assert_close_run
from integration.test_resume import forget_after
from integration.tiny_run import Files, Ran, assert_same_run, make_files, run_control, tiny_config


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return make_files(tmp_path_factory.mktemp("joined"))


@pytest.fixture
def with_kernels(monkeypatch) -> None:
    """The layers that GPUs run, with plain operations between their products."""
    monkeypatch.setattr(build, "choose_attention", lambda *_arguments, **_options: (sdpa_attend, "kernels"))


def assert_joined(ran: Ran) -> None:
    for step in ran.control.built.steps:
        for layer in step.drafter.layers:
            joined(layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight)
            joined(layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight)


def test_it_is_close_to_a_run_of_the_plain_layers(files, tmp_path, monkeypatch):
    plain = run_control(tiny_config(files, tmp_path / "plain")).run_dir
    monkeypatch.setattr(build, "choose_attention", lambda *_arguments, **_options: (sdpa_attend, "kernels"))
    ran = run_control(tiny_config(files, tmp_path / "joined"))
    assert_joined(ran)
    assert_close_run(ran.run_dir, plain, 1e-4)


@pytest.mark.parametrize(
    ("optimizer", "dtype"), [("adamw", "float32"), ("muon", "float32"), ("adamw_bf16", "bfloat16")]
)
def test_it_goes_on_divided_or_not_bit_for_bit(files, tmp_path, with_kernels, optimizer, dtype):
    def config(name: str, *, shard: bool):
        optim = {"accumulation": 4, "optimizer": optimizer, "shard": shard}
        return tiny_config(
            files, tmp_path / name, optim=optim, drafter={"dtype": dtype}, runtime={"drafters": ("cpu", "cpu")}
        )

    whole = run_control(config("whole", shard=False))
    assert_joined(whole)
    checkpoint = forget_after(whole.run_dir, tmp_path / "parts", 5)
    resumed = run_control(config("parts", shard=True), resume=checkpoint)
    assert_joined(resumed)
    assert_same_run(resumed.run_dir, whole.run_dir)
    drafter = resumed.control.built.steps[0].drafter
    before = [weight.detach().clone() for weight in drafter.parameters()]
    # Reads every tensor back and compares it.
    assert export(drafter, tmp_path / "export", dtype, None) == len(before)
    assert all(torch.equal(weight, copy) for weight, copy in zip(drafter.parameters(), before, strict=True))
