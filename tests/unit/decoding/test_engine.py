"""What an engine makes of decoded tokens: reasoning, looping answers, characters that are cut."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from blockdraft.data.conversations import ChatTemplate
from blockdraft.decoding import engine
from blockdraft.decoding.batched import Answer
from blockdraft.decoding.engine import EngineAnswer, Parts, Sampling, TransformersEngine, is_looping, split_reasoning
from tiny_chat import CHATML, OPENED_THINKING, chat, tiny_tokenizer


class NoTarget:
    """A target that nobody asks."""

    @property
    def model(self) -> PreTrainedModel:
        raise AssertionError

    @property
    def device(self) -> torch.device:
        raise AssertionError


def test_reasoning_that_the_prompt_opened_is_split_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tokenizer = tiny_tokenizer(OPENED_THINKING)
    written = tokenizer("why\n</think>\n\nanswer<|im_end|>", add_special_tokens=False)["input_ids"]

    def decode(*_args: object, **_options: object) -> list[Answer]:
        return [Answer(written, "stop")]

    monkeypatch.setattr(engine, "generate_batch", decode)
    sampling = Sampling(max_new_tokens=9, batch_size=1)
    made = TransformersEngine(NoTarget(), ChatTemplate(tokenizer), [], sampling)
    (answer,) = made.answers([chat("q")])
    assert answer == EngineAnswer(0, "answer", "why", "stop", False, False, len(written))


@pytest.mark.parametrize(
    ("text", "is_open", "parts"),
    [
        ("plain", False, Parts("", "plain", False)),
        ("<think>\nr\n</think>\n\na", False, Parts("r", "a", False)),
        ("\n<think>r</think>a", False, Parts("r", "a", False)),
        ("r\n</think>\n\na", True, Parts("r", "a", False)),
        ("<think>\nr", False, Parts("r", "", True)),
        ("r", True, Parts("r", "", True)),
        ("say <think> as a word", False, Parts("", "say <think> as a word", False)),
        ("a </think> b", False, Parts("", "a </think> b", False)),
    ],
)
def test_split_reasoning(text: str, is_open: bool, parts: Parts):
    assert split_reasoning(text, is_open=is_open) == parts


@pytest.mark.parametrize(("finish", "content"), [("length", "caf"), ("stop", "caf\ufffd")])
def test_an_answer_cut_inside_a_character_ends_before_it(monkeypatch: pytest.MonkeyPatch, finish: Any, content: str):
    tokenizer = tiny_tokenizer(CHATML)
    # One token a byte, and the second byte of the last character is missing.
    ids = list(tokenizer("café", add_special_tokens=False)["input_ids"])[:-1]
    made = [Answer(ids + [2] * (finish == "stop"), finish)]
    monkeypatch.setattr(engine, "generate_batch", lambda *_arguments, **_options: made)
    answers = TransformersEngine(None, ChatTemplate(tokenizer), (2,), Sampling(max_new_tokens=4, batch_size=1))  # type: ignore[arg-type]
    (found,) = answers.answers([chat("q")])
    assert (found.content, found.num_tokens) == (content, len(made[0].token_ids))


def test_looping():
    assert is_looping([9, 8] + [1] * 24)
    assert not is_looping([9, 8] + [1] * 23)
    assert is_looping([5, *[1, 2, 3, 4, 5, 6] * 4])
    assert not is_looping([1, 2, 3, 4, 5, 6] * 3)
    assert is_looping(list(range(64)) * 4)
    assert not is_looping(list(range(65)) * 4)
    assert not is_looping([*[1, 2] * 20, 3])
    assert not is_looping([])
