"""`evaluate`, `generate` and `export` as a user runs them, on a tiny target with a tokenizer of its own."""

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import blockdraft
from blockdraft import cli
from blockdraft.commands import evaluate
from blockdraft.data.conversations import ChatTemplate, write_conversations
from blockdraft.data.store import ManifestInfo, write_store
from blockdraft.data.template import template_hash, tokenizer_hash
from blockdraft.decoding import speculative
from blockdraft.models.formats import load_export, save_export
from blockdraft.models.target import Target, choose_dtype
from integration.tiny import tiny_drafter
from tiny_chat import CHATML, chat, tiny_tokenizer

NUM_PROMPTS = 3


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """target/, export/, prompts.jsonl and store/."""
    root = tmp_path_factory.mktemp("decoding")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=5,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(root / "target")
    tokenizer = tiny_tokenizer(CHATML)
    tokenizer.save_pretrained(root / "target")
    save_export(tiny_drafter(Target(model, None, 2), 4), root / "export", torch.float32)
    talks = [chat("Say ab."), chat("Count."), chat("x" * 250), chat("Go on."), chat("Never read.")]
    write_conversations(root / "prompts.jsonl", talks)
    template = ChatTemplate(tokenizer)
    answers = [template.encode(chat("Say ab.", "ab ab ab"))]
    info = ManifestInfo(tokenizer_hash=tokenizer_hash(tokenizer), template_hash=template_hash(tokenizer))
    write_store(root / "store", answers, info)
    return root


def evaluated(files: Path, *flags: str) -> dict:
    output = files / "result.json"
    arguments = ["evaluate", str(files / "export"), "--target", str(files / "target"), "--device", "cpu"]
    arguments += ["--prompts", str(files / "prompts.jsonl"), "--num-prompts", str(NUM_PROMPTS), "--dtype", "float32"]
    assert cli.main([*arguments, "--max-new-tokens", "20", "--output", str(output), *flags]) == 0
    return json.loads(output.read_text())


def test_both_methods_count_the_same_and_say_under_which_settings(files, capsys):
    replayed = evaluated(files, "--controls", str(files / "store"))
    row = capsys.readouterr().out
    decoded = evaluated(files, "--method", "decode", "--controls", str(files / "store"))
    for name in ("acceptance_length", "rounds", "cut_rounds", "histogram", "per_slot", "controls", "answer_tokens"):
        assert replayed[name] == decoded[name], name
    assert replayed["num_prompts"] == NUM_PROMPTS
    assert replayed["prompts_left_out"] == {"too long for the target": 1}
    assert set(replayed["controls"]) == {"prompt_lookup", "ngram"}
    assert decoded["lossless"] is True
    assert decoded["divergences"] == []
    assert decoded["speedup"] == pytest.approx(
        decoded["tokens_per_second"] / decoded["plain_tokens_per_second"], rel=0.02
    )
    chosen = replayed["settings"]
    assert (chosen["dtype"], chosen["device"], chosen["method"]) == ("float32", "cpu", "replay")
    assert chosen["versions"]["torch"] == torch.__version__
    assert len(chosen["template_hash"]) == 64
    head = "| drafter | set | method | dtype | thinking | prompts | accept | rounds | prompt lookup | ngram |"
    assert row.startswith(head + "\n")


def test_several_sets_are_measured_in_one_call_as_each_alone(files, capsys):
    write_conversations(files / "more.jsonl", [chat("Another."), chat("One more.")])
    alone = evaluated(files)
    more = evaluated(files, "--prompts", str(files / "more.jsonl"))
    capsys.readouterr()
    both = evaluated(files, "--prompts", str(files / "prompts.jsonl"), str(files / "more.jsonl"), "--no-thinking")
    assert set(both["sets"]) == {"prompts", "more"}
    for name, single in (("prompts", alone), ("more", more)):
        assert both["sets"][name] == single["sets"][name]
        assert single["sets"][name].items() <= single.items()
    assert both["num_prompts"] == NUM_PROMPTS + 2
    assert both["histogram"] == [a + b for a, b in zip(alone["histogram"], more["histogram"], strict=True)]
    assert (alone["settings"]["thinking"], both["settings"]["thinking"]) == (None, False)
    rows = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[1] for row in rows[2:4]] == ["prompts", "more"]
    decoded = evaluated(
        files, "--method", "decode", "--prompts", str(files / "prompts.jsonl"), str(files / "more.jsonl")
    )
    assert decoded["lossless"] is True
    for name in ("prompts", "more"):
        assert decoded["sets"][name]["histogram"] == both["sets"][name]["histogram"]


def test_sets_that_are_called_the_same_are_refused(files, capsys):
    arguments = ["evaluate", str(files / "export"), "--target", "t", "--prompts", "a/x.jsonl", "b/x.jsonl"]
    assert cli.main(arguments) == cli.EXIT_ERROR
    assert "found 'x' more than once" in capsys.readouterr().err
    assert cli.main([*arguments[:5], "p", "--thinking", "--no-thinking"]) == cli.EXIT_ERROR


def test_sampled_evaluation_claims_nothing_about_equality(files):
    found = evaluated(files, "--method", "decode", "--temperature", "1.0", "--seed", "3")
    assert "lossless" not in found
    assert found["controls"] == {}
    assert found["rounds"] + found["cut_rounds"] > 0


