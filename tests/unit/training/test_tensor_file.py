"""Files written here are those that safetensors reads."""

import errno
import hashlib
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from blockdraft.training import tensor_file
from blockdraft.training.tensor_file import FileSum, sum_file, write_tensors


def test_safetensors_reads_back_every_type_and_shape(tmp_path, monkeypatch):
    # Pieces smaller than a tensor, so that tensors begin and end inside of them.
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 7)
    monkeypatch.setattr(tensor_file, "SYNC_BYTES", 20)
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


class SlowSum:
    """A checksum whose every piece but the first, hashed at once, waits for `go`."""

    def __init__(self, go: threading.Event) -> None:
        self.go, self.has_waited_in_vain, self.num_pieces = go, False, 0

    def update(self, piece: memoryview) -> None:
        self.num_pieces += 1
        self.has_waited_in_vain |= self.num_pieces > 1 and not self.go.wait(20)

    def hexdigest(self) -> str:
        return "0"


def test_a_file_is_written_while_it_is_hashed(tmp_path, monkeypatch):
    # Nothing is hashed before two thirds are in the file: whoever hashes first and writes then waits in vain.
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 100)
    go = threading.Event()
    slow = SlowSum(go)
    monkeypatch.setattr(tensor_file.hashlib, "sha256", lambda: slow)
    path = tmp_path / "x.safetensors"

    def tick() -> None:
        if path.stat().st_size > 400:
            go.set()

    write_tensors(path, {"a": torch.zeros(600, dtype=torch.uint8).view(torch.bool)}, tick)
    assert not slow.has_waited_in_vain


def test_a_file_is_read_ahead_of_its_checksum_and_not_further_than_said(monkeypatch):
    go = threading.Event()
    slow = SlowSum(go)
    monkeypatch.setattr(tensor_file.hashlib, "sha256", lambda: slow)
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 1)
    num_put = -1
    with tensor_file._Hasher() as hasher:

        def put_all() -> None:
            nonlocal num_put
            for _ in range(51):
                hasher.put(memoryview(b"x"))
                num_put += 1

        thread = threading.Thread(target=put_all)
        thread.start()
        while num_put < tensor_file.MOST_WAITING:
            thread.join(0.01)
        thread.join(0.2)
        waiting = num_put
        go.set()
        thread.join()
    assert (waiting, num_put) == (tensor_file.MOST_WAITING, 50)


@pytest.mark.parametrize(
    ("name", "first", "sync_bytes"),
    [("fsync", 1, 10), ("fdatasync", 1, 10), ("fdatasync", 2, 10), ("fdatasync", 1, 100)],
)
def test_a_sync_that_fails_is_a_write_that_failed(tmp_path, monkeypatch, name, first, sync_bytes):
    # Linux says it once: the sync after it ends well, and the data are gone. The last case has one sync, at the end.
    calls, done = [], threading.Event()

    def fail(_descriptor: int) -> None:
        calls.append(1)
        done.set()
        if len(calls) == first:
            raise OSError(errno.ENOSPC, "No space left on device")

    def tick() -> None:
        assert name == "fsync" or sync_bytes == 100 or done.wait(10)

    monkeypatch.setattr(tensor_file, "SYNC_BYTES", sync_bytes)
    # As a large file has it: what is behind the first piece is hashed in a thread.
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 50)
    monkeypatch.setattr(tensor_file.os, name, fail)
    with pytest.raises(OSError, match="No space left"):
        write_tensors(tmp_path / "x.safetensors", {"a": torch.zeros(10)}, tick)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("hasher", "syncer"))]


def test_a_small_file_needs_no_thread(tmp_path, monkeypatch):
    def fail(*_work: object) -> None:
        raise AssertionError("a small file waits for a thread")

    monkeypatch.setattr(tensor_file.ThreadPoolExecutor, "submit", fail)
    tensors = {str(number): torch.zeros(1000) for number in range(20)}
    assert write_tensors(tmp_path / "x.safetensors", tensors) == sum_file(tmp_path / "x.safetensors")


def test_a_full_disk_ends_both_threads():
    with pytest.raises(OSError, match="No space left"):
        write_tensors(Path("/dev/full"), {"a": torch.zeros(10)})
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("hasher", "syncer"))]


def test_a_tensor_elsewhere_is_a_bug(tmp_path):
    with pytest.raises(AssertionError, match="lies on meta"):
        write_tensors(tmp_path / "x.safetensors", {"a": torch.zeros(1, device="meta")})
