"""The whole path on a laptop: `make demo`.

Trains a drafter for SmolLM2-135M-Instruct on one narrow family of prompts and measures it on prompts it never saw.
Every step is a command; it is printed and then run just as printed. Everything is written below runs/demo.

What it shows is that the pipeline learns, and that decoding stays lossless. An order-5 n-gram table of the same
answers is a close rival on so narrow a family, so it is measured beside the drafter.

Running it again goes on where it stopped: answers that are there are kept, training resumes from its last checkpoint.
To start over, remove runs/demo.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

NUM_ANSWERS = 512
"""Training prompts, each answered by the target."""
MAX_NEW_TOKENS = 40
"""Longest answer, in training and in evaluation."""
ROW_LENGTH = 72
"""Tokens of a row in the recipe smollm2_demo."""
BATCH = 128
"""Prompts that are answered together."""
NUM_WATCHED = 4
"""Prompts of each held-out set that are watched during training; all are measured at the end."""
NUM_HELD_OUT = 16
"""Prompts of each of the two held-out sets, for acceptance by replay."""
DECODE_TOKENS = 20
"""Longest answer when decoding one by one."""
NUM_DECODE = 8
"""Held-out prompts, half of each set, that are decoded one by one in float32 and compared with plain decoding."""
NGRAM_ORDER = 5

EXAMPLES = Path(os.path.relpath(Path(__file__).parent))


class Demo:
    """Runs the stages one after the other and keeps their seconds."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self.seconds: dict[str, float] = {}

    def run(self, stage: str, command: list[str]) -> None:
        """Prints a command, runs it, and ends the demo if it fails."""
        print(f"\n[{stage}]\n$ {shlex.join(command)}", flush=True)
        started = time.monotonic()
        code = subprocess.run(_executable(command), check=False).returncode
        seconds = round(time.monotonic() - started, 1)
        if code:
            sys.exit(
                f"\nthe demo stopped: stage {stage!r} ended with exit code {code} after {seconds} s; "
                f"run it again to go on, or remove {self.runs} to start over"
            )
        self.seconds[stage] = seconds
        (self.runs / "seconds.json").write_text(json.dumps(self.seconds, indent=2) + "\n", encoding="utf-8")
        print(f"[{stage}: {seconds} s]", flush=True)

    def script(self, stage: str, name: str, *arguments: object) -> None:
        """Runs a script beside this one."""
        self.run(stage, ["python", str(EXAMPLES / name), *map(str, arguments)])

    def blockdraft(self, stage: str, *arguments: object) -> None:
        """Runs a verb of blockdraft."""
        self.run(stage, ["blockdraft", *map(str, arguments)])


def _executable(command: list[str]) -> list[str]:
    """The same command with the interpreter that runs this script, whatever PATH says."""
    if command[0] == "blockdraft":
        return [sys.executable, "-m", "blockdraft.cli", *command[1:]]
    return [sys.executable, *command[1:]]


def main() -> None:
    """Runs every stage."""
    options = parse()
    runs: Path = options.runs_dir
    runs.mkdir(parents=True, exist_ok=True)
    demo = Demo(runs)
    target, prompts, store, export = runs / "target", runs / "prompts", runs / "store", runs / "export"
    held_out = [prompts / "unseen_pair.jsonl", prompts / "unseen_words.jsonl"]

    demo.script("target", "demo_target.py", target)
    sizes = ["--num-train", options.num_answers, "--num-held-out", options.num_held_out]
    demo.script("prompts", "demo_prompts.py", prompts, *sizes, "--num-decode", options.num_decode)
    length = ["--max-new-tokens", options.max_new_tokens]
    answers = ["regenerate", prompts / "train.jsonl", "--target", target, "--output", runs / "answers.jsonl", *length]
    demo.blockdraft("regenerate", *answers, "--batch-size", BATCH)
    # Rows of the recipe hold 72 tokens; a longer conversation is cut, and counted.
    cut = ["--max-length", ROW_LENGTH]
    demo.blockdraft("prepare", "prepare", runs / "answers.jsonl", "--target", target, "--output", store, *cut)

    # A run that was cut before its first checkpoint has nothing to go on from: it begins again.
    train = ["train", "smollm2_demo", "--run-dir", runs / "train", "--resume", "auto"]
    train += ["--target.path", target, "--data.train", store]
    train += ["--eval.prompts", *held_out, "--eval.num-prompts", min(NUM_WATCHED, options.num_held_out)]
    train += ["--eval.max-new-tokens", options.max_new_tokens]
    train += ["--steps", options.steps] if options.steps is not None else []
    demo.blockdraft("train", *train)

    demo.blockdraft("export", "export", runs / "train", "--output", export)
    measure = ["--target", target, *length, "--dtype", "float32"]
    demo.blockdraft(
        "evaluate",
        *("evaluate", export, "--prompts", *held_out, "--num-prompts", options.num_held_out, *measure),
        *("--controls", store, "--ngram-order", NGRAM_ORDER, "--output", runs / "evaluate.json"),
    )
    tokens = min(DECODE_TOKENS, options.max_new_tokens)
    demo.blockdraft(
        "decode",
        *("evaluate", export, "--method", "decode", "--prompts", prompts / "unseen_both.jsonl", "--target", target),
        *("--max-new-tokens", tokens, "--dtype", "float32", "--output", runs / "evaluate_decode.json"),
    )
    demo.blockdraft("report", "report", runs / "train", "--output", runs / "report.html")
    demo.script("summary", "demo_summary.py", runs)


def parse() -> argparse.Namespace:
    """Sizes, for a smaller trial."""
    parser = argparse.ArgumentParser(description="Trains and measures a drafter for SmolLM2-135M-Instruct.")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/demo"))
    parser.add_argument("--num-answers", type=int, default=NUM_ANSWERS)
    parser.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS)
    parser.add_argument("--num-held-out", type=int, default=NUM_HELD_OUT)
    parser.add_argument("--num-decode", type=int, default=NUM_DECODE)
    parser.add_argument("--steps", type=int, default=None, help="steps of training; default: the recipe's")
    return parser.parse_args()


if __name__ == "__main__":
    main()