def test_replay_refuses_to_sample(files, capsys):
    arguments = ["evaluate", str(files / "export"), "--target", "t", "--prompts", "p", "--temperature", "1.0"]
    assert cli.main(arguments) == cli.EXIT_ERROR
    assert "needs --method decode" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag", ["--num-prompts", "--max-new-tokens", "--batch-size", "--ngram-order", "--ngram-tokens"]
)
def test_counts_of_nothing_are_refused_before_anything_is_loaded(capsys, flag):
    assert cli.main(["evaluate", "d", "--target", "t", "--prompts", "p", flag, "0"]) == cli.EXIT_ERROR
    assert f"{flag} must be at least 1, got 0" in capsys.readouterr().err


def test_a_store_of_another_tokenizer_is_refused(files, tmp_path, capsys):
    template = ChatTemplate(tiny_tokenizer(CHATML))
    write_store(tmp_path / "store", [template.encode(chat("a", "bc"))], ManifestInfo(tokenizer_hash="f" * 64))
    arguments = ["evaluate", str(files / "export"), "--target", str(files / "target"), "--device", "cpu"]
    arguments += ["--prompts", str(files / "prompts.jsonl"), "--controls", str(tmp_path / "store")]
    assert cli.main(arguments) == cli.EXIT_ERROR
    assert "expected a store of the target's tokenizer" in capsys.readouterr().err


def test_a_difference_is_reported_with_its_logit_gap_and_fails_in_float32(files, monkeypatch, capsys):
    def altered(*arguments, **options):
        found = plain(*arguments, **options)
        return found._replace(token_ids=[found.token_ids[0], 77, *found.token_ids[2:]])

    plain = speculative.generate_plain
    monkeypatch.setattr("blockdraft.commands.measure.generate_plain", altered)
    options = evaluate.Options(
        drafter=files / "export",
        target=str(files / "target"),
        prompts=(str(files / "prompts.jsonl"),),
        method="decode",
        num_prompts=1,
        max_new_tokens=10,
        dtype="float32",
        device="cpu",
    )
    assert evaluate.run(options) == 1
    out = capsys.readouterr().out
    assert "not equal to plain decoding, prompts: 1 of 1 answers" in out
    assert "prompt 0, token 1" in out


def test_generate_streams_the_targets_own_answer(files, capsys):
    arguments = ["generate", str(files / "export"), "Say ab.", "--target", str(files / "target"), "--device", "cpu"]
    assert cli.main([*arguments, "--dtype", "float32", "--max-new-tokens", "20"]) == 0
    out = capsys.readouterr().out
    assert "\x1b[" not in out
    drafter = blockdraft.load_drafter(files / "export", device="cpu")
    target = blockdraft.load_target(str(files / "target"), drafter=drafter, dtype="float32", device="cpu")
    reply = blockdraft.generate(target, drafter, "Say ab.", max_new_tokens=20)
    answer, _, closing = out.rstrip("\n").rpartition("\n")
    assert answer == reply.text
    assert closing.startswith("accept ")
    assert f"tokens {len(reply.generation.token_ids)} |" in closing


def test_generate_refuses_both_thinking_modes(capsys):
    assert cli.main(["generate", "d", "Say ab.", "--target", "t", "--thinking", "--no-thinking"]) == cli.EXIT_ERROR
    assert "expected at most one of them" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gpu0", "cuda:99"])
def test_a_device_that_is_not_there_is_an_error(files, capsys, name):
    export, target = str(files / "export"), str(files / "target")
    prompts = str(files / "prompts.jsonl")
    for verb in (
        ["generate", export, "Say ab.", "--target", target],
        ["evaluate", export, "--target", target, "--prompts", prompts],
        ["regenerate", prompts, "--target", target, "--output", str(files / "answers.jsonl")],
    ):
        assert cli.main([*verb, "--device", name]) == cli.EXIT_ERROR
        assert (
            f"device: {'expected cpu or cuda:N' if name == 'gpu0' else 'cuda:99 is not here'}"
            in capsys.readouterr().err
        )


def test_a_data_type_that_was_chosen_is_told(files):
    chosen = evaluated(files, "--dtype", "auto")["settings"]
    assert chosen["dtype"] == choose_dtype("auto", "cpu")


def test_export_writes_what_it_read(files, tmp_path, capsys):
    assert cli.main(["export", str(files / "export"), "--output", str(tmp_path / "again")]) == 0
    assert "25 tensors in bfloat16, read back and equal" in capsys.readouterr().out
    written = load_export(tmp_path / "again").state_dict()
    for name, weight in load_export(files / "export").state_dict().items():
        assert torch.equal(weight.bfloat16(), written[name])


def test_a_target_of_another_width_is_an_error(files, tmp_path, capsys):
    config = Qwen3Config(vocab_size=300, hidden_size=48, intermediate_size=48, num_hidden_layers=6, head_dim=16)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "wide")
    command = ["generate", str(files / "export"), "hello", "--target", str(tmp_path / "wide"), "--device", "cpu"]
    assert cli.main(command) == 2
    said = "expected the target that the drafter was trained for, of width 32 and 6 layers, found one of width 48"
    assert said in capsys.readouterr().err


def test_a_drafter_that_is_not_there_is_an_error(tmp_path, capsys):
    assert cli.main(["export", str(tmp_path / "nothing"), "--output", str(tmp_path / "x")]) == cli.EXIT_ERROR
    assert "expected a directory with an export, a checkpoint or a run" in capsys.readouterr().err


def test_versions_are_told_where_the_package_runs_from_its_source():
    assert evaluate.version("torch").split("+")[0] == torch.__version__.split("+")[0]
    assert evaluate.version("no-such-distribution") == "not installed"
