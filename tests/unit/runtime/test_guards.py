"""All guards together: what stands after install, a second install, and after removal."""

import importlib
import platform
import sys
import warnings

import pytest
import torch
import torch.fx._symbolic_trace

from blockdraft.runtime import guards, guards_triton
from blockdraft.runtime.patches import Patches, is_marked, mark

if sys.platform != "linux" or platform.machine() != "x86_64":
    pytest.skip("Triton is built for Linux on x86-64", allow_module_level=True)

from triton.compiler.compiler import CompiledKernel
from triton.runtime.autotuner import Autotuner

pytestmark = pytest.mark.timeout(90)


def guarded_places():
    operator = importlib.import_module("torch._higher_order_ops.flex_attention")
    public = importlib.import_module("torch.nn.attention.flex_attention")
    owners = (Autotuner, CompiledKernel, torch.fx._symbolic_trace, torch.fx.Tracer, operator, public)
    return [dict(vars(owner)) for owner in owners]


def test_install_logs_each_guard_and_removal_is_whole(caplog):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FLA says at import that there is no GPU
        importlib.import_module("fla.utils")
    before = guarded_places()
    with caplog.at_level("INFO", logger="blockdraft"):
        first = guards.install()
    try:
        assert caplog.messages == [f"guard: {line}" for line in first.lines]
        text = "\n".join(first.lines)
        for subject in ("FX tracing flag", "dense attention", "triton autotuner", "triton kernel load", "tensor_cache"):
            assert subject in text
        assert "not guarded" not in text.lower()
        standing = guarded_places()
        assert standing != before
        second = guards.install()
        assert sum("already" in line for line in second.lines) >= len(first.lines) - 1
        second.remove()
        assert guarded_places() == standing
    finally:
        first.remove()
    assert guarded_places() == before
    first.remove()


def test_without_triton_the_rest_is_guarded(monkeypatch):
    exists = guards._exists
    monkeypatch.setattr(guards, "_exists", lambda name: name != "triton" and exists(name))
    installed = guards.install(dense_device_types=())
    installed.remove()
    assert "triton: not installed, nothing to guard" in installed.lines
    assert not any("dense" in line for line in installed.lines)


def test_import_everything_says_what_it_did_not_find():
    found = guards.import_everything(kernels=False, more=("json", "no_such_package.module"))
    by_name = {module.name: module for module in found}
    assert by_name["torch._inductor.compile_fx"].found
    assert by_name["json"].found
    assert not by_name["no_such_package.module"].found
    assert not any(name.startswith("fla") for name in by_name)


def test_a_patch_that_somebody_replaced_is_left_with_a_warning(caplog):
    class Owner:
        value = 1

    patches = Patches()
    patches.replace(Owner, "value", 2)
    patches.replace(Owner, "added", 3)
    Owner.value = 4
    patches.remove()
    assert Owner.value == 4
    assert "added" not in vars(Owner)
    assert "was replaced after the guard" in caplog.text


def test_a_mark_is_found_on_functions_only():
    class Owner:
        @staticmethod
        def plain():
            return None

    Owner.marked = mark(lambda: None)
    Owner.number = 1
    assert [is_marked(Owner, name) for name in ("marked", "plain", "number", "absent")] == [True, False, False, False]


def test_a_missing_module_is_not_imported():
    assert guards_triton.imported("a_module_that_nobody_imports") is None
