"""Corrupt cache entries are found and removed, sound ones stay, and nothing foreign is touched."""

import json
import os
import pickle
import platform
import sys
from pathlib import Path

import pytest

from blockdraft.runtime.kernel_caches import CacheDirectories, cache_directories, sweep, sweep_inductor, sweep_triton

pytestmark = pytest.mark.timeout(60)
KERNEL_NAME = "K" * 52
DEAD_PROCESS = 2**22 + 1
"""Above the largest process id of Linux."""


def elf(num_sections=2):
    """The least that counts as a whole 64-bit ELF file: header, then a table of sections."""
    header = bytearray(64)
    header[:5] = b"\x7fELF\x02"
    header[40:48] = (64).to_bytes(8, "little")
    header[58:60] = (64).to_bytes(2, "little")
    header[60:62] = num_sections.to_bytes(2, "little")
    return bytes(header) + bytes(64 * num_sections)


def make_kernel(directory, name=KERNEL_NAME):
    """One kernel as Triton writes it."""
    entry = directory / name
    entry.mkdir(parents=True)
    contents = {
        "add.json": json.dumps({"shared": 0}).encode(),
        "add.ptx": b".version 8.0",
        "add.ttir": b"module {}",
        "add.cubin": elf(),
    }
    for file_name, content in contents.items():
        (entry / file_name).write_bytes(content)
    group = {"child_paths": {file_name: str(entry / file_name) for file_name in contents}}
    (entry / "__grp__add.json").write_text(json.dumps(group))
    return entry


def truncate(path, share):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def make_old(path):
    os.utime(path, (1, 1))


def test_a_sound_triton_cache_stays(tmp_path):
    entry = make_kernel(tmp_path)
    (entry / "__triton_launcher.cpython-312-x86_64-linux-gnu.so").write_bytes(elf())
    (entry / "add.autotune.json").write_text('{"configs_timings": []}')
    (entry / "lock").write_bytes(b"")
    before = sorted(tmp_path.rglob("*"))
    assert sweep_triton(tmp_path) == []
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "share", "reason"),
    [
        ("__grp__add.json", 0.5, "no complete JSON"),
        ("__grp__add.json", 0.0, "no complete JSON"),
        ("add.json", 0.7, "no complete JSON"),
        ("add.cubin", 0.8, "of 192 bytes"),
        ("add.cubin", 0.1, "ends inside the ELF header"),
        ("add.cubin", 0.0, "is empty"),
        ("add.ptx", 0.0, "is empty"),
    ],
)
def test_a_kernel_with_a_truncated_file_goes_and_its_neighbour_stays(tmp_path, name, share, reason):
    broken, sound = make_kernel(tmp_path), make_kernel(tmp_path, "S" * 52)
    truncate(broken / name, share)
    (removed,) = sweep_triton(tmp_path)
    assert removed.path == broken
    assert name in removed.reason
    assert reason in removed.reason
    assert "will be built again" in str(removed)
    assert not broken.exists()
    assert sound.exists()
    assert sweep_triton(tmp_path) == []


@pytest.mark.parametrize("damage", ["missing", "zeros", "list", "other"])
def test_other_faults_of_a_kernel(tmp_path, damage):
    entry = make_kernel(tmp_path)
    if damage == "missing":
        (entry / "add.cubin").unlink()
    elif damage == "zeros":
        (entry / "add.ptx").write_bytes(bytes(100))
    elif damage == "list":
        (entry / "__grp__add.json").write_text("[]")
    else:
        (entry / "add.cubin").write_bytes(b"no kernel at all" * 10)
    assert [removed.path for removed in sweep_triton(tmp_path)] == [entry]


@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="Triton is built for Linux")
def test_triton_itself_dies_of_what_is_removed(tmp_path, monkeypatch):
    """The fault is real: Triton's own reader raises before the sweep, and misses cleanly after it."""
    from triton.runtime.cache import FileCacheManager

    entry = make_kernel(tmp_path)
    truncate(entry / "__grp__add.json", 0.5)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with pytest.raises(json.JSONDecodeError):
        FileCacheManager(KERNEL_NAME).get_group("add.json")
    sweep_triton(tmp_path)
    assert FileCacheManager(KERNEL_NAME).get_group("add.json") is None


