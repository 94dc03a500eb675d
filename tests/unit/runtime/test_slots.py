"""R rows, T tokens of a row, D width, C captured layers."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from blockdraft.data.loader import Fill, Loader, TargetBatch
from blockdraft.runtime import pipeline, slots
from blockdraft.runtime.channel import Stopped
from blockdraft.runtime.slots import Filler, KeptFeatures, Slot
from integration.tiny import tiny_target
from unit.data.test_loader import LENGTHS, config, store_of

DEVICE = torch.device("cpu")


class CodedTarget:
    """A target whose captured feature at t encodes token t (and the column)."""

    hidden_size, layer_ids, device = 3, (1, 4), DEVICE

    def __init__(self) -> None:
        self.calls = 0

    def capture(self, input_ids_BS: Tensor, write) -> None:
        self.calls += 1
        for column in range(2):
            write(column, (input_ids_BS * 10 + column)[..., None].expand(-1, -1, 3).float())


def fills(total: int = 6, **changes) -> list[Fill]:
    return list(Loader(store_of(LENGTHS), config(**changes)).fills(0, total))  # type: ignore[arg-type]


def slot_for(width: int = 6) -> Slot:
    return Slot(2, 32, width, torch.float32, DEVICE)


def test_the_feature_at_t_belongs_to_the_token_at_t():
    # Case 2, through loader, target batches and slot; the same slot is used again and again.
    filler, slot = Filler(CodedTarget(), 2, 32), slot_for()  # type: ignore[arg-type]
    slot.buffer.fill_(float("nan"))
    for fill in fills():
        filler.fill(slot, fill)
        one = fill.passes[0]
        for column in range(2):
            found_RT = slot.features_RTC[..., column * 3]
            assert torch.equal(slot.features_RTC[..., column * 3 + 2], found_RT)
            code_RT = torch.where(one.document_RT >= 0, one.input_ids_RT * 10 + column, 0).float()
            assert torch.equal(found_RT, code_RT)
        slot.mark_drained(poison=True)
        assert torch.isnan(slot.buffer).all()


def test_a_real_targets_features_land_by_layer():
    target = tiny_target("qwen3", layer_ids=(1, 3))
    filler, slot = Filler(target, 2, 32), slot_for(64)
    (fill,) = fills(1)
    filler.fill(slot, fill)
    one = fill.passes[0]
    for row in range(2):
        for document in one.document_RT[row].unique():
            chosen = one.document_RT[row] == document
            expected = target.features(one.input_ids_RT[row][chosen][None])[0] if document >= 0 else 0.0
            found = slot.features_RTC[row][chosen]
            torch.testing.assert_close(found, torch.as_tensor(expected).expand_as(found), atol=1e-5, rtol=1e-4)


def test_padding_is_written_to_the_last_row_and_cleared():
    filler, slot = Filler(CodedTarget(), 2, 32), slot_for()  # type: ignore[arg-type]
    ids_BP = torch.full((2, 8), 7)
    index_BP = torch.full((2, 8), 64)
    index_BP[0, :3] = torch.arange(3)
    filler.fill(slot, Fill(0, -1, (TargetBatch(ids_BP, index_BP),), (3, 0), ()))
    assert (slot.buffer[:3] != 0).all()
    assert (slot.buffer[3:] == 0).all()


def test_kept_features_are_computed_once():
    target, kept = CodedTarget(), KeptFeatures()
    fillers = [Filler(target, 2, 32, kept) for _ in range(2)]  # type: ignore[arg-type]
    count = Loader(store_of(LENGTHS), config(keep_features=True)).counts.fills  # type: ignore[arg-type]
    stream = fills(3 * count, keep_features=True)
    slot, after_first_epoch = slot_for(), -1
    for number, fill in enumerate(stream):
        fillers[number % 2].fill(slot, fill)
        used_RT = fill.passes[0].document_RT >= 0
        expected_RT = torch.where(used_RT, fill.passes[0].input_ids_RT * 10, 0)
        assert torch.equal(slot.features_RTC[..., 0], expected_RT.float())
        slot.mark_drained(poison=True)
        if number == count - 1:
            after_first_epoch = target.calls
    assert target.calls == after_first_epoch > 0


def test_kept_features_may_be_asked_for_from_many_threads():
    kept, missing = KeptFeatures(), []

    def work(worker: int) -> None:
        for content in range(50):
            kept.keep(content, torch.full((2, 2), float(content)))
            found = kept.find(content)
            if found is None or not (found == content).all():
                missing.append((worker, content))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert missing == []
    assert kept.find(50) is None


def test_room_for_kept_features_is_taken_once_and_lasts(monkeypatch):
    kept, asked, like = KeptFeatures(), [], torch.zeros(2, 2)

    def empty(shape, *, dtype, pin_memory):
        asked.append(pin_memory)
        return torch.zeros(shape, dtype=dtype)

    monkeypatch.setattr(slots.torch, "empty", empty)
    kept.take(4, like)
    for content in (0, 1, 1, 2, 0, 3):
        kept.keep(content, like + content)
    assert asked == [True] * 4
    found = [kept.find(content) for content in range(4)]
    assert [float(one.mean()) for one in found if one is not None] == [0.0, 1.0, 2.0, 3.0]


def test_several_drafters_have_it_before_anybody_begins(monkeypatch):
    order: list[object] = []
    monkeypatch.setattr(pipeline, "take_page_locked", lambda *_sizes: None)
    run = pipeline.Pipeline.__new__(pipeline.Pipeline)
    run.loader = SimpleNamespace(config=None, row_budget=None, num_contents=lambda first, last: last - first)
    run.config, run._is_on_gpu, run.first_step, run.total_steps = SimpleNamespace(channel_depth=2), True, 5, 9
    run.steps, run.targets, run.slots = [None] * 2, [None] * 3, [[slot_for()]]
    run.kept = SimpleNamespace(take=lambda number, like: order.append((number, like.shape)))

    def begin(_worker):
        order.append("begins")
        raise Stopped

    run._begin = begin
    with pytest.raises(Stopped):
        run._load(None)
    assert order == [(4 + 3, (65, 6)), "begins"]


@pytest.mark.parametrize("is_poisoned", [True, False])
def test_a_drained_slot_is_poisoned_only_when_asked(is_poisoned):
    slot = slot_for()
    slot.buffer.fill_(1.0)
    slot.mark_drained(is_poisoned)
    assert bool(torch.isnan(slot.buffer).all()) is is_poisoned
    assert slot.features_RTC.shape == (2, 32, 6)
    assert slot.features_RTC.data_ptr() == slot.buffer.data_ptr()
