"""Who compiles and settles when; and case 29: attention that needs more shared memory than the GPU has.

R rows, T tokens, A anchors.
"""

import threading
import time

import pytest
import torch

from blockdraft.config import ConfigError, LossConfig, OptimConfig
from blockdraft.data.loader import Loader
from blockdraft.models.attention import sdpa_attend
from blockdraft.models.compiled import How
from blockdraft.models.tiles import OtherTiles
from blockdraft.runtime import warm_up
from blockdraft.runtime.channel import Stopped
from blockdraft.runtime.slots import Slot
from blockdraft.runtime.transfers import to_device
from blockdraft.runtime.warm_up import Turns, warm_up_drafter
from blockdraft.training.step import DrafterStep
from integration.tiny import tiny_drafter, tiny_target
from unit.data.test_loader import LENGTHS, config, store_of
from unit.training.test_step import filled

CPU = torch.device("cpu")
REASON = "out of resource: shared memory, Required: 163840, Hardware limit: 101376. Reducing block sizes may help."


class OutOfResources(Exception):
    """As Triton raises it."""


class RefusedBackward(torch.autograd.Function):
    """A kernel that fits in the forward only."""

    @staticmethod
    def forward(ctx, out):
        return out.clone()

    @staticmethod
    def backward(ctx, upstream):
        raise OutOfResources(REASON)


def refused(*, in_backward: bool):
    def make(shape, document_RT, position_RT, anchor_RA):
        inner = sdpa_attend(shape, document_RT, position_RT, anchor_RA)

        def attend(*streams):
            if not in_backward:
                raise OutOfResources(REASON)
            return RefusedBackward.apply(inner(*streams))

        return attend

    return make


FORWARD, BACKWARD = refused(in_backward=False), refused(in_backward=True)


@pytest.fixture
def loader():
    return Loader(store_of(LENGTHS), config())


def step_with(make_attend, how: How = "nothing") -> DrafterStep:
    target = tiny_target("qwen3")
    return DrafterStep(
        tiny_drafter(target, 4), target.ends, target.ends, loss=LossConfig(chunk_rows=64), optim=OptimConfig(lr=1e-3),
        total_steps=10, make_attend=make_attend, how=how,
    )  # fmt: skip


def slot_of(step: DrafterStep, loader: Loader) -> Slot:
    return Slot(loader.config.num_rows, loader.config.row_length, step.drafter.fc.in_features, torch.float32, CPU)


def put_table(monkeypatch, *attends):
    table = [OtherTiles(f"size {i}", attend) for i, attend in enumerate(attends)]
    monkeypatch.setattr(warm_up, "smaller_tiles", lambda _attend: iter(table))


@pytest.mark.parametrize("tried", [(), (BACKWARD,), (FORWARD, BACKWARD)])
def test_smaller_tiles_are_tried_and_said(loader, monkeypatch, tried):
    put_table(monkeypatch, *tried, sdpa_attend)
    step, lines = step_with(BACKWARD), []
    warm_up_drafter(step, slot_of(step, loader), loader, lines.append)
    assert step.make_attend is sdpa_attend
    expected = [
        f"attention needs more than cpu has ({REASON}); trying tiles of size {i}" for i in range(len(tried) + 1)
    ]
    assert lines == expected


@pytest.mark.parametrize("how", ["nothing", "kernels"])
def test_a_step_after_that_is_the_one_that_would_have_been(loader, monkeypatch, how):
    put_table(monkeypatch, sdpa_attend)
    found, expected = step_with(BACKWARD, how), step_with(sdpa_attend, how)
    fill = next(loader.fills(0, 1))
    target = tiny_target("qwen3")
    for step in (found, expected):
        warm_up_drafter(step, slot_of(step, loader), loader)
        slot = filled(target, fill, loader.config.num_rows)
        for one in fill.passes:
            step.micro_batch(slot.features_RTC, to_device(one, CPU), one.denominator)
        step.finish(0)
    for name, weight in expected.optimizer.masters.items():
        assert torch.equal(found.optimizer.masters[name], weight), name


def test_no_tiles_left_is_an_error_that_says_what_to_do(loader, monkeypatch):
    put_table(monkeypatch, FORWARD)
    step = step_with(FORWARD)
    with pytest.raises(
        ConfigError, match=r"fits cpu with no tiles of models/tiles\.py \(out of resource.*attention sdpa"
    ):
        warm_up_drafter(step, slot_of(step, loader), loader)


def test_other_errors_in_warm_up_are_not_taken_for_it(loader, monkeypatch):
    def broken(*_arguments):
        raise RuntimeError("CUDA out of memory")

    put_table(monkeypatch, sdpa_attend)
    step = step_with(broken)
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        warm_up_drafter(step, slot_of(step, loader), loader)


def test_workers_compile_one_at_a_time_and_settle_when_all_have_compiled(monkeypatch):
    log: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append(("emptied", -1)))
    turns = Turns(3, lambda: None)

    def settle(i: int) -> int:
        log.append(("settles", i))
        time.sleep(0.01)
        log.append(("settled", i))
        return i

    def body(i: int) -> None:
        with turns.compiling():
            log.append(("compiles", i))
            time.sleep(0.02)
            log.append(("compiled", i))
        assert turns.settle(lambda: settle(i)) == i

    threads = [threading.Thread(target=body, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    kinds = [kind for kind, _ in log]
    assert kinds == ["compiles", "compiled"] * 3 + ["emptied"] + ["settles", "settled"] * 3
    assert all(log[i][1] == log[i + 1][1] for i in (0, 2, 4, 7, 9, 11))


def test_whoever_waits_to_settle_ends_with_the_run():
    def check() -> None:
        raise Stopped

    with pytest.raises(Stopped):
        Turns(2, check).settle(lambda: 0)


def test_nobody_begins_to_compile_in_a_run_that_is_ending():
    def check() -> None:
        raise Stopped

    with pytest.raises(Stopped), Turns(1, check).compiling():
        pytest.fail("a turn began")


def test_no_turn_follows_that_of_a_worker_that_died():
    # It says so only after its turn, when the next one has the lock.
    turns = Turns(2, lambda: None)
    with pytest.raises(KeyError), turns.compiling():
        raise KeyError
    with pytest.raises(Stopped), turns.compiling():
        pytest.fail("a turn began")
    assert turns._num_compiled == 0
