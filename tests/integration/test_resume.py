"""A stopped run goes on as if it had never stopped."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from safetensors.torch import load_file

from blockdraft.commands import train
from blockdraft.commands.run_directory import hold
from blockdraft.config import ConfigError, read_config, to_json
from blockdraft.data.conversations import write_conversations
from blockdraft.training.checkpoint import list_checkpoints, newest_checkpoint, read_state
from blockdraft.training.resuming import check_resumable
from integration.tiny_run import Files, assert_same_run, make_files, metrics, run_control, tiny_config
from tiny_chat import chat

VARIANTS = {
    "plain": {},
    "reuse": {"runtime": {"reuse": 3}},
    "keep_features": {"runtime": {"keep_features": True, "targets": ("cpu", "cpu")}},
    "accumulation": {"optim": {"accumulation": 2}, "runtime": {"reuse": 3}},
    "adamw_bf16": {"optim": {"optimizer": "adamw_bf16", "weight_decay": 0.01}, "drafter": {"dtype": "bfloat16"}},
    "muon": {"optim": {"optimizer": "muon", "weight_decay": 0.01}},
    "bfloat16": {"drafter": {"dtype": "bfloat16"}, "loss": {"draft_vocab": "data"}},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return make_files(tmp_path_factory.mktemp("resume"))


def forget_after(source: Path, destination: Path, step: int) -> Path:
    """A copy of a run directory as a run that was killed after `step` leaves it; returns the checkpoint."""
    shutil.copytree(source, destination)
    for path in list_checkpoints(destination / "checkpoints"):
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
    return newest_checkpoint(destination)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_five_steps_and_five_more_equal_ten(files, tmp_path, changes):
    config = tiny_config(files, tmp_path / "whole", **changes)
    whole = run_control(config).run_dir
    checkpoint = forget_after(whole, tmp_path / "parts", 5)
    assert checkpoint.name == "step_00000005"
    resumed = run_control(dataclasses.replace(config, run_dir=str(tmp_path / "parts")), resume=checkpoint)
    assert any("5 steps done" in line for line in resumed.lines)
    assert [line["step"] for line in metrics(resumed.run_dir)] == list(range(1, 11))
    assert_same_run(resumed.run_dir, whole)


def test_a_run_asked_to_stop_saves_and_goes_on(files, tmp_path):
    # Stopped at a step that is no multiple of save_every, in the middle of a slot's passes.
    changes = {"runtime": {"reuse": 3}, "save_every": 100}
    whole = run_control(tiny_config(files, tmp_path / "whole", **changes)).run_dir

    def stop(control, line: str) -> None:
        if line.startswith("step 4/"):
            control.pipeline.ask_to_stop()

    config = tiny_config(files, tmp_path / "parts", **changes)
    stopped = run_control(config, say=stop, delay=lambda worker, _number: None)
    steps = int(newest_checkpoint(stopped.run_dir).name.removeprefix("step_"))
    assert 4 <= steps < 10, "the run was over before it heard the request"
    assert [line["step"] for line in metrics(stopped.run_dir)] == list(range(1, steps + 1))
    assert train.run(config, train.Options(resume="auto")) == 0
    assert_same_run(tmp_path / "parts", whole)


def test_a_finished_run_has_nothing_left_to_do(files, tmp_path, capsys):
    config = tiny_config(files, tmp_path, steps=2)
    assert train.run(config, train.Options()) == 0
    before = metrics(tmp_path)
    assert train.run(config, train.Options(resume="auto")) == 0
    assert "all 2 steps are done already" in capsys.readouterr().out
    assert metrics(tmp_path) == before
    with pytest.raises(ConfigError, match="holds a run already"):
        train.run(config, train.Options())
    assert train.run(config, train.Options(overwrite=True)) == 0
    assert metrics(tmp_path) == before
    with pytest.raises(ConfigError, match=r"--overwrite starts over and --resume auto goes on"):
        train.run(config, train.Options(resume="auto", overwrite=True))


def test_two_runs_do_not_write_one_directory(files, tmp_path):
    config = tiny_config(files, tmp_path, steps=2)
    with hold(tmp_path):
        for options in (train.Options(), train.Options(overwrite=True)):
            with pytest.raises(ConfigError, match="another run is writing there"):
                train.run(config, options)
        assert not list(tmp_path.iterdir())
    assert train.run(config, train.Options()) == 0


def test_the_saved_config_does_not_ask_to_be_resumed_again(files, tmp_path):
    config = tiny_config(files, tmp_path, steps=2)
    assert train.run(config, train.Options()) == 0
    assert train.run(dataclasses.replace(config, steps=4), train.Options(resume="auto")) == 0
    assert read_config(tmp_path / "config.json") == dataclasses.replace(config, steps=4)


def test_a_run_that_has_no_checkpoint_yet_begins_and_says_so(files, tmp_path, capsys):
    config = tiny_config(files, tmp_path, steps=2)
    for expected in (1, 0):
        assert train.run(config, train.Options(resume="auto")) == 0
        assert capsys.readouterr().out.count("holds no checkpoint, the run begins") == expected


def test_a_torn_save_is_ignored(files, tmp_path):
    config = tiny_config(files, tmp_path / "whole")
    whole = run_control(config).run_dir
    checkpoint = forget_after(whole, tmp_path / "parts", 5)
    torn = checkpoint.with_name(".step_00000008.partial")
    shutil.copytree(checkpoint, torn)
    (torn / "optimizer.safetensors").write_bytes(b"half")
    unfinished = checkpoint.with_name("step_00000009")
    unfinished.mkdir()
    with (tmp_path / "parts/metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "los')
    config = dataclasses.replace(config, run_dir=str(tmp_path / "parts"))
    assert train.run(config, train.Options(resume="auto")) == 0
    assert_same_run(tmp_path / "parts", whole)


@pytest.mark.parametrize("by", ["steps", "epochs"])
def test_a_run_that_is_over_says_so_before_its_target_is_loaded(files, tmp_path, monkeypatch, capsys, by):
    length = {"steps": 2} if by == "steps" else {"steps": None, "epochs": 0.3}
    write_conversations(tmp_path / "pairs.jsonl", [chat("Say ab."), chat("Count.")])
    evaluation = {"prompts": (str(tmp_path / "pairs.jsonl"),), "max_new_tokens": 12}
    config = tiny_config(files, tmp_path / "run", eval=evaluation, **length)
    done = run_control(config).control.built.total_steps
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    monkeypatch.setattr("blockdraft.commands.control.build", None)
    if by == "steps":
        # Nor is anything read then.
        monkeypatch.setattr("blockdraft.commands.control.check", None)
    assert train.run(config, train.Options(resume="auto")) == 0
    assert f"all {done} steps are done already" in capsys.readouterr().out
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def test_a_changed_config_is_refused_by_name(files, tmp_path):
    config = tiny_config(files, tmp_path, steps=1)
    run_control(config)
    checkpoint = newest_checkpoint(tmp_path)
    allowed = tiny_config(
        files, tmp_path / "b", steps=20, save_every=1, runtime={"channel_depth": 1, "stall_seconds": 9.0}
    )
    check_resumable(checkpoint, allowed)
    for changes, names in (
        ({"seed": 3}, ["seed: 0 -> 3"]),
        ({"runtime": {"reuse": 2}}, ["runtime.reuse: 1 -> 2"]),
        ({"drafter": {"num_layers": 2}, "optim": {"lr": 0.5}}, ["drafter.num_layers: 1 -> 2", "optim.lr: 0.001 -> "]),
        ({"data": {"row_length": 128, "target_tokens": 256}}, ["data.row_length: 64 -> 128", "data.target_tokens"]),
    ):
        with pytest.raises(ConfigError) as caught:
            check_resumable(checkpoint, tiny_config(files, tmp_path, **changes))
        assert all(name in str(caught.value) for name in names)
        assert str(caught.value).count("->") == len(names)


def test_what_needs_no_target_is_refused_before_one_is_loaded(files, tmp_path, monkeypatch):
    def never(*_arguments: object, **_options: object) -> None:
        raise AssertionError("the target was loaded first")

    (tmp_path / "file").write_text("")
    (tmp_path / "a" / "checkpoints" / "step_00000003").mkdir(parents=True)
    (tmp_path / "a" / "config.json").write_text("{}")
    (tmp_path / "b" / "checkpoints").mkdir(parents=True)
    named = r"expected one checkpoint, found a run directory; write --resume auto"
    listed = r"expected one checkpoint, found the checkpoints of a run; write --resume auto"
    last = rf", or --resume {tmp_path}/a/checkpoints/step_00000003$"
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("blockdraft.commands.control.build", never)
    for run_dir, changes, resume, message in (
        ("run", {}, str(tmp_path / "none"), "--resume: expected a checkpoint"),
        ("a", {}, str(tmp_path / "a"), f"--resume {tmp_path}/a: {named}{last}"),
        ("run", {}, str(tmp_path / "a"), f"--resume {tmp_path}/a: {named} --run-dir {tmp_path}/a{last}"),
        ("a", {}, str(tmp_path / "a" / "checkpoints"), f"--resume {tmp_path}/a/checkpoints: {listed}{last}"),
        ("b", {}, str(tmp_path / "b"), f"--resume {tmp_path}/b: {named}$"),
        ("run", {"trackers": ("wandb",)}, "", "--trackers wandb needs its package"),
        ("file/run", {}, "", "expected a directory that can be written"),
    ):
        with pytest.raises(ConfigError, match=message):
            train.run(tiny_config(files, tmp_path / run_dir, **changes), train.Options(resume=resume))


def test_the_number_of_drafters_is_free_unless_slots_are_reused(files, tmp_path):
    two = {"drafters": ("cpu", "cpu"), "targets": ("cpu",)}
    for reuse, is_free in ((1, True), (2, False)):
        root = tmp_path / str(reuse)
        root.mkdir()
        config = tiny_config(files, root, optim={"accumulation": 2}, runtime={"reuse": reuse})
        with pytest.raises(ConfigError, match="resume: expected a checkpoint"):
            check_resumable(root, config)
        (root / "config.json").write_text(to_json(config))
        (root / "state.json").write_text("{}")
        other = tiny_config(files, root, optim={"accumulation": 2}, runtime={"reuse": reuse, **two})
        if is_free:
            check_resumable(root, other)
        else:
            with pytest.raises(ConfigError, match="number of drafters: 1 -> 2"):
                check_resumable(root, other)


def test_checkpoints_beyond_keep_last_are_removed(files, tmp_path):
    run_control(tiny_config(files, tmp_path, save_every=2, keep_last=3))
    assert [path.name[-2:] for path in list_checkpoints(tmp_path / "checkpoints")] == ["06", "08", "10"]
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_the_run_directory_holds_the_resolved_config(files, tmp_path):
    config = tiny_config(files, tmp_path, steps=1, target={"dtype": "auto"}, drafter={"dtype": "auto"})
    run_control(config)
    saved = read_config(tmp_path / "config.json")
    assert saved.target.dtype in ("bfloat16", "float32")
    assert saved.drafter.dtype in ("bfloat16", "float32")
    assert dataclasses.replace(saved, target=config.target, drafter=config.drafter) == config
    assert read_config(newest_checkpoint(tmp_path) / "config.json") == saved
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["target_class"] == "Qwen3ForCausalLM"
    drafter, shape = environment["drafter"], read_state(newest_checkpoint(tmp_path))["shape"]
    assert {name: drafter[name] for name in drafter if name in shape} == {
        name: shape[name] for name in ("num_layers", "hidden_size", "block_size", "target_layer_ids")
    }
    weights = load_file(newest_checkpoint(tmp_path) / "drafter.safetensors").values()
    assert drafter["parameters"] == sum(weight.numel() for weight in weights)


def test_the_moments_of_all_starts_are_kept_and_go_with_the_run(files, tmp_path):
    def starts() -> list[str]:
        found: list[str] = json.loads((tmp_path / "environment.json").read_text())["started"]
        return found

    run_control(tiny_config(files, tmp_path, steps=1))
    (first,) = starts()
    assert datetime.fromisoformat(first) <= datetime.now(UTC) < datetime.fromisoformat(first) + timedelta(minutes=2)
    run_control(tiny_config(files, tmp_path, steps=2), resume=newest_checkpoint(tmp_path))
    assert starts()[0] == first and len(starts()) == 2
    run_control(tiny_config(files, tmp_path, steps=1))
    assert len(starts()) == 1


def test_an_environment_that_no_run_wrote_is_refused_before_anything_is_loaded(files, tmp_path, monkeypatch):
    run_control(tiny_config(files, tmp_path, steps=1))
    (tmp_path / "environment.json").write_text("[]")
    monkeypatch.setattr("blockdraft.commands.control.build", None)
    with pytest.raises(ConfigError, match=r"environment\.json: expected a JSON object, found list; remove it"):
        run_control(tiny_config(files, tmp_path, steps=2), resume=newest_checkpoint(tmp_path))


def test_ctrl_c_finishes_the_step_saves_and_exits_with_zero(files, tmp_path):
    config = tiny_config(files, tmp_path, steps=100_000, save_every=100_000)
    flags = ["--run-dir", config.run_dir, "--target.path", str(files.target), "--data.train", str(files.store)]
    flags += ["--steps", str(config.steps), "--save-every", str(config.save_every)]
    source = str(Path(train.__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-m", "blockdraft.cli", "train", "tiny", *flags],
        env=os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said = []
    with process, process.stdout:
        for line in process.stdout:
            said.append(line)
            if "| loss " in line and len(said) < 10_000:
                process.send_signal(signal.SIGINT)
                break
        said += process.stdout.readlines()
        assert process.wait(timeout=30) == 0, "".join(said)
    text = "".join(said)
    assert "stopping: this step is finished and saved first" in text
    last = metrics(tmp_path)[-1]["step"]
    assert f"stopped after step {last}" in text
    assert newest_checkpoint(tmp_path).name == f"step_{last:08d}"
