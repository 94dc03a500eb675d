"""Safetensors files written straight from memory, their checksum made on the way.

safetensors' own writer copies every tensor and holds the interpreter's lock while it does; a checkpoint is written
while other threads train, so hashing and writing go in pieces that let them run.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

PIECE_BYTES = 16 * 2**20
NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}


class FileSum(NamedTuple):
    """What a file is recognised by."""

    num_bytes: int
    sha256: str


def no_tick() -> None:
    """The default."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], tick: Callable[[], None] = no_tick) -> FileSum:
    """Writes and syncs a .safetensors file of contiguous host tensors; `tick` is called after every piece."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        assert tensor.device.type == "cpu", f"{name} lies on {tensor.device}"
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # The format wants data to begin at a multiple of 8.
    text += b" " * (-len(text) % 8)
    writer = _Writer(path, tick)
    with writer:
        writer.put(memoryview(len(text).to_bytes(8, "little") + text))
        for tensor in tensors.values():
            writer.put(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return writer.total()


def write_text(path: Path, text: str) -> FileSum:
    """Writes and syncs a small file."""
    writer = _Writer(path, no_tick)
    with writer:
        writer.put(memoryview(text.encode()))
    return writer.total()


def sum_file(path: Path) -> FileSum:
    """Reads a file for its checksum.

    Raises:
        OSError: it cannot be read.
    """
    digest, num_bytes = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            num_bytes += len(piece)
    return FileSum(num_bytes, digest.hexdigest())


class _Writer:
    def __init__(self, path: Path, tick: Callable[[], None]) -> None:
        self._file = path.open("wb", buffering=0)
        self._tick, self._digest, self._num_bytes = tick, hashlib.sha256(), 0

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is None:
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def put(self, data: memoryview) -> None:
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            self._digest.update(piece)
            self._num_bytes += len(piece)
            while piece:
                piece = piece[self._file.write(piece) :]
            self._tick()

    def total(self) -> FileSum:
        return FileSum(self._num_bytes, self._digest.hexdigest())
