"""Files written here are those that safetensors reads."""

import hashlib

import pytest
import torch
from safetensors.torch import load_file

from blockdraft.training import tensor_file
from blockdraft.training.tensor_file import FileSum, sum_file, write_tensors


def test_safetensors_reads_back_every_type_and_shape(tmp_path, monkeypatch):
    # Pieces smaller than a tensor, so that tensors begin and end inside of them.
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 7)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a": torch.randn(3, 5, generator=generator),
        "b.bfloat16": torch.randn(4, 3, generator=generator).bfloat16(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "ids": torch.arange(6).view(2, 3),
        "mask": torch.tensor([True, False, True]),
        "turned": torch.randn(4, 2, generator=generator).T,
    }
    ticks: list[int] = []
    found = write_tensors(tmp_path / "x.safetensors", tensors, lambda: ticks.append(1))
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    for name, value in tensors.items():
        assert read[name].dtype == value.dtype
        assert torch.equal(read[name], value), name
    data = (tmp_path / "x.safetensors").read_bytes()
    assert found == FileSum(len(data), hashlib.sha256(data).hexdigest()) == sum_file(tmp_path / "x.safetensors")
    assert len(ticks) >= len(data) // 7


def test_a_tensor_elsewhere_is_a_bug(tmp_path):
    with pytest.raises(AssertionError, match="lies on meta"):
        write_tensors(tmp_path / "x.safetensors", {"a": torch.zeros(1, device="meta")})