def test_temporary_files_of_dead_processes_go_when_they_are_old(tmp_path):
    entry = make_kernel(tmp_path)
    dead = entry / f"tmp.pid_{DEAD_PROCESS}_0a-1b"
    young = entry / f"tmp.pid_{DEAD_PROCESS}_0a-2c"
    alive = entry / f"tmp.pid_{os.getpid()}_0a-3d"
    for directory in (dead, young, alive):
        directory.mkdir()
        (directory / "add.json").write_text("{")
    make_old(dead)
    make_old(alive)
    assert [removed.path for removed in sweep_triton(tmp_path)] == [dead]
    assert (young.exists(), alive.exists(), entry.exists()) == (True, True, True)


def test_foreign_files_and_links_are_left(tmp_path):
    cache, outside = tmp_path / "cache", tmp_path / "outside"
    broken = make_kernel(outside)
    truncate(broken / "add.json", 0.5)
    cache.mkdir()
    (cache / KERNEL_NAME).symlink_to(broken)
    (cache / "notes").mkdir()
    (cache / "notes" / "thesis.json").write_text("{")
    (cache / "empty.json").write_text("")
    assert sweep_triton(cache) == []
    assert sweep_inductor(cache) == []
    assert broken.exists()
    assert (cache / "notes" / "thesis.json").exists()
    assert sweep_triton(tmp_path / "no such directory") == []


def make_inductor(directory):
    """An entry of each kind as Inductor writes them; returns their paths."""
    key = "f" + "a2" * 25
    graph = directory / "fxgraph" / "a2" / key / ("b3" * 26)
    aot = directory / "aotautograd" / ("a" + key) / ("c4" * 26)
    code = directory / "ab" / ("cab" + "d5" * 24 + ".py")
    choice = directory / "ab" / ("cab" + "e6" * 24 + ".best_config")
    library = directory / "ab" / ("cab" + "f7" * 24 + ".main.so")
    contents = {
        graph: pickle.dumps({"source": "x" * 1000, "more": list(range(500))}),
        aot: pickle.dumps([b"y" * 5000]),
        code: b"import torch\n",
        choice: b'{"num_warps": 4}',
        library: elf(),
    }
    for path, content in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    kernel = make_kernel(directory / "triton" / "0")
    return list(contents), kernel


def test_a_sound_inductor_cache_stays(tmp_path):
    make_inductor(tmp_path)
    assert sweep_inductor(tmp_path) == []


@pytest.mark.parametrize("share", [0.0, 0.4, 0.97])
def test_each_truncated_inductor_entry_goes_and_the_others_stay(tmp_path, share):
    paths, kernel = make_inductor(tmp_path)
    for path in paths:
        before = path.read_bytes()
        if path.suffix == ".py" and share > 0:
            continue  # a shorter text is a text; Inductor names code by its content and writes it in one piece
        truncate(path, share)
        assert [removed.path for removed in sweep_inductor(tmp_path)] == [path]
        path.write_bytes(before)
    assert all(path.exists() for path in paths)
    truncate(kernel / "add.json", share)
    assert [removed.path for removed in sweep_inductor(tmp_path)] == [kernel]


def test_a_pickle_is_walked_but_never_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    (path, *_), _ = make_inductor(tmp_path)
    path.write_bytes(pickle.dumps(Bomb()))
    assert sweep_inductor(tmp_path) == []
    assert not (tmp_path / "ran").exists()


def test_inductor_temporary_files_go_when_old_and_dead(tmp_path):
    (graph, *_), _ = make_inductor(tmp_path)
    stale = graph.parent / f".{DEAD_PROCESS}.140001.tmp"
    fresh = graph.parent / f".{os.getpid()}.140001.tmp"
    for path in (stale, fresh):
        path.write_bytes(b"half")
        make_old(path)
    assert [removed.path for removed in sweep_inductor(tmp_path)] == [stale]


def test_both_caches_are_swept(tmp_path):
    make_inductor(tmp_path / "inductor")
    entry = make_kernel(tmp_path / "triton")
    truncate(entry / "add.json", 0.5)
    assert [removed.path for removed in sweep(CacheDirectories(tmp_path / "triton", tmp_path / "inductor"))] == [entry]
    assert sweep(CacheDirectories(None, tmp_path / "inductor")) == []


def test_the_directories_are_those_that_the_libraries_use(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    assert cache_directories().inductor == tmp_path / "inductor"
    assert cache_directories().triton in (None, tmp_path / "triton")
