"""`regenerate`: answers of a tiny random target, resumed, counted, in input order."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from blockdraft.commands.journal import Journal
from blockdraft.commands.regenerate import Options, run
from blockdraft.config import ConfigError
from blockdraft.data.conversations import ChatTemplate, Conversation, write_conversations
from blockdraft.decoding import engine
from blockdraft.decoding.batched import Answer
from blockdraft.decoding.engine import EngineAnswer, Parts, Sampling, TransformersEngine, is_looping, split_reasoning
from tiny_chat import CHATML, OPENED_THINKING, chat, reasoned, save_tokenizer, tiny_tokenizer

ROWS = [
    chat("first question, a long one", "old answer"),
    chat("q2"),
    chat("q3", "a3", "q4", "old"),
    chat("q5", "a5", "a follow-up"),
    chat("last", "old"),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("target")
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
        eos_token_id=tiny_tokenizer(CHATML).convert_tokens_to_ids("<|im_end|>"),
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        # Printable ASCII and the end-of-turn token only, so that answers are text.
        printable = [*range(94), 257]
        scale_V = torch.zeros(264)
        scale_V[printable] = 1.0
        model.lm_head.weight.mul_(scale_V[:, None])
    model.save_pretrained(path)
    return save_tokenizer(path, CHATML)


def options(tmp_path: Path, target: str, **changes: Any) -> Options:
    path = tmp_path / "chat.jsonl"
    if not path.exists():
        write_conversations(path, ROWS)
    values = {"max_new_tokens": 12, "batch_size": 2, "device": "cpu", "dtype": "float32"} | changes
    return Options(conversations=(str(path),), target=target, output=tmp_path / "out.jsonl", **values)


def rows_of(path: Path) -> list[list[dict[str, Any]]]:
    return [json.loads(line)["messages"] for line in path.read_text().splitlines()]


def test_the_final_answer_is_replaced_in_input_order(tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]):
    assert run(options(tmp_path, target)) == 0
    rows = rows_of(tmp_path / "out.jsonl")
    assert len(rows) == 5
    for messages, row in zip(rows, ROWS, strict=True):
        kept = row.messages if row.messages[-1]["role"] == "user" else row.messages[:-1]
        assert messages[:-1] == kept
        assert messages[-1]["role"] == "assistant"
        assert messages[-1]["content"] not in ("", "old", "old answer")
        assert messages[-1]["finish"] in ("stop", "length")
    summary = json.loads((tmp_path / "out.jsonl.summary.json").read_text())
    lengths = [messages[-1]["finish"] for messages in rows]
    assert summary["counts"]["cut by the token limit"] == lengths.count("length") > 0
    assert f"{lengths.count('length')} cut by the token limit" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["chat.jsonl", "out.jsonl", "out.jsonl.summary.json"]


def test_a_finished_output_is_left_alone_and_other_settings_are_refused(
    tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]
):
    run(options(tmp_path, target))
    before = (tmp_path / "out.jsonl").read_bytes()
    capsys.readouterr()
    assert run(options(tmp_path, target, batch_size=4)) == 0
    assert "complete already" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="expected max_new_tokens 13, found 12"):
        run(options(tmp_path, target, max_new_tokens=13))
    assert (tmp_path / "out.jsonl").read_bytes() == before
    (tmp_path / "out.jsonl.summary.json").unlink()
    with pytest.raises(ConfigError, match="found one without a readable out"):
        run(options(tmp_path, target))


class Interrupted(RuntimeError):
    """Stands for a kill."""


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_second_run_goes_on_where_the_first_stopped(
    tmp_path: Path,
    target: str,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    (tmp_path / "whole").mkdir()
    run(options(tmp_path / "whole", target, temperature=temperature))
    expected = (tmp_path / "whole" / "out.jsonl").read_bytes()

    answers = TransformersEngine.answers
    asked: list[int] = []

    def dies(self: TransformersEngine, conversations: Sequence[Conversation]) -> Iterator[EngineAnswer]:
        asked.append(len(conversations))
        if len(asked) == 2:
            yield next(answers(self, conversations))
            raise Interrupted
        yield from answers(self, conversations)

    monkeypatch.setattr(TransformersEngine, "answers", dies)
    with pytest.raises(Interrupted):
        run(options(tmp_path, target, temperature=temperature))
    partial = tmp_path / "out.jsonl.partial"
    assert len(partial.read_text().splitlines()) == 1 + 3
    with partial.open("a") as file:
        file.write('{"row": 4, "cont')
    capsys.readouterr()
    assert run(options(tmp_path, target, temperature=temperature)) == 0
    printed = capsys.readouterr().out
    assert "was half-written; cut" in printed
    assert "going on after 3 answers" in printed
    # The broken chunk again, then the last one; the first is not asked for any more.
    assert asked == [2, 2, 2, 1]
    assert (tmp_path / "out.jsonl").read_bytes() == expected


def test_a_partial_file_of_other_settings_or_contents_is_refused(tmp_path: Path, target: str):
    run(options(tmp_path, target))
    settings = json.loads((tmp_path / "out.jsonl.summary.json").read_text())["settings"]
    output = tmp_path / "other.jsonl"
    partial = tmp_path / "other.jsonl.partial"
    partial.write_text(json.dumps({"settings": settings}) + "\n{}\n")
    with pytest.raises(ConfigError, match="expected dtype 'x', found 'float32'"), Journal(output, {"dtype": "x"}):
        pass
    partial.write_text(json.dumps({"settings": settings}) + "\n{}\n")
    with pytest.raises(ConfigError, match=r"partial, line 2: expected an answer"), Journal(output, settings):
        pass


def test_settings_without_an_answer_bind_nobody(tmp_path: Path):
    (tmp_path / "o.jsonl.partial").write_text('{"settings": {"temperature": -1.0}}\n')
    with Journal(tmp_path / "o.jsonl", {"temperature": 0.0}) as journal:
        assert journal.done == {}
    assert (tmp_path / "o.jsonl.partial").read_text() == '{"settings": {"temperature": 0.0}}\n'


def test_two_commands_do_not_write_the_same_output(tmp_path: Path):
    with Journal(tmp_path / "o.jsonl", {"a": 1}):
        with (
            pytest.raises(ConfigError, match=r"o\.jsonl\.partial: another command is writing there"),
            Journal(tmp_path / "o.jsonl", {"a": 1}),
        ):
            pass
        assert (tmp_path / "o.jsonl.partial").read_text() == '{"settings": {"a": 1}}\n'
    with Journal(tmp_path / "o.jsonl", {"a": 1}):
        pass


def test_only_the_settings_line_half_written(tmp_path: Path):
    (tmp_path / "o.jsonl.partial").write_text('{"sett')
    with Journal(tmp_path / "o.jsonl", {"a": 1}) as journal:
        assert "half-written" in journal.message
    assert (tmp_path / "o.jsonl.partial").read_text() == '{"settings": {"a": 1}}\n'


def test_truncated_looping_and_unusable_answers(
    tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    made = [
        EngineAnswer(0, "good", "why", "stop", False, False, 2),
        EngineAnswer(1, "cut", "", "length", False, False, 12),
        EngineAnswer(2, "ha ha", "", "stop", True, False, 12),
        EngineAnswer(3, "", "endless", "length", False, True, 12),
        EngineAnswer(4, " ", "", "stop", False, False, 1),
    ]
    monkeypatch.setattr(TransformersEngine, "answers", lambda self, conversations: iter(made))
    # One chunk; the longest prompts come first, so answer n belongs to the n-th longest.
    run(options(tmp_path, target, batch_size=5))
    contents = [messages[-1]["content"] for messages in rows_of(tmp_path / "out.jsonl")]
    assert sorted(contents) == ["cut", "good", "ha ha"]
    reasonings = [messages[-1].get("reasoning_content") for messages in rows_of(tmp_path / "out.jsonl")]
    assert reasonings.count("why") == 1
    printed = capsys.readouterr().out
    for line in ("1 cut inside their reasoning", "1 empty", "2 cut by the token limit", "1 looping"):
        assert line in printed
    (tmp_path / "strict").mkdir()
    run(options(tmp_path / "strict", target, batch_size=5, drop_truncated=True, drop_looping=True))
    (messages,) = rows_of(tmp_path / "strict" / "out.jsonl")
    assert messages[-1]["content"] == "good"


def test_prompts_that_are_too_long_are_counted(tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ConfigError, match="over-long"):
        run(options(tmp_path, target, max_prompt_tokens=30))
    run(options(tmp_path, target, max_prompt_tokens=30, max_drop=0.9))
    assert "over-long" in capsys.readouterr().out


class NoTarget:
    """A target that nobody asks."""

    @property
    def model(self) -> PreTrainedModel:
        raise AssertionError

    @property
    def device(self) -> torch.device:
        raise AssertionError


def test_rows_that_differ_in_their_last_answer_only_are_asked_once(
    tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]
):
    write_conversations(tmp_path / "chat.jsonl", [*ROWS, chat("last", "another"), chat("q2", "given")])
    run(options(tmp_path, target, max_drop=0.5))
    assert len(rows_of(tmp_path / "out.jsonl")) == 5
    assert "2 duplicate prompt" in capsys.readouterr().out


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


@pytest.mark.parametrize(("is_native", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_auto_takes_float32_where_a_cpu_emulates_bfloat16(
    tmp_path: Path, target: str, is_native: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: is_native)
    run(options(tmp_path, target, dtype="auto"))
    assert json.loads((tmp_path / "out.jsonl.summary.json").read_text())["settings"]["dtype"] == dtype


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


def test_options_out_of_range(tmp_path: Path, target: str):
    with pytest.raises(ConfigError, match="found both"):
        run(options(tmp_path, target, thinking=True, no_thinking=True))
    with pytest.raises(ConfigError, match="expected at least 1, found 0 and 12"):
        run(options(tmp_path, target, batch_size=0))
    for flag, value in (
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("max_prompt_tokens", 0),
        ("max_drop", 5.0),
    ):
        with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')}: expected .*, found {value}"):
            run(options(tmp_path, target, **{flag: value}))
    assert not list(tmp_path.glob("out.jsonl*"))
    write_conversations(tmp_path / "chat.jsonl", [chat("q", reasoned("a", "r"))])
    with pytest.raises(ConfigError, match="expected at least one file"):
        run(Options(conversations=(), target=target, output=tmp_path / "o"))
