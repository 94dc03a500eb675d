"""No option is accepted and ignored: commands refuse what does nothing, a run says it."""

import dataclasses
from pathlib import Path

import pytest

from blockdraft.cli import main
from blockdraft.commands import bench, evaluate, generate, plan, regenerate
from blockdraft.commands.unused import OF_A_RUN, SAMPLED, Need, refuse_unused, unused_fields
from blockdraft.config import ConfigError, EvalConfig, LossConfig, OptimConfig, RunConfig
from blockdraft.recipes import RECIPES

EVALUATE = ["evaluate", "d", "--target", "t", "--prompts", "p"]
GENERATE = ["generate", "d", "Hello", "--target", "t"]
REGENERATE = ["regenerate", "chats.jsonl", "--target", "t", "--output", "nothing-here/answers.jsonl"]
SERVED = [*REGENERATE, "--server", "http://127.0.0.1:9/v1"]
DECODE = ["--method", "decode"]


@pytest.mark.parametrize(
    ("command", "flags", "expected", "found"),
    [
        (EVALUATE, ["--top-p", "0.9"], "--temperature above 0", "--temperature 0.0"),
        (EVALUATE, [*DECODE, "--top-k", "5"], "--temperature above 0", "--temperature 0.0"),
        (EVALUATE, ["--ngram-order", "3"], "--controls", "no --controls"),
        (EVALUATE, ["--ngram-tokens", "3"], "--controls", "no --controls"),
        (EVALUATE, [*DECODE, "--controls", "s", "--temperature", "0.7"], "--temperature 0", "--temperature 0.7"),
        (EVALUATE, [*DECODE, "--batch-size", "4"], "--method replay", "--method decode"),
        (GENERATE, ["--top-p", "0.9"], "--temperature above 0", "--temperature 0.0"),
        (GENERATE, ["--top-k", "5"], "--temperature above 0", "--temperature 0.0"),
        (SERVED, ["--device", "cpu"], "no --server", "--server http://127.0.0.1:9/v1"),
        (SERVED, ["--dtype", "float32"], "no --server", "--server http://127.0.0.1:9/v1"),
        (SERVED, ["--batch-size", "4"], "no --server", "--server http://127.0.0.1:9/v1"),
        (REGENERATE, ["--concurrency", "4"], "--server", "no --server"),
        (REGENERATE, ["--retries", "1"], "--server", "no --server"),
        (REGENERATE, ["--request-timeout-s", "5"], "--server", "no --server"),
        (["bench", "pipeline", "--shapes", "tiny"], ["--objective", "kl"], "step", "pipeline"),
        (["bench", "target", "--shapes", "tiny"], ["--num-anchors", "4"], "step or pipeline", "target"),
        (["bench", "step", "--shapes", "tiny", "--num-layers", "1"], ["--window", "64"], "--num-layers 2", "--num-lay"),
        (["plan", "--run", "r"], ["--rate-tflops", "80"], "no --run", "--run r"),
        (
            ["plan", "paper", "--target-tok-s", "3", "--drafter-tok-s", "4"],
            ["--rate-tflops", "80"],
            "a rate that is not given",
            "--target-tok-s 3.0 and --drafter-tok-s 4.0",
        ),
    ],
)
def test_an_option_that_would_do_nothing_is_refused_before_anything_is_read(
    capsys: pytest.CaptureFixture[str], command: list[str], flags: list[str], expected: str, found: str
) -> None:
    assert main([*command, *flags]) == 2
    said = capsys.readouterr().err
    name = flags[-2] if "--controls" not in flags else "--controls"
    assert said.startswith(f"error: {name} ")
    assert f"does nothing as things stand: expected {expected}" in said
    assert f", found {found}" in said
    assert f"; leave {name} out" in said


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        (evaluate.Options(drafter=Path("d"), target="t", prompts=("p",)), evaluate.NEEDS),
        (generate.Options(drafter=Path("d"), target="t", prompt="p"), (SAMPLED,)),
        (regenerate.Options(conversations=("c",), target="t", output=Path("o")), regenerate.NEEDS),
        (regenerate.Options(conversations=("c",), target="t", output=Path("o"), server="s"), regenerate.NEEDS),
        (bench.Options(what="target"), bench.NEEDS),
        (plan.Options(run=Path("r")), plan.NEEDS),
    ],
)
def test_defaults_are_nobodys_words(options: evaluate.Options, needs: tuple[Need, ...]) -> None:
    refuse_unused(options, needs)
    names = {field.name for field in dataclasses.fields(options)}
    assert all({*need.names, *need.others} <= names for need in needs)


def test_what_the_other_option_needs_is_accepted() -> None:
    sampled = evaluate.Options(
        drafter=Path("d"), target="t", prompts=("p",), method="decode", temperature=0.7, top_p=0.9, top_k=5
    )
    refuse_unused(sampled, evaluate.NEEDS)
    with pytest.raises(ConfigError, match=r"--top-p 0\.9 does nothing"):
        refuse_unused(dataclasses.replace(sampled, temperature=0.0), evaluate.NEEDS)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (RunConfig(loss=LossConfig(objective="dpace", gamma=3.0)), "loss.gamma 3.0 does nothing as things stand"),
        (RunConfig(optim=OptimConfig(decay=0.3)), "expected optim.schedule wsd, found optim.schedule cosine"),
        (RunConfig(steps=5, epochs=2.0), "epochs 2.0 does nothing as things stand: expected no steps, found steps 5"),
        (RunConfig(eval=EvalConfig(every=7)), "eval.every 7 does nothing as things stand: expected eval.prompts"),
    ],
)
def test_fields_that_a_run_does_not_read_are_named(config: RunConfig, said: str) -> None:
    (line,) = unused_fields(config, RunConfig())
    assert said in line


@pytest.mark.parametrize(
    "config",
    [
        RunConfig(loss=LossConfig(objective="kl", gamma=3.0)),
        RunConfig(optim=OptimConfig(schedule="wsd", decay=0.3)),
        RunConfig(epochs=2.0),
        RunConfig(eval=EvalConfig(prompts=("p",), every=7)),
    ],
)
def test_fields_that_a_run_reads_are_not(config: RunConfig) -> None:
    assert unused_fields(config, RunConfig()) == []


def test_every_field_of_the_table_is_one_of_a_run() -> None:
    for recipe in RECIPES.values():
        assert unused_fields(recipe(), recipe()) == []
    assert {need.names[0].split(".")[0] for need in OF_A_RUN} == {"loss", "optim", "epochs", "eval"}
