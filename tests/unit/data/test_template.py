"""Ids and loss masks by chat templates: cases 16, 17 and 18 among them."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from blockdraft.config import ConfigError
from blockdraft.data.template import (
    Conversation,
    Encoded,
    RowRefused,
    encode,
    render_prompt,
    template_hash,
    tokenizer_hash,
)
from tiny_chat import (
    CHATML,
    OPENED_THINKING,
    PLAIN,
    REFUSING,
    THINKING,
    UNSTABLE,
    UNSTABLE_END,
    chat,
    reasoned,
    tiny_tokenizer,
)


def supervised(encoded: Encoded, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The text of each run of mask 1."""
    runs: list[list[int]] = []
    before = 0
    for token, mask in zip(encoded.input_ids, encoded.loss_mask, strict=True):
        if mask and not before:
            runs.append([])
        if mask:
            runs[-1].append(token)
        before = mask
    return [tokenizer.decode(run) for run in runs]


def whole_ids(conversation: Conversation, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    text = tokenizer.apply_chat_template(conversation.messages, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_every_answer_with_its_end_of_turn_token_and_nothing_else():
    tokenizer = tiny_tokenizer(CHATML)
    conversation = chat("hi", "hello you", "bye", "so long \n")
    encoded = encode(conversation, tokenizer, reasoning=True)
    assert supervised(encoded, tokenizer) == ["hello you<|im_end|>", "so long \n<|im_end|>"]
    assert encoded.input_ids == whole_ids(conversation, tokenizer)


def test_turns_behind_the_last_answer_are_left_out():
    tokenizer = tiny_tokenizer(CHATML)
    assert encode(chat("a", "b", "c"), tokenizer).input_ids == whole_ids(chat("a", "b"), tokenizer)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(alphabet="ab \n<>éß漢🙂", min_size=1, max_size=8), min_size=2, max_size=6))
def test_answers_of_any_text_come_back_whole(texts: list[str]):
    # A line break that the prompt's own absorbs into one token is no token of the answer (the test below).
    assume(not any(text.startswith("\n") for text in texts[1::2]))
    tokenizer = tiny_tokenizer(CHATML, words=("ab", "ĠĠ", "ĊĊ"))
    conversation = chat(*texts)
    encoded = encode(conversation, tokenizer)
    assert supervised(encoded, tokenizer) == [text + "<|im_end|>" for text in texts[1::2]]


def test_a_token_that_begins_in_the_prompt_is_not_supervised():
    tokenizer = tiny_tokenizer(CHATML, words=("ab", "ĠĠ", "ĊĊ"))
    encoded = encode(chat("a", "\n"), tokenizer)
    assert supervised(encoded, tokenizer) == ["<|im_end|>"]


def test_an_empty_think_block_is_supplied_by_the_generation_prompt():
    tokenizer = tiny_tokenizer(THINKING)
    encoded = encode(chat("hi", "hello"), tokenizer)
    assert "<think>\n\n</think>\n\nhello" in tokenizer.decode(encoded.input_ids)
    assert supervised(encoded, tokenizer) == ["hello<|im_end|>"]


def test_real_reasoning_is_supervised():
    tokenizer = tiny_tokenizer(THINKING)
    encoded = encode(chat("hi", reasoned("hello", "be nice")), tokenizer)
    assert supervised(encoded, tokenizer) == ["<think>\nbe nice\n</think>\n\nhello<|im_end|>"]
    assert encoded.unrendered_reasoning == 0


def test_a_think_token_that_the_prompt_opens_is_not_supervised():
    tokenizer = tiny_tokenizer(OPENED_THINKING)
    encoded = encode(chat("hi", reasoned("hello", "be nice")), tokenizer)
    assert supervised(encoded, tokenizer) == ["be nice\n</think>\n\nhello<|im_end|>"]
    assert supervised(encode(chat("hi", "hello"), tokenizer), tokenizer) == ["hello<|im_end|>"]


@pytest.mark.parametrize("template", [THINKING, OPENED_THINKING])
def test_reasoning_can_be_left_out(template: str):
    tokenizer = tiny_tokenizer(template)
    bare = encode(chat("hi", "hello"), tokenizer)
    assert encode(chat("hi", reasoned("hello", "be nice")), tokenizer, reasoning=False) == bare
    assert encode(chat("hi", "<think>\nbe nice\n</think>\n\nhello"), tokenizer, reasoning=False) == bare


def test_three_turns_with_reasoning_are_trained_as_rendered():
    tokenizer = tiny_tokenizer(THINKING)
    conversation = chat("q1", reasoned("a1", "r1"), "q2", reasoned("a2", "r2"), "q3", reasoned("a3", "r3"))
    encoded = encode(conversation, tokenizer)
    assert encoded.input_ids == whole_ids(conversation, tokenizer)
    assert supervised(encoded, tokenizer) == [
        "a1<|im_end|>",
        "a2<|im_end|>",
        "<think>\nr3\n</think>\n\na3<|im_end|>",
    ]
    assert encoded.unrendered_reasoning == 2


