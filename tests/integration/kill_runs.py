"""Kills training runs with SIGKILL, resumes them, and compares each with a run that nobody disturbed.

usage: python kill_runs.py ROOT NUM_KILLS [SEED]

Forks every run from this process, which has imported everything: a start costs a second instead of eight. Kills come
at random moments, and at moments that random ones rarely meet: between the writes of a save, inside an evaluation,
inside warm-up, while the run directory is claimed. Prints a line for each kill, and one object of JSON at the end.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from blockdraft.commands import boundary, control, train
from blockdraft.config import RunConfig
from blockdraft.data.conversations import write_conversations
from blockdraft.runtime import pipeline, saver
from blockdraft.training import checkpoint
from integration.tiny_run import assert_same_run, make_files, metrics, tiny_config
from tiny_chat import chat

STEPS, SAVE_EVERY, EVAL_EVERY = 24, 4, 6
KINDS = ("time", "write", "rename", "evaluation", "warm-up", "claim")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(holder: object, name: str, number: int) -> None:
    """Dies in the given call of a function, before its work is done."""
    whole: Callable[..., object] = getattr(holder, name)
    calls: list[int] = []

    def counted(*arguments: object, **options: object) -> object:
        calls.append(1)
        if len(calls) == number:
            die()
        return whole(*arguments, **options)

    setattr(holder, name, counted)


def arm(kind: str, draw: random.Random) -> None:
    """Prepares the death of this process; at no moment of its own for `time`."""
    saves = STEPS // SAVE_EVERY
    if kind == "write":
        at_call(checkpoint, draw.choice(["write_tensors", "write_text"]), draw.randint(1, 2 * saves))
    elif kind == "rename":
        # Before and behind the rename.
        at_call(checkpoint, "sync_directory", draw.randint(1, 2 * saves))
    elif kind == "evaluation":
        at_call(boundary, "replay", draw.randint(1, STEPS // EVAL_EVERY + 1))
    elif kind == "warm-up":
        where = draw.choice([(pipeline, "warm_up_target"), (pipeline, "warm_up_drafter"), (saver, "Snapshot")])
        at_call(*where, 1)
    elif kind == "claim":
        at_call(control, draw.choice(["claim", "write_environment", "MetricsFile"]), 1)


def fork(config: RunConfig, log: Path, kind: str = "time", draw: random.Random | None = None, resume: str = "") -> int:
    """Starts a run in a child; returns its process id."""
    child = os.fork()
    if child:
        return child
    code = 3
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        if draw is not None:
            arm(kind, draw)
        code = train.run(config, train.Options(resume=resume))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(child: int, seconds: float | None) -> int:
    """Exit status; kills the child after `seconds`."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if deadline is not None and time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            deadline = None
        time.sleep(0.005)


def last_step(run_dir: Path) -> int:
    """Of the metrics that a killed run left, its half line dropped."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)


def main(root: Path, num_kills: int, seed: int) -> int:
    torch.set_num_threads(1)
    files = make_files(root / "files")
    write_conversations(root / "prompts.jsonl", [chat("Say ab."), chat("Count.")])
    evaluation = {"prompts": (str(root / "prompts.jsonl"),), "every": EVAL_EVERY, "max_new_tokens": 16}

    def config(name: str) -> RunConfig:
        runtime = {"targets": ("cpu", "cpu")}
        return tiny_config(files, root / name, steps=STEPS, save_every=SAVE_EVERY, runtime=runtime, eval=evaluation)

    started = time.monotonic()
    code = wait(fork(config("whole"), root / "whole.log"), None)
    whole_s = time.monotonic() - started
    if code:
        sys.stdout.write((root / "whole.log").read_text())
        return 1
    sys.stdout.write(f"undisturbed: {STEPS} steps, a save every {SAVE_EVERY}, {whole_s:.1f} s\n")
    draw, killed = random.Random(seed), 0
    for index in range(num_kills):
        # Two of three at any moment, the others where it hurts.
        kind = "time" if index % 3 < 2 else KINDS[1 + index // 3 % (len(KINDS) - 1)]
        name, log = f"kill{index}", root / f"kill{index}.log"
        seconds = draw.random() * whole_s if kind == "time" else None
        code = wait(fork(config(name), log, kind, draw), seconds)
        draw.random()
        before = last_step(root / name)
        killed += code == -signal.SIGKILL
        code = wait(fork(config(name), log, resume="auto"), None)
        if code:
            sys.stdout.write(log.read_text())
            return 1
        assert_same_run(root / name, root / "whole")
        lines = log.read_text().splitlines()
        resumed = [line for line in lines if "steps done" in line]
        first = int(resumed[-1].split(": ")[-1].split()[0]) if resumed else 0
        # The kill came behind the last evaluation: nothing is read then.
        first = STEPS if any(f"all {STEPS} steps are done already" in line for line in lines) else first
        # The newest save may still have been under way, up to the step whose save waits for it; the one before it not.
        assert first >= before - 2 * SAVE_EVERY, (first, before)
        moment = f"at {seconds:.2f} s" if seconds is not None else f"in {kind}"
        last = metrics(root / name)[-1]["step"]
        sys.stdout.write(f"killed {moment}, {before} steps logged; resumed from {first}; equal after {last}\n")
        sys.stdout.flush()
    sys.stdout.write(json.dumps({"kills": num_kills, "killed": killed}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0))
