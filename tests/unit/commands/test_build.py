"""What a drafter is built with, by its device and its company."""

import pytest
import torch

from blockdraft.commands.build import choose_attention
from blockdraft.models.attention import bare_flex_attend, sdpa_attend

pytest.importorskip("triton")
from blockdraft.models.block_attention import kernel_attend


@pytest.mark.parametrize(
    ("name", "device", "head_dim", "is_alone", "expected"),
    [
        ("auto", "cpu", 128, False, (sdpa_attend, "nothing")),
        ("sdpa", "cuda:0", 128, True, (sdpa_attend, "nothing")),
        ("auto", "cuda:0", 128, True, (kernel_attend, "kernels")),
        ("auto", "cuda:0", 128, False, (kernel_attend, "kernels")),
        # No power of two: flex_attention pads it, and is compiled.
        ("auto", "cuda:0", 80, True, (bare_flex_attend, "layer")),
        ("auto", "cuda:0", 8, True, (bare_flex_attend, "layer")),
        ("flex", "cuda:0", 128, True, (bare_flex_attend, "stack")),
        ("flex", "cuda:0", 128, False, (bare_flex_attend, "layer")),
    ],
)
def test_kernels_where_they_fit_and_one_of_several_drafters_compiled_by_layers(
    name, device, head_dim, is_alone, expected
):
    assert choose_attention(name, torch.device(device), head_dim, is_alone=is_alone) == expected


def test_on_a_gpu_that_kernels_are_not_tuned_for_layers_are_compiled(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, how in (((9, 0), "kernels"), ((8, 0), "layer"), ((12, 0), "layer")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device, found=capability: found)
        assert choose_attention("auto", torch.device("cuda:0"), 128, is_alone=True)[1] == how
