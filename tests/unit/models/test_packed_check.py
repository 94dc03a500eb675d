"""A capture does not ask its device whether rows are packed; whatever else runs still does."""

import threading

import pytest
import torch
import transformers.masking_utils

from blockdraft.models.packed_check import NAME, one_document_a_row, skip_packed_check
from integration.tiny import TARGETS, tiny_target

PACKED_BS = torch.tensor([[0, 1, 2, 0, 1]])


def find(position_BS):
    return vars(transformers.masking_utils)[NAME](position_BS)


@pytest.fixture
def asked(monkeypatch):
    """Counts how often transformers' own check runs."""
    original, calls = vars(transformers.masking_utils)[NAME], []

    def count(position_BS):
        calls.append(1)
        return original(position_BS)

    monkeypatch.setattr(transformers.masking_utils, NAME, count)
    skip_packed_check()
    return calls


@pytest.mark.parametrize("name", TARGETS)
def test_a_capture_asks_nothing_and_computes_the_same(name, asked):
    target, ids_BS = tiny_target(name), torch.randint(3, 90, (2, 12))
    asked.clear()
    found = target.features(ids_BS)
    assert asked == []
    captured = []
    handles = [
        target.layers[i].register_forward_hook(lambda _m, _i, out: captured.append(out)) for i in target.layer_ids
    ]
    target.model(input_ids=ids_BS, use_cache=False)
    for handle in handles:
        handle.remove()
    assert len(asked) > 0
    columns = [out if isinstance(out, torch.Tensor) else out[0] for out in captured]
    assert torch.equal(found, torch.cat(columns, dim=-1))


def test_the_answer_is_known_only_inside_and_only_in_this_thread(asked):
    seen = []
    with one_document_a_row():
        assert find(PACKED_BS) is None
        thread = threading.Thread(target=lambda: seen.append(find(PACKED_BS)))
        thread.start()
        thread.join()
    assert seen[0].tolist() == find(PACKED_BS).tolist() == [[0, 0, 0, 1, 1]]
    assert len(asked) == 2


def test_it_is_put_in_once(asked):
    standing = vars(transformers.masking_utils)[NAME]
    skip_packed_check()
    assert vars(transformers.masking_utils)[NAME] is standing
