"""R rows, T tokens of a row, A anchors, L block positions, S = L - 1; B documents, P tokens of a target batch."""

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch

from blockdraft.config import ConfigError
from blockdraft.data.anchors import position_weights
from blockdraft.data.loader import Fill, Loader, LoaderConfig
from blockdraft.data.store import Document

BLOCK_SIZE = 4


class MemoryStore(NamedTuple):
    """As much of a token store as the loader uses."""

    documents: list[Document]

    @property
    def lengths(self) -> np.ndarray:
        return np.asarray([len(one.input_ids) for one in self.documents])

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Document:
        return self.documents[index]


def store_of(lengths: list[int], seed: int = 0, prompt: int = 2) -> MemoryStore:
    """Random ids, `prompt` unsupervised tokens first."""
    draw = np.random.default_rng(seed)
    mask = [np.asarray([0] * prompt + [1] * (length - prompt), dtype=np.int8) for length in lengths]
    ids = [draw.integers(3, 90, length).astype(np.int32) for length in lengths]
    return MemoryStore([Document(*pair) for pair in zip(ids, mask, strict=True)])


def config(**changes) -> LoaderConfig:
    base = LoaderConfig(
        row_length=32,
        num_rows=2,
        num_anchors=6,
        sort_window=8,
        target_tokens=64,
        block_size=BLOCK_SIZE,
        weight_L=tuple(position_weights(BLOCK_SIZE, 2.0).tolist()),
        after_gap=False,
        seed=0,
        num_drafters=1,
        accumulation=1,
        reuse=1,
    )
    return dataclasses.replace(base, **changes)


LENGTHS = np.random.default_rng(5).integers(6, 30, 40).tolist()


def fills(first_step: int = 0, total_steps: int = 6, store: MemoryStore | None = None, **changes) -> list[Fill]:
    loader = Loader(store or store_of(LENGTHS), config(**changes))  # type: ignore[arg-type]
    return list(loader.fills(first_step, total_steps))


def same_pass(left, right) -> bool:
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(left, right, strict=True))


def passes(found: list[Fill]) -> list:
    return [one for fill in found for one in fill.passes]


def test_features_written_by_slot_index_land_at_their_tokens():
    # Case 2: the target's "feature" at t encodes token t. No shift by one between target batch, slot and row.
    trash = 2 * 32
    for fill in fills():
        slot_N = torch.full((trash + 1,), -1)
        for batch in fill.batches:
            slot_N[batch.slot_index_BP.flatten()] = batch.input_ids_BP.flatten()
        for one in fill.passes:
            used_RT = one.document_RT >= 0
            assert torch.equal(slot_N[:trash].view(2, 32)[used_RT], one.input_ids_RT[used_RT])
            assert (slot_N[:trash].view(2, 32)[~used_RT] == -1).all(), "padding wrote into a row"
            assert used_RT.sum(1).tolist() == list(fill.used_R)
            assert sum(fill.used_R) > 0


def test_each_document_reaches_the_target_whole_and_alone():
    store = store_of(LENGTHS)
    for fill in fills(store=store):
        for batch in fill.batches:
            for ids_P, index_P in zip(batch.input_ids_BP, batch.slot_index_BP, strict=True):
                length = int((index_P < 64).sum())
                assert (index_P[length:] == 64).all()
                text = ids_P[:length].tolist()
                assert not text or any(text == one.input_ids.tolist() for one in store.documents)


def test_rows_hold_whole_documents_with_positions_from_zero():
    store = store_of(LENGTHS)
    count = Loader(store, config()).counts.fills  # type: ignore[arg-type]
    seen = []
    for one in passes(fills(total_steps=count, store=store)):
        for ids_T, document_T, position_T in zip(one.input_ids_RT, one.document_RT, one.position_RT, strict=True):
            for number in document_T[document_T >= 0].unique():
                chosen = document_T == number
                text = ids_T[chosen].tolist()
                assert position_T[chosen].tolist() == list(range(len(text)))
                seen.append(next(i for i, d in enumerate(store.documents) if d.input_ids.tolist() == text))
    assert sorted(seen) == list(range(len(LENGTHS))), "an epoch reads every document once"


def test_labels_are_the_tokens_behind_the_anchor():
    for one in passes(fills()):
        row_RAS, _, slot_RAS = one.supervised_RAS.nonzero(as_tuple=True)
        anchor = one.anchor_RA[one.supervised_RAS.any(-1)]
        assert (anchor >= 0).all()
        position = one.anchor_RA[..., None].expand_as(one.label_RAS)[one.supervised_RAS] + slot_RAS + 1
        assert torch.equal(one.label_RAS[one.supervised_RAS], one.input_ids_RT[row_RAS, position])
        weight_S = torch.tensor(position_weights(BLOCK_SIZE, 2.0)[1:])
        assert torch.equal(one.weight_RAS, one.supervised_RAS * weight_S)


