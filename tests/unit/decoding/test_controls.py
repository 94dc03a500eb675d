from blockdraft.decoding.controls import NgramTable, control_acceptance, prompt_lookup


def table_of(*documents: list[int], order: int = 3) -> NgramTable:
    table = NgramTable(order)
    for document in documents:
        table.add(document, [1] * len(document))
    return table


def test_the_longest_known_context_decides():
    table = table_of([1, 2, 3], [4, 2, 5], [4, 2, 5], [2, 6], [2, 6], [2, 6])
    assert table.draft([1, 2], 1) == [3]
    assert table.draft([4, 2], 1) == [5]
    # (9, 2) was never seen: 6 follows 2 most often.
    assert table.draft([9, 2], 1) == [6]


def test_unknown_tokens_back_off_to_the_most_frequent_token_and_ties_to_the_lowest_id():
    assert table_of([7, 7, 8]).draft([50], 1) == [7]
    assert table_of([1, 9], [1, 3]).draft([1], 1) == [3]


def test_drafts_go_on_from_drafts():
    table = table_of([1, 2, 3, 4, 5])
    assert table.draft([1], 4) == [2, 3, 4, 5]
    assert table_of([1, 2, 3, 4, 5], order=1).draft([3], 2) == [1, 1]


def test_only_supervised_tokens_are_counted_but_the_prompt_is_their_context():
    table = NgramTable(3)
    table.add([1, 2, 3, 4], [0, 0, 1, 1])
    assert table.num_tokens == 2
    assert table.draft([1, 2], 2) == [3, 4]
    assert table.draft([1], 1) != [2]


def test_a_table_can_grow_after_it_was_asked():
    table = table_of([1, 2])
    assert table.draft([1], 1) == [2]
    table.add([1, 3, 1, 3], [1, 1, 1, 1])
    assert table.draft([1], 1) == [3]


def test_an_empty_table_drafts_nothing():
    assert NgramTable(5).draft([1, 2], 3) == []


def test_lookup_copies_what_followed_the_longest_match():
    #       (1, 2) -> 3 ..., the later but shorter match (2) -> 9
    text = [1, 2, 3, 4, 5, 7, 2, 9, 1, 2]
    assert prompt_lookup(text, 3) == [3, 4, 5]


def test_lookup_prefers_the_latest_of_equal_matches():
    assert prompt_lookup([5, 1, 6, 5, 2, 7, 5], 1) == [2]


def test_lookup_continues_a_loop_past_the_end_of_the_text():
    assert prompt_lookup([8, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


def test_lookup_has_nothing_to_say_about_new_tokens():
    assert prompt_lookup([1, 2, 3], 4) == []
    assert prompt_lookup([1], 4) == []


def test_controls_are_walked_over_the_answer_like_a_drafter():
    texts = [([1, 2, 3, 1, 2, 3, 1, 2, 3, 4], 3)]
    found = control_acceptance(texts, 4, prompt_lookup)
    # Anchors: 3 accepts [2, 3, 1] + bonus 2; 7 accepts 3, then expects 1 and finds 4.
    assert found.histogram == (0, 1, 0, 1)
    assert found.cut_rounds == 0


def test_a_control_sees_nothing_behind_its_anchor():
    seen: list[list[int]] = []

    def record(text, num_drafts):
        seen.append(list(text))
        return [0] * num_drafts

    control_acceptance([([9, 1, 2, 3], 1)], 4, record)
    assert seen == [[9, 1], [9, 1, 2]]
