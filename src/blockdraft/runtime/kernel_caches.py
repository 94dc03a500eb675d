"""Corrupt entries of the kernel caches on disk, found and removed before anything reads them.

Triton and Inductor write an entry to the side and rename it, so a killed process leaves temporary files; a full or
failing disk, a copied cache or an older version leaves truncated ones. Triton dies of a half-written JSON file and of
a group whose files are gone. Only files inside the given directories that carry the caches' own names are touched.
"""

import json
import os
import pickletools
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TRITON_ENTRY = re.compile(r"[A-Z2-7]{52}|[0-9a-f]{64}")
"""A directory of one kernel: SHA-256 in base32, or in hex as older versions write it."""
TRITON_TEMPORARY = re.compile(r"tmp\.pid_(\d+)_[0-9a-f-]+")
INDUCTOR_KEY = re.compile(r"[a-z2-7]{48,56}")
"""An entry of fxgraph/ or aotautograd/: base32, with a letter in front for the kind."""
INDUCTOR_TEMPORARY = re.compile(r"\.(\d+)\.\d+\.tmp")
INDUCTOR_SHARD = re.compile(r"[a-z2-7]{2}")
TEXT = frozenset({".ttir", ".ttgir", ".llir", ".ptx", ".amdgcn", ".source", ".py", ".cpp", ".h"})
BINARY = frozenset({".so", ".cubin", ".hsaco"})


class Removed(NamedTuple):
    """One thing that was deleted, and why."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"removed {self.path} from the kernel cache: {self.reason}; it will be built again"


class CacheDirectories(NamedTuple):
    """Where the caches of this process lie."""

    triton: Path | None
    inductor: Path


def cache_directories() -> CacheDirectories:
    """Where Triton and Inductor say that their caches are; imports both."""
    import importlib.util

    from torch._inductor.runtime.cache_dir_utils import cache_dir

    triton_dir = None
    if importlib.util.find_spec("triton") is not None:
        from triton import knobs

        triton_dir = Path(knobs.cache.dir)
    return CacheDirectories(triton_dir, Path(cache_dir()))


def sweep(directories: CacheDirectories, *, stale_s: float = 600.0, remove: bool = True) -> list[Removed]:
    """Remove what is corrupt in both caches; report each removal. Without `remove` everything stays where it is.

    Temporary files go when their process is gone and they are older than `stale_s` seconds: another machine may share
    the directory, and its processes cannot be seen from here.
    """
    removed = [] if directories.triton is None else sweep_triton(directories.triton, stale_s=stale_s, remove=remove)
    return removed + sweep_inductor(directories.inductor, stale_s=stale_s, remove=remove)


def sweep_triton(directory: Path, *, stale_s: float = 600.0, remove: bool = True) -> list[Removed]:
    """Check each kernel of a Triton cache. A kernel with one bad file goes as a whole."""
    removed = []
    for entry in _directories(directory):
        if TRITON_ENTRY.fullmatch(entry.name):
            for temporary in _directories(entry):
                match = TRITON_TEMPORARY.fullmatch(temporary.name)
                if match and _is_stale(temporary, int(match[1]), stale_s):
                    removed += _delete(temporary, "left by an aborted run", remove)
            reason = _fault_of_kernel(entry)
            if reason:
                removed += _delete(entry, reason, remove)
    return removed


def sweep_inductor(directory: Path, *, stale_s: float = 600.0, remove: bool = True) -> list[Removed]:
    """Check the entries of an Inductor cache, and the Triton caches inside it."""
    removed = []
    for kind in ("fxgraph", "aotautograd"):
        for path in _files(directory / kind):
            match = INDUCTOR_TEMPORARY.fullmatch(path.name)
            if match:
                if _is_stale(path, int(match[1]), stale_s):
                    removed += _delete(path, "left by an aborted run", remove)
            elif INDUCTOR_KEY.fullmatch(path.name):
                reason = _fault_of_pickle(path)
                removed += _delete(path, reason, remove) if reason else []
    for shard in _directories(directory):
        if not INDUCTOR_SHARD.fullmatch(shard.name):
            continue
        for path in _files(shard):
            reason = _fault_of_file(path)
            removed += _delete(path, reason, remove) if reason else []
    for device in _directories(directory / "triton"):
        removed += sweep_triton(device, stale_s=stale_s, remove=remove)
    return removed


def _directories(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if path.is_dir() and not path.is_symlink())


def _files(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield path


def _fault_of_kernel(entry: Path) -> str:
    """What is wrong with the directory of a kernel; empty when nothing is."""
    files = [path for path in sorted(entry.iterdir()) if path.is_file()]
    for path in files:
        reason = _fault_of_file(path) or (_fault_of_group(path) if path.name.startswith("__grp__") else "")
        if reason:
            return f"{path.name}: {reason}"
    return ""


def _fault_of_group(path: Path) -> str:
    """A group names the files that make up a kernel; all must be there."""
    group = json.loads(path.read_text())
    if not isinstance(group, dict) or not isinstance(group.get("child_paths"), dict):
        return "names no files"
    missing = [name for name, child in group["child_paths"].items() if not (path.parent / Path(child).name).is_file()]
    return f"its file {missing[0]} is missing" if missing else ""


def _fault_of_file(path: Path) -> str:
    """What is wrong with one file, by its ending; endings that no cache writes pass."""
    if path.suffix == ".json" or path.suffix == ".best_config":
        return _fault_of_json(path)
    if path.suffix not in TEXT | BINARY:
        return ""
    if path.stat().st_size == 0:
        return "is empty"
    content = path.read_bytes()
    if path.suffix in TEXT:
        return "holds zero bytes where text should be" if b"\0" in content else ""
    return _fault_of_elf(content)


def _fault_of_json(path: Path) -> str:
    try:
        json.loads(path.read_bytes())
    except (ValueError, UnicodeDecodeError) as error:
        return f"is no complete JSON ({error})"
    return ""


def _fault_of_elf(content: bytes) -> str:
    """Kernels and launchers are ELF files; the table of sections stands at their end."""
    if content[:4] != b"\x7fELF":
        return "is no ELF file"
    is_64_bit = content[4:5] == b"\x02"
    if not is_64_bit or len(content) < 64:
        return "ends inside the ELF header" if len(content) < 52 else ""
    offset = int.from_bytes(content[40:48], "little")
    end = offset + int.from_bytes(content[58:60], "little") * int.from_bytes(content[60:62], "little")
    return f"has {len(content)} of {end} bytes" if end > len(content) else ""


def _fault_of_pickle(path: Path) -> str:
    """Walk through a pickle without running it."""
    content = path.read_bytes()
    if not content:
        return "is empty"
    try:
        for _ in pickletools.genops(content):
            pass
    except Exception as error:  # genops raises whatever a broken opcode leads to
        return f"is no complete pickle ({type(error).__name__}: {error})"
    return ""


def _is_stale(path: Path, process: int, stale_s: float) -> bool:
    if time.time() - path.stat().st_mtime < stale_s:
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _delete(path: Path, reason: str, remove: bool) -> list[Removed]:
    if not remove:
        return [Removed(path, reason)]
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    return [Removed(path, reason)]
