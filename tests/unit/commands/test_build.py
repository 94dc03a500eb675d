"""What a drafter is built with, by its device and its company."""

import pytest
import torch

from blockdraft.commands.build import choose_attention
from blockdraft.models.attention import bare_flex_attend, sdpa_attend

pytest.importorskip("triton")
from blockdraft.models.block_attention import kernel_attend


@pytest.mark.parametrize(
    ("name", "device", "is_alone", "expected"),
    [
        ("auto", "cpu", False, (sdpa_attend, "nothing")),
        ("sdpa", "cuda:0", True, (sdpa_attend, "nothing")),
        ("auto", "cuda:0", True, (kernel_attend, "layer")),
        ("flex", "cuda:0", True, (bare_flex_attend, "stack")),
        ("flex", "cuda:0", False, (bare_flex_attend, "layer")),
    ],
)
def test_one_of_several_drafters_is_compiled_by_layers(name, device, is_alone, expected):
    assert choose_attention(name, torch.device(device), is_alone=is_alone) == expected
