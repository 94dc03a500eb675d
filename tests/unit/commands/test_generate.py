import pytest

from blockdraft.api import Reply, render
from blockdraft.commands.generate import ACCEPTED, RESET, Printer, TextStream, closing_line
from blockdraft.config import ConfigError
from blockdraft.decoding.acceptance import Acceptance, Round
from blockdraft.decoding.speculative import Generation
from tiny_chat import CHATML, tiny_tokenizer

TEXT = "naïve → 日本 🎉 end"


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(CHATML)


def test_no_piece_ends_inside_a_character_and_nothing_is_lost(tokenizer):
    ids = tokenizer(TEXT)["input_ids"]
    assert len(ids) > len(TEXT), "every token a character: nothing to hold back"
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "🎉" in pieces
    assert "".join(pieces) + stream.flush() == TEXT


def test_bytes_that_never_become_a_character_come_at_the_end(tokenizer):
    ids = tokenizer("ab🎉")["input_ids"]
    stream = TextStream(tokenizer)
    assert "".join(map(stream.push, ids[:-1])) == "ab"
    assert stream.flush() == "\ufffd"


def test_special_tokens_are_not_shown(tokenizer):
    stream = TextStream(tokenizer)
    ids = [*tokenizer("ok")["input_ids"], tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert "".join(map(stream.push, ids)) + stream.flush() == "ok"


@pytest.mark.parametrize("use_color", [True, False])
def test_accepted_tokens_are_coloured_and_the_targets_own_are_not(tokenizer, use_color):
    written: list[str] = []
    printer = Printer(TextStream(tokenizer), written.append, use_color=use_color)
    printer(tokenizer("a")["input_ids"], 0)
    printer(tokenizer("bcd")["input_ids"], 2)
    colored = f"a{ACCEPTED}b{RESET}{ACCEPTED}c{RESET}d"
    assert "".join(written) == (colored if use_color else "abcd")


def test_the_closing_line_says_what_was_counted():
    rounds = [Round(3, 4, False), Round(1, 2, False), Round(2, 2, True)]
    generation = Generation(list(range(9)), rounds, 0.5, 2.0, "stop")
    reply = Reply("", generation, Acceptance.of(rounds, 8))
    expected = "accept 3.00 | rounds 2 + 1 cut | tokens 9 | 4.0 tok/s | end: stop"
    assert closing_line(reply, use_color=False) == expected
    nothing = Reply("", Generation([5], [], 0.1, 0.0, "length"), Acceptance.of([], 8))
    assert closing_line(nothing, use_color=False) == "accept - | rounds 0 | tokens 1 | 0.0 tok/s | end: length"


def test_without_a_chat_template_there_is_nobody_to_ask_for_a_mode_of_thinking():
    bare = tiny_tokenizer(CHATML)
    bare.chat_template = None
    assert render(bare, "ok", None) == bare("ok")["input_ids"]
    for mode in (True, False):
        with pytest.raises(ConfigError, match="a mode of thinking is asked of a chat template, found none"):
            render(bare, "ok", mode)
