import math

import pytest

from blockdraft.decoding.acceptance import Acceptance, Round, agreement, walk_rounds


def test_every_number_follows_from_the_rounds_and_cut_rounds_stay_out():
    rounds = [Round(0, 1, False), Round(3, 4, False), Round(1, 2, False), Round(2, 2, True)]
    found = Acceptance.of(rounds, block_size=4)
    assert found.histogram == (1, 1, 0, 1)
    assert (found.rounds, found.cut_rounds) == (3, 1)
    assert found.acceptance_length == pytest.approx((1 + 4 + 2) / 3)
    assert found.per_slot == pytest.approx([2 / 3, 1 / 3, 1 / 3])


def test_pooling_weighs_rounds_not_prompts():
    many = Acceptance(histogram=(9, 0), cut_rounds=1)
    few = Acceptance(histogram=(0, 1), cut_rounds=2)
    assert Acceptance.pool([many, few]) == Acceptance(histogram=(9, 1), cut_rounds=3)
    assert Acceptance.pool([many, few]).acceptance_length == pytest.approx(1.1)
    with pytest.raises(ValueError):
        Acceptance.pool([many, Acceptance(histogram=(1, 1, 1))])


def test_no_rounds_is_no_number():
    found = Acceptance.of([Round(1, 1, True)], block_size=3)
    assert math.isnan(found.acceptance_length)
    assert found.as_dict()["acceptance_length"] is None
    assert found.as_dict()["per_slot"] is None


def walked(answer: list[int], drafts: dict[int, list[int]]) -> list[Round]:
    return walk_rounds([90, 91, *answer], 2, lambda anchor: drafts[anchor])


def test_rounds_start_at_the_first_answer_token_and_commit_the_bonus():
    drafts = {2: [11, 12, 99], 5: [14, 15, 16]}
    assert walked([10, 11, 12, 13, 14, 99, 17, 18][:5], drafts) == [Round(2, 3, False), Round(1, 1, True)]


def test_a_last_round_that_ends_with_the_bonus_token_is_whole():
    # The draft differs at the very last token, so that token is the target's own and nothing was lost.
    assert walked([10, 11, 12], {2: [11, 99, 99]}) == [Round(1, 2, False)]


def test_a_last_round_whose_draft_agrees_to_the_end_is_cut():
    assert walked([10, 11, 12], {2: [11, 12, 13]}) == [Round(2, 2, True)]


def test_an_answer_of_one_token_takes_no_round():
    assert walked([10], {}) == []


def test_agreement_ends_at_the_first_difference_or_the_shorter_end():
    assert agreement([1, 2, 3], [1, 2, 4, 3]) == 2
    assert agreement([], [1]) == 0
    assert agreement([1, 2], [1, 2, 3]) == 2