@pytest.mark.parametrize("template", [THINKING, OPENED_THINKING])
@pytest.mark.parametrize("reasoning", ["", "r"])
def test_a_chain_of_tool_calls_whose_reasoning_is_dropped_later(template: str, reasoning: str):
    tokenizer = tiny_tokenizer(template)
    messages = [
        {"role": "user", "content": "q1"},
        reasoned("call", reasoning),
        {"role": "tool", "content": "result"},
        reasoned("a1", reasoning),
        {"role": "user", "content": "q2"},
        reasoned("a2", reasoning),
    ]
    encoded = encode(Conversation(messages, None, "f:1"), tokenizer)
    found = supervised(encoded, tokenizer)
    assert found[:2] == ["call<|im_end|>", "a1<|im_end|>"]
    assert found[2].endswith("a2<|im_end|>")
    within = encode(Conversation(messages[:4], None, "f:1"), tokenizer)
    expected = {
        (THINKING, ""): ["call<|im_end|>", "a1<|im_end|>"],
        (THINKING, "r"): ["<think>\nr\n</think>\n\ncall<|im_end|>", "<think>\nr\n</think>\n\na1<|im_end|>"],
        (OPENED_THINKING, ""): ["call<|im_end|>", "a1<|im_end|>"],
        (OPENED_THINKING, "r"): ["r\n</think>\n\ncall<|im_end|>", "r\n</think>\n\na1<|im_end|>"],
    }
    assert supervised(within, tokenizer) == expected[template, reasoning]


@pytest.mark.parametrize(("template", "turn"), [(UNSTABLE, 1), (UNSTABLE_END, 1)])
def test_a_template_without_a_stable_prefix_is_an_error_that_names_template_and_turn(template: str, turn: int):
    with pytest.raises(ConfigError, match=rf"chat\.jsonl:1: the chat template of tiny .* assistant turn {turn} "):
        encode(chat("a", "b", "c", "d"), tiny_tokenizer(template))


def test_a_later_turn_that_breaks_the_prefix_is_the_one_named():
    # From the third message on, the system line changes.
    template = "{% if messages | length > 2 %}long{% else %}chat{% endif %}" + CHATML
    encode(chat("a", "b"), tiny_tokenizer(template))
    with pytest.raises(ConfigError, match="assistant turn 1 "):
        encode(chat("a", "b", "c", "d"), tiny_tokenizer(template))
    template = CHATML.replace("{{ m.content }}", "{{ m.content }}{% if loop.revindex == 4 %}!{% endif %}")
    with pytest.raises(ConfigError, match="assistant turn 2 "):
        encode(chat("a", "b", "c", "d", "e", "f"), tiny_tokenizer(template))


def test_a_turn_without_an_end_token_ends_at_its_last_visible_character():
    tokenizer = tiny_tokenizer(PLAIN)
    assert supervised(encode(chat("a", "b c", "d", "e"), tokenizer), tokenizer) == [" b c", " e"]


def test_an_answer_cut_by_a_limit_has_no_end_of_turn_to_learn():
    tokenizer = tiny_tokenizer(CHATML)
    conversation = chat("hi", {"role": "assistant", "content": "hello", "finish": "length"})
    assert supervised(encode(conversation, tokenizer), tokenizer) == ["hello"]


def test_a_conversation_the_template_refuses_is_that_rows_fault():
    tokenizer = tiny_tokenizer(REFUSING)
    messages = [{"role": "system", "content": "s"}, *chat("a", "b").messages]
    with pytest.raises(RowRefused, match="no system turn"):
        encode(Conversation(messages, None, "f:1"), tokenizer)


def test_a_tokenizer_without_template_is_an_error():
    with pytest.raises(ConfigError, match="expected a tokenizer with a chat template"):
        encode(chat("a", "b"), tiny_tokenizer(""))


def test_a_slow_tokenizer_gives_the_same(monkeypatch: pytest.MonkeyPatch):
    fast = tiny_tokenizer(THINKING)
    conversation = chat("q1", "a 1 é", "q2", reasoned("a2\n", "r2"))
    expected = encode(conversation, fast)
    monkeypatch.setattr(type(fast), "is_fast", property(lambda self: False))
    assert encode(conversation, fast) == expected


def test_a_slow_tokenizer_whose_tokens_cross_a_turn_is_an_error(monkeypatch: pytest.MonkeyPatch):
    fast = tiny_tokenizer(PLAIN.replace("A: {{", "A{{").replace("A:", "A"), words=("Ab",))
    # Fast: the token that begins in the prompt is not supervised.
    assert supervised(encode(chat("a", "bc"), fast), fast) == ["c"]
    monkeypatch.setattr(type(fast), "is_fast", property(lambda self: False))
    with pytest.raises(ConfigError, match="no character offsets"):
        encode(chat("a", "bc"), fast)


def test_a_prompt_ends_with_the_last_user_turn_and_the_generation_prompt():
    tokenizer = tiny_tokenizer(THINKING)
    conversation = chat("q1", reasoned("a1", "r1"), "q2", reasoned("a2", "r2"))
    start = "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n<|im_start|>user\nq2<|im_end|>\n"
    header = "<|im_start|>assistant\n"
    assert tokenizer.decode(render_prompt(conversation, tokenizer, thinking=None)) == start + header
    empty = header + "<think>\n\n</think>\n\n"
    assert tokenizer.decode(render_prompt(conversation, tokenizer, thinking=False)) == start + empty


def test_hashes_tell_templates_and_tokenizers_apart():
    one, other = tiny_tokenizer(CHATML), tiny_tokenizer(THINKING, words=("ab",))
    assert template_hash(one) != template_hash(other)
    assert tokenizer_hash(one) != tokenizer_hash(other)
    before = tokenizer_hash(one)
    one(["a", "bc"], padding=True, truncation=True, max_length=2)
    assert tokenizer_hash(one) == before == tokenizer_hash(tiny_tokenizer(CHATML))
