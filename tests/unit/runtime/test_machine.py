"""What the doctor says of machine and packages."""

import importlib.metadata
from pathlib import Path

import pytest
import torch

from blockdraft.runtime import machine
from blockdraft.runtime.kernel_caches import CacheDirectories
from blockdraft.runtime.machine import cache_findings, machine_findings


def test_a_machine_without_a_gpu_has_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "cache_directories", lambda: CacheDirectories(None, tmp_path))
    found = list(machine_findings())
    assert {finding.check for finding in found} >= {"machine", "torch", "transformers", "triton", "gpu", "guard"}
    assert [finding for finding in found if finding.verdict == "FAIL"] == []
    assert any("FX tracing flag" in finding.result for finding in found if finding.check == "guard")


@pytest.mark.parametrize(
    ("versions", "name", "verdict", "words"),
    [
        ({"torch": "2.10.1+cu126"}, "torch", "FAIL", "older than 2.11; pip install -U 'torch>=2.11'"),
        ({"torch": "2.13.0+cpu"}, "torch", "ok", "2.13.0"),
        ({"torch": "2.14.0"}, "torch", "warn", "run `make test-gpu`"),
        ({"transformers": "4.57.1"}, "transformers", "FAIL", "older than 5.17"),
        ({}, "torch", "FAIL", "pip install 'torch>=2.11'"),
        ({}, "triton", "ok", "only GPUs need it"),
        ({}, "fla-core", "ok", "only hybrid targets"),
    ],
)
def test_versions(monkeypatch, versions: dict[str, str], name: str, verdict: str, words: str) -> None:
    def version(asked: str) -> str:
        if asked not in versions:
            raise importlib.metadata.PackageNotFoundError(asked)
        return versions[asked]

    monkeypatch.setattr(machine.metadata, "version", version)
    found = machine._package(name)
    assert found.verdict == verdict
    assert words in str(found)


def test_triton_is_missed_where_there_is_a_gpu(monkeypatch) -> None:
    def nothing(asked: str) -> str:
        raise importlib.metadata.PackageNotFoundError(asked)

    monkeypatch.setattr(machine.metadata, "version", nothing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert machine._package("triton").verdict == "FAIL"


def test_corrupt_cache_entries_are_named_and_left(tmp_path: Path) -> None:
    entry = tmp_path / "triton" / ("A" * 52)
    entry.mkdir(parents=True)
    (entry / "kernel.json").write_text('{"half')
    (found,) = cache_findings(CacheDirectories(tmp_path / "triton", tmp_path / "inductor"))
    assert found.verdict == "FAIL"
    assert str(entry) in found.result and "kernel.json" in found.result
    assert (entry / "kernel.json").exists()
    (entry / "kernel.json").write_text("{}")
    (found,) = cache_findings(CacheDirectories(tmp_path / "triton", tmp_path / "inductor"))
    assert found.verdict == "ok"


class Driver:
    """libcuda, as far as it is asked."""

    def cuDriverGetVersion(self, number) -> int:
        number._obj.value = 13010
        return 0


class Broken(Driver):
    def cuDriverGetVersion(self, number) -> int:
        return 999


@pytest.mark.parametrize(
    ("built", "verdict", "words"),
    [
        ("13.0", "ok", "CUDA 13.1 (unknown), torch is built for 13.0"),
        ("14.0", "FAIL", "torch is built for 14.0; install a newer driver"),
    ],
)
def test_the_driver_is_asked_for_its_version(monkeypatch, tmp_path: Path, built, verdict, words) -> None:
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda _name: Driver())
    monkeypatch.setattr(machine, "DRIVER_FILE", tmp_path / "none")
    monkeypatch.setattr(torch.version, "cuda", built)
    found = machine._driver()
    assert found.verdict == verdict
    assert words in str(found)


def test_a_driver_that_does_not_answer_is_said(monkeypatch) -> None:
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda _name: Broken())
    with pytest.raises(RuntimeError, match=r"cuDriverGetVersion: expected 0, found error 999; reinstall the driver"):
        machine._driver()


class Facts:
    name, total_memory, shared_memory_per_block_optin = "Card", 24 * 2**30, 99 * 1024
    major, minor = 12, 0


@pytest.mark.parametrize(
    ("capability", "arches", "verdict", "words"),
    [
        ((9, 0), ["sm_80", "sm_90"], "ok", "compute capability 9.0"),
        ((12, 0), ["sm_90", "sm_120"], "ok", "99 KB shared memory a block: smaller attention tiles"),
        ((12, 0), ["sm_80", "sm_90"], "FAIL", "install a build for this GPU"),
        ((7, 5), ["sm_75"], "warn", "no bfloat16"),
    ],
)
def test_gpus(monkeypatch, capability, arches, verdict, words) -> None:
    facts = Facts()
    facts.major, facts.minor = capability
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: facts)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: arches)
    found = machine._gpu(0)
    assert found.verdict == verdict
    assert words in str(found)


def test_gpus_that_do_not_reach_each_other_are_named(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} != {0, 2})
    (found,) = machine._peers()
    assert (found.verdict, found.result) == ("warn", "none between cuda:0 - cuda:2, cuda:2 - cuda:0")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    (found,) = machine._peers()
    assert found.result == "between all 3 GPUs"