def test_passes_of_a_slot_share_tokens_and_draw_fresh_anchors():
    once, thrice = fills(total_steps=2), fills(total_steps=6, reuse=3)
    assert [len(fill.passes) for fill in thrice] == [3, 3]
    for single, fill in zip(once, thrice, strict=True):
        assert torch.equal(single.passes[0].anchor_RA, fill.passes[0].anchor_RA)
        assert len({tuple(one.anchor_RA.flatten().tolist()) for one in fill.passes}) == 3
        assert all(torch.equal(one.input_ids_RT, single.passes[0].input_ids_RT) for one in fill.passes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reuse": 3},
        {"reuse": 3, "accumulation": 2},
        {"reuse": 2, "accumulation": 3},
        {"accumulation": 4, "num_drafters": 2},
        {"reuse": 3, "accumulation": 4, "num_drafters": 2},
        {"keep_features": True, "reuse": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("first", [1, 3, 5])
def test_a_loader_started_later_gives_the_rest_of_the_same_stream(changes, first):
    whole = [one for one in passes(fills(0, 8, **changes)) if one.step >= first]
    later = passes(fills(first, 8, **changes))
    assert len(later) == len(whole) == (8 - first) * changes.get("accumulation", 1)
    assert all(same_pass(a, b) for a, b in zip(whole, later, strict=True))


@pytest.mark.parametrize(("accumulation", "reuse", "drafters"), [(1, 1, 1), (3, 2, 1), (4, 3, 2), (6, 1, 3)])
def test_denominators_are_the_steps_sum_of_weights_over_all_drafters(accumulation, reuse, drafters):
    found = fills(0, 5, accumulation=accumulation, reuse=reuse, num_drafters=drafters)
    assert [fill.number for fill in found] == list(range(len(found)))
    by_step = itertools.groupby(sorted(passes(found), key=lambda one: one.step), key=lambda one: one.step)
    steps = {step: list(group) for step, group in by_step}
    assert sorted(steps) == list(range(5))
    for group in steps.values():
        assert len(group) == accumulation
        total = sum(float(one.weight_RAS.sum()) for one in group)
        assert all(one.denominator == pytest.approx(total, rel=1e-6) for one in group)
    for drafter in range(drafters):
        mine = [one for fill in found if fill.number % drafters == drafter for one in fill.passes]
        assert [one.step for one in mine] == sorted(one.step for one in mine)
        assert [one.is_last for one in mine] == [
            i % (accumulation // drafters) == accumulation // drafters - 1 for i in range(len(mine))
        ]


def test_accumulation_must_be_a_multiple_of_the_drafters():
    with pytest.raises(ConfigError, match=r"optim\.accumulation \(3\) must be a multiple of .* drafters \(2\)"):
        config(accumulation=3, num_drafters=2)


def test_the_loader_runs_one_step_ahead_and_no_further():
    store = store_of(LENGTHS)
    read: list[int] = []

    class Counted(MemoryStore):
        def __getitem__(self, index: int) -> Document:
            read.append(index)
            return store.documents[index]

    loader = Loader(Counted(store.documents), config(accumulation=2))  # type: ignore[arg-type]
    read.clear()
    stream = loader.fills(0, 10)
    next(stream)
    assert 0 < len(read) <= 2 * 2 * 32 // 6


def test_documents_without_an_anchor_are_skipped_and_counted():
    # Case 5: replies of one token, and gaps everywhere.
    good, lonely = store_of([20, 25]).documents, store_of([9], prompt=8).documents[0]
    gaps = Document(np.arange(10, dtype=np.int32), np.asarray([0, 1] * 5, dtype=np.int8))
    loader = Loader(MemoryStore([good[0], lonely, gaps, good[1]]), config())  # type: ignore[arg-type]
    assert loader.counts.documents == 4
    assert loader.counts.skipped_unanchored == 2
    assert loader.documents.tolist() == [0, 3]
    with pytest.raises(ConfigError, match="the token store's 2 documents hold no two supervised tokens in a row"):
        Loader(MemoryStore([lonely, gaps]), config())  # type: ignore[arg-type]


def test_a_row_of_padding_has_no_valid_block():
    # Case 5: one document, two rows.
    one = passes(fills(store=store_of([20]), total_steps=1))[0]
    assert (one.document_RT[1] == -1).all()
    assert (one.anchor_RA[1] == -1).all()
    assert not one.supervised_RAS[1].any()
    assert (one.anchor_RA[0] >= 0).all()
    assert one.denominator == pytest.approx(float(one.weight_RAS[0].sum()))


def test_a_draft_vocabulary_renumbers_labels_and_drops_what_it_lacks():
    store = store_of(LENGTHS)
    draft_ids = np.asarray([3, 10, 11, 40, 41, 42, 60])
    plain = passes(fills(store=store))
    loader = Loader(store, config(), draft_ids)  # type: ignore[arg-type]
    restricted = passes(list(loader.fills(0, 6)))
    assert sum(int((one.label_RAS >= 0).sum()) for one in restricted) > 0
    for full, small in zip(plain, restricted, strict=True):
        known = torch.isin(full.label_RAS, torch.from_numpy(draft_ids))
        assert torch.equal(small.label_RAS >= 0, known)
        assert torch.equal(torch.from_numpy(draft_ids)[small.label_RAS[known]], full.label_RAS[known])
        # A slot outside the vocabulary is no longer weighed, but is still a slot that a draft gets wrong.
        assert torch.equal(small.supervised_RAS, full.supervised_RAS)
        assert torch.equal(small.weight_RAS, full.weight_RAS * known)


def test_kept_contents_come_back_in_every_epoch_in_another_order():
    loader = Loader(store_of(LENGTHS), config(keep_features=True))  # type: ignore[arg-type]
    count = loader.counts.fills
    found = list(loader.fills(0, 3 * count))
    epochs = [[fill.content for fill in found[i * count : (i + 1) * count]] for i in range(3)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    by_content = {fill.content: fill for fill in found[:count]}
    for fill in found[count:]:
        first = by_content[fill.content]
        assert torch.equal(fill.passes[0].input_ids_RT, first.passes[0].input_ids_RT)
        assert not torch.equal(fill.passes[0].anchor_RA, first.passes[0].anchor_RA)


@pytest.mark.parametrize(
    "changes",
    [{}, {"reuse": 3, "accumulation": 2}, {"num_drafters": 4, "accumulation": 8, "drafters_here": 2, "reuse": 2}],
)
@pytest.mark.parametrize(("first", "last"), [(0, 1), (3, 7), (1, 90)])
def test_no_more_contents_are_met_than_is_said(changes, first, last):
    loader = Loader(store_of(LENGTHS), config(keep_features=True, **changes))  # type: ignore[arg-type]
    most = loader.num_contents(first, last)
    met = {fill.content for fill in loader.fills(first, last)}
    assert len(met) <= most <= loader.counts.fills
    assert last < 90 or most == loader.counts.fills == len(met)


def test_epochs_differ_without_kept_contents():
    loader = Loader(store_of(LENGTHS), config())  # type: ignore[arg-type]
    count = loader.counts.fills
    found = list(loader.fills(0, 2 * count))
    assert all(fill.content == -1 for fill in found)
    assert [f.passes[0].input_ids_RT.tolist() for f in found[:count]] != [
        f.passes[0].input_ids_RT.tolist() for f in found[count:]
    ]


@pytest.mark.parametrize("changes", [{}, {"reuse": 3, "accumulation": 2}, {"accumulation": 2, "num_drafters": 2}])
def test_tokens_before_a_step_are_those_of_the_passes_before_it(changes):
    loader = Loader(store_of(LENGTHS), config(**changes))  # type: ignore[arg-type]
    found = list(loader.fills(0, 9))
    for first in range(9):
        expected = sum(sum(fill.used_R) for fill in found for one in fill.passes if one.step < first)
        assert loader.tokens_before(first) == expected


def test_epochs_become_steps():
    loader = Loader(store_of(LENGTHS), config(reuse=3, accumulation=2))  # type: ignore[arg-type]
    assert loader.steps_for(2.0) == round(2 * loader.counts.fills * 3 / 2)
    assert loader.steps_for(0.0001) == 1


@pytest.mark.parametrize(
    "changes", [{"keep_features": True}, {}, {"reuse": 3, "accumulation": 4}, {"num_drafters": 2, "accumulation": 6}]
)
def test_every_shape_of_a_target_batch_was_announced(changes):
    # Warm-up runs the target on these; a shape that first comes later would be tuned for in mid-run.
    loader = Loader(store_of(LENGTHS), config(**changes))  # type: ignore[arg-type]
    met = {tuple(batch.input_ids_BP.shape) for fill in loader.fills(0, 40) for batch in fill.batches}
    assert met <= set(map(tuple, loader.shapes_until(40)))


def test_a_run_without_end_is_not_planned_to_its_end(monkeypatch):
    monkeypatch.setattr("blockdraft.data.loader.MOST_PLANNED", 50)
    loader = Loader(store_of(LENGTHS), config())  # type: ignore[arg-type]
    asked = 0

    def epochs(epoch: int, plan=loader._epoch):
        nonlocal asked
        asked += 1
        # Three epochs have more than 50 fills; whoever reads on forever stops here.
        assert asked < 1000
        return plan(epoch)

    monkeypatch.setattr(loader, "_epoch", epochs)
    assert set(loader.shapes_until(10**8)) >= set(loader.shapes_until(loader.counts.fills))
