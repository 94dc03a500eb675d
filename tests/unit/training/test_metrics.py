"""R rows, A anchors, S supervised slots of a block."""

import pytest
import torch

from blockdraft.training.metrics import accepted_tokens, add_sums, report, slot_sums, unflatten_sums, zero_sums

CPU = torch.device("cpu")


def flags(*blocks: str) -> torch.Tensor:
    return torch.tensor([[[c == "1" for c in block] for block in blocks]])


@pytest.mark.parametrize(
    ("correct", "supervised", "accepted"),
    [
        ("1111", "1111", 4),
        ("1101", "1111", 2),
        ("0111", "1111", 0),
        # What is not scored neither breaks nor extends the run.
        ("1001", "1001", 2),
        ("1011", "1011", 3),
        ("1111", "1100", 2),
        ("0000", "0000", 0),
    ],
)
def test_accepted_tokens_are_the_leading_run(correct, supervised, accepted):
    assert accepted_tokens(flags(correct), flags(supervised)).tolist() == [[accepted]]


def test_acceptance_length_is_pooled_over_blocks_with_a_first_slot():
    correct, supervised = flags("110", "111", "011"), flags("111", "110", "011")
    found = report(slot_sums(torch.tensor(1.5), correct, supervised))
    # Blocks 0 and 1 count (2 accepted each), block 2 has no slot 1.
    assert found.blocks == 2
    assert found.acceptance_length == pytest.approx(1 + (2 + 2) / 2)
    assert found.accuracy_per_slot == pytest.approx([2 / 2, 3 / 3, 1 / 2])
    assert found.accuracy == pytest.approx(6 / 7)
    assert found.loss == 1.5


def test_sums_of_micro_batches_equal_those_of_one():
    correct, supervised = flags("110", "111", "011"), flags("111", "110", "011")
    whole = slot_sums(torch.tensor(3.0), correct, supervised)
    parts = zero_sums(3, CPU)
    for i in range(3):
        parts = add_sums(parts, slot_sums(torch.tensor(1.0), correct[:, i : i + 1], supervised[:, i : i + 1]))
    assert report(parts) == report(whole)
    flat = torch.cat([part.reshape(-1) for part in whole])
    assert report(unflatten_sums(flat, 3)) == report(whole)


def test_a_step_without_blocks_reports_plain_numbers():
    found = report(zero_sums(3, CPU))
    assert (found.loss, found.acceptance_length, found.accuracy, found.blocks) == (0.0, 1.0, 0.0, 0)
    assert found.accuracy_per_slot == [0.0, 0.0, 0.0]
