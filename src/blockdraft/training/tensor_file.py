"""Safetensors files written straight from memory, their checksum made on the way.

safetensors' own writer copies every tensor and holds the interpreter's lock while it does; a checkpoint is written
while other threads train, so it is written in pieces that let them run. What is written is hashed and sent to the disk
by two more threads meanwhile: neither the processor nor the disk waits for the other.
"""

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

PIECE_BYTES = 16 * 2**20
MOST_WAITING = 8
"""Pieces that wait to be hashed; what is read for its checksum, and copies of turned tensors, are kept so long."""
SYNC_BYTES = 256 * 2**20
"""Written between two syncs. Where memory is large, the kernel would begin to write at the very end."""
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
    with _Writer(path, tick) as writer:
        writer.put(memoryview(len(text).to_bytes(8, "little") + text))
        for tensor in tensors.values():
            writer.put(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return writer.total()


def write_text(path: Path, text: str) -> FileSum:
    """Writes and syncs a small file."""
    with _Writer(path, no_tick) as writer:
        writer.put(memoryview(text.encode()))
        return writer.total()


def sum_file(path: Path) -> FileSum:
    """Reads a file for its checksum; a piece is read while those before it are hashed.

    Raises:
        OSError: it cannot be read.
    """
    num_bytes = 0
    with path.open("rb", buffering=0) as file, _Hasher() as hasher:
        while piece := file.read(PIECE_BYTES):
            hasher.put(memoryview(piece))
            num_bytes += len(piece)
        return FileSum(num_bytes, hasher.hexdigest())


class _Hasher:
    """A checksum made in a thread of its own, in the order of the pieces.

    The first `PIECE_BYTES` are hashed at once: beside busy threads of Python, a small file is done before another
    thread gets its turn.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "hasher")
        self._digest, self._waiting = hashlib.sha256(), deque[Future[None]]()
        self._at_once = PIECE_BYTES

    def __enter__(self) -> "_Hasher":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread; what was not hashed yet is left."""
        self._thread.shutdown(cancel_futures=True)

    def put(self, piece: memoryview) -> None:
        """Waits while there are `MOST_WAITING` pieces before it."""
        self._at_once -= len(piece)
        if self._at_once >= 0:
            self._digest.update(piece)
            return
        self._waiting.append(self._thread.submit(self._digest.update, piece))
        if len(self._waiting) > MOST_WAITING:
            self._waiting.popleft().result()

    def hexdigest(self) -> str:
        """Of all pieces put so far."""
        while self._waiting:
            self._waiting.popleft().result()
        return self._digest.hexdigest()


class _Writer:
    """A file, complete and on disk when its context is left without an error."""

    def __init__(self, path: Path, tick: Callable[[], None]) -> None:
        self._file = path.open("wb", buffering=0)
        self._hasher, self._syncer = _Hasher(), ThreadPoolExecutor(1, "syncer")
        self._sync: Future[None] | None = None
        self._tick, self._num_bytes, self._synced_bytes = tick, 0, 0

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._syncer.shutdown()
            if error[0] is None:
                if self._sync is not None:
                    self._sync.result()
                os.fsync(self._file.fileno())
        finally:
            self._hasher.close()
            self._file.close()

    def put(self, data: memoryview) -> None:
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            self._hasher.put(piece)
            self._num_bytes += len(piece)
            while piece:
                piece = piece[self._file.write(piece) :]
            if self._num_bytes - self._synced_bytes >= SYNC_BYTES:
                self._begin_sync()
            self._tick()

    def _begin_sync(self) -> None:
        """Sends what was written to the disk, where the last sending is over."""
        if self._sync is not None:
            if not self._sync.done():
                return
            self._sync.result()
        self._synced_bytes = self._num_bytes
        self._sync = self._syncer.submit(os.fdatasync, self._file.fileno())

    def total(self) -> FileSum:
        return FileSum(self._num_bytes, self._hasher.hexdigest())
