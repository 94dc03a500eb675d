"""What this machine and its packages are fit for: one finding a check, for `blockdraft doctor`.

Nothing here allocates on a GPU or changes a file.
"""

import ctypes
import os
import platform
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final, Literal, NamedTuple

import torch

from blockdraft.runtime.guards import import_everything, install
from blockdraft.runtime.kernel_caches import CacheDirectories, cache_directories, sweep

GIB: Final = 2**30
OLDEST: Final = {"torch": "2.11", "transformers": "5.17"}
"""What pyproject.toml asks for."""
TRIED: Final = {
    "torch": ("2.11", "2.13"),
    "triton": ("3.6", "3.7", "3.9"),
    "fla-core": ("0.6",),
    "transformers": ("5.17",),
}
"""Versions that the guards' tests have run with (docs/decisions/0002-thread-guards.md)."""
DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")
NEWEST_WITHOUT_BF16: Final = (7, 5)
FULL_SHARED_MEMORY: Final = 160 * 1024
"""Bytes a block; consumer cards have 99 KB and get smaller attention tiles."""

Verdict = Literal["ok", "warn", "FAIL", "skip"]


class Finding(NamedTuple):
    """One line of the doctor."""

    check: str
    verdict: Verdict
    result: str
    fix: str = ""

    def __str__(self) -> str:
        words = f"{self.check}: {self.result}; {self.fix}" if self.fix else f"{self.check}: {self.result}"
        # Messages of other packages bring line breaks.
        return f"{self.verdict:<6}{' '.join(words.split())}"


def machine_findings() -> Iterator[Finding]:
    """Machine, packages, GPUs, guards, kernel caches."""
    yield _machine()
    yield from (_package(name) for name in TRIED)
    yield from _gpus()
    yield from _peers()
    yield from _guards()
    yield from cache_findings(cache_directories())


def _machine() -> Finding:
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Finding(
        "machine",
        "ok",
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, {os.cpu_count()} cores, "
        f"{pages * size / GIB:.0f} GiB memory",
    )


def _package(name: str) -> Finding:
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return _missing(name)
    series = ".".join(map(str, _series(found)))
    oldest = OLDEST.get(name)
    if oldest is not None and _series(found) < _series(oldest):
        return Finding(name, "FAIL", f"{found}, older than {oldest}", f"pip install -U '{name}>={oldest}'")
    if series in TRIED[name]:
        return Finding(name, "ok", f"{found}, which the tests have run with")
    return Finding(
        name,
        "warn",
        f"{found}; the guards' tests have run with {', '.join(TRIED[name])}",
        "they look at the code that they find, but run `make test-gpu` before a long run",
    )


def _series(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _missing(name: str) -> Finding:
    if name in OLDEST:
        return Finding(name, "FAIL", "not installed", f"pip install '{name}>={OLDEST[name]}'")
    if name == "triton" and torch.cuda.is_available():
        return Finding(name, "FAIL", "not installed, and this machine has a GPU", "install the CUDA build of torch")
    what = "only hybrid targets on GPUs need it" if name == "fla-core" else "only GPUs need it"
    return Finding(name, "ok", f"not installed; {what}")


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        if built is None:
            yield Finding("gpu", "ok", "none: this torch is a CPU build; runs stay on cpu")
        else:
            yield Finding(
                "gpu",
                "warn",
                f"none is seen by torch, which is built for CUDA {built}",
                "check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES; runs stay on cpu",
            )
        return
    yield _driver()
    for index in range(torch.cuda.device_count()):
        yield _gpu(index)


def _driver() -> Finding:
    kernel = DRIVER_FILE.read_text(encoding="utf-8").splitlines()[0] if DRIVER_FILE.is_file() else "unknown"
    number = _driver_version()
    able = f"{number // 1000}.{number % 1000 // 10}"
    built = torch.version.cuda
    result = f"CUDA {able} ({kernel.split('  ')[0].strip()}), torch is built for {built}"
    if built is not None and int(built.split(".")[0]) > number // 1000:
        return Finding("driver", "FAIL", result, "install a newer driver, or torch built for an older CUDA")
    return Finding("driver", "ok", result)


def _driver_version() -> int:
    """CUDA's version that the installed driver is able to, 13000 for 13.0; torch does not say it."""
    number = ctypes.c_int()
    status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    if status != 0:
        raise RuntimeError(f"cuDriverGetVersion: expected 0, found error {status}; reinstall the driver")
    return number.value


def _gpu(index: int) -> Finding:
    facts = torch.cuda.get_device_properties(index)
    capability = (facts.major, facts.minor)
    result = f"{facts.name}, compute capability {facts.major}.{facts.minor}, {facts.total_memory / GIB:.1f} GiB"
    name = f"cuda:{index}"
    arches = torch.cuda.get_arch_list()
    is_known = any(f"{facts.major}{facts.minor}" in arch for arch in arches) or any(
        arch.startswith(f"sm_{facts.major}") for arch in arches
    )
    if not is_known:
        return Finding(
            name, "FAIL", f"{result}; this torch has kernels for {', '.join(arches)}", "install a build for this GPU"
        )
    if capability <= NEWEST_WITHOUT_BF16:
        return Finding(name, "warn", f"{result}; no bfloat16", "set --target.dtype float32 --drafter.dtype float32")
    shared: int = facts.shared_memory_per_block_optin  # type: ignore[attr-defined]
    if shared < FULL_SHARED_MEMORY:
        return Finding(name, "ok", f"{result}, {shared // 1024} KB shared memory a block: smaller attention tiles")
    return Finding(name, "ok", result)


def _peers() -> Iterator[Finding]:
    count = torch.cuda.device_count()
    if count < 2:
        return
    apart = [
        f"cuda:{a} - cuda:{b}"
        for a in range(count)
        for b in range(count)
        if a != b and not torch.cuda.can_device_access_peer(a, b)
    ]
    if apart:
        yield Finding(
            "peer access",
            "warn",
            f"none between {', '.join(apart)}",
            "features go through page-locked host memory there; put pairs on GPUs that reach each other",
        )
    else:
        yield Finding("peer access", "ok", f"between all {count} GPUs")


def _guards() -> Iterator[Finding]:
    """What the guards find in the packages that are installed: put in place, read, and taken away again."""
    import_everything(kernels=torch.cuda.is_available())
    guards = install()
    lines = list(guards.lines)
    guards.remove()
    yield from (Finding("guard", "ok", line) for line in lines)


def cache_findings(directories: CacheDirectories) -> Iterator[Finding]:
    """Corrupt entries of the kernel caches; none is removed."""
    for found in (wrong := sweep(directories, remove=False)):
        yield Finding("kernel cache", "FAIL", f"{found.path}: {found.reason}", "delete it; a run on a GPU does so too")
    if not wrong:
        places = [str(path) for path in directories if path is not None]
        yield Finding("kernel cache", "ok", f"no corrupt entry in {' and '.join(places)}")
