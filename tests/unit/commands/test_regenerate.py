"""`regenerate`: answers of a tiny random target, resumed, counted, in input order."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from blockdraft.cli import main
from blockdraft.commands import answering
from blockdraft.commands.journal import Journal
from blockdraft.commands.regenerate import Options, run
from blockdraft.commands.stops import EXIT_INTERRUPTED
from blockdraft.config import ConfigError
from blockdraft.data.conversations import Conversation, write_conversations
from blockdraft.decoding.batched import _Batch
from blockdraft.decoding.engine import EngineAnswer, TransformersEngine
from blockdraft.models.target import Target
from tiny_chat import CHATML, chat, reasoned, save_tokenizer, tiny_tokenizer

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


Made = Callable[[int], None]


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

    def dies(self: TransformersEngine, conversations: Sequence[Conversation], made: Made) -> Iterator[EngineAnswer]:
        asked.append(len(conversations))
        if len(asked) == 2:
            yield next(answers(self, conversations))
            raise Interrupted
        yield from answers(self, conversations, made)

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


def command_of(made: Options) -> list[str]:
    flags = ["--max-new-tokens", "12", "--batch-size", "2", "--device", "cpu", "--dtype", "float32"]
    return ["regenerate", *made.conversations, "--target", made.target, "--output", str(made.output), *flags]


def signalling(whole: Callable[..., Any], number: int, call: int) -> Callable[..., Any]:
    """The same function; this process gets the signal before the given call of it."""
    calls: list[int] = []

    def called(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return whole(*arguments, **named)

    return called


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("holder", "name", "call", "kept"),
    [
        # While the target is loaded; in the second batch's forwards; in the write of the third answer.
        (Target, "load", 1, 0),
        (_Batch, "step", 13, 2),
        (Journal, "add", 3, 3),
    ],
)
def test_a_stop_keeps_what_is_written_and_the_same_command_goes_on(
    tmp_path: Path,
    target: str,
    number: int,
    holder: type,
    name: str,
    call: int,
    kept: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    (tmp_path / "whole").mkdir()
    run(options(tmp_path / "whole", target))
    made = options(tmp_path, target)
    before = signal.getsignal(number)
    capsys.readouterr()
    # The function itself, of a static method too.
    whole = getattr(holder, name)
    with monkeypatch.context() as patched:
        patched.setattr(holder, name, signalling(whole, number, call))
        assert main(command_of(made)) == EXIT_INTERRUPTED
    assert signal.getsignal(number) is before
    said = capsys.readouterr().out
    partial = tmp_path / "out.jsonl.partial"
    if kept:
        assert f"stopped after {kept} of 5 answers, which are kept in {partial}; the same command goes on" in said
    else:
        assert "stopped before the first answer" in said
    lines = partial.read_text().splitlines()
    assert len({json.loads(line)["row"] for line in lines[1:]}) == len(lines) - 1 == kept
    assert main(command_of(made)) == 0
    assert made.output.read_bytes() == (tmp_path / "whole" / "out.jsonl").read_bytes()


def test_a_stop_in_the_last_write_is_too_late_to_stop_anything(
    tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    made = options(tmp_path, target)
    monkeypatch.setattr(Journal, "complete", signalling(Journal.complete, signal.SIGTERM, 1))
    assert main(command_of(made)) == 0
    assert "5 answers to 5 prompts" in capsys.readouterr().out
    assert len(rows_of(made.output)) == 5


def test_tokens_are_shown_before_the_first_answer_is_there(
    tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(answering, "SHOWN_SECONDS", 0.0)
    run(options(tmp_path, target, batch_size=5))
    shown = re.findall(r" 0/5 \[[^\]]*, (\d+) tokens\]", capsys.readouterr().err)
    assert shown[:2] == ["5", "10"]


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
    monkeypatch.setattr(TransformersEngine, "answers", lambda self, conversations, tell: iter(made))
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


def test_rows_that_differ_in_their_last_answer_only_are_asked_once(
    tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]
):
    write_conversations(tmp_path / "chat.jsonl", [*ROWS, chat("last", "another"), chat("q2", "given")])
    run(options(tmp_path, target, max_drop=0.5))
    assert len(rows_of(tmp_path / "out.jsonl")) == 5
    assert "2 duplicate prompt" in capsys.readouterr().out


@pytest.mark.parametrize(("is_native", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_auto_takes_float32_where_a_cpu_emulates_bfloat16(
    tmp_path: Path, target: str, is_native: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: is_native)
    run(options(tmp_path, target, dtype="auto"))
    assert json.loads((tmp_path / "out.jsonl.summary.json").read_text())["settings"]["dtype"] == dtype


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
