"""The train command from outside: recipe, flags, run directory, metrics, evaluation, trackers."""

import dataclasses
import json
import sys
from types import SimpleNamespace

import pytest

from blockdraft import cli
from blockdraft.commands import train
from blockdraft.commands.control import Control
from blockdraft.commands.tracking import MetricsFile
from blockdraft.config import ConfigError, read_config
from blockdraft.data.conversations import write_conversations
from integration.tiny_run import Files, make_files, metrics, run_control, tiny_config
from tiny_chat import chat


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return make_files(tmp_path_factory.mktemp("train"))


def flags(files: Files, run_dir, *more: str) -> list[str]:
    wanted = ["train", "tiny", "--run-dir", str(run_dir), "--target.path", str(files.target)]
    return [*wanted, "--data.train", str(files.store), *more]


def test_the_command_trains_and_its_saved_config_trains_the_same(files, tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    assert cli.main(flags(files, first, "--steps", "3", "--optim.lr", "2e-3")) == 0
    said = capsys.readouterr().out
    assert "step 3/3 | loss " in said
    assert "drafter side limits this run" in said or "target side limits this run" in said
    assert f"done: 3 steps, checkpoints in {first / 'checkpoints'}" in said
    saved = read_config(first / "config.json")
    assert (saved.steps, saved.optim.lr, saved.data.row_length) == (3, 2e-3, 64)
    assert cli.main(["train", str(first / "config.json"), "--run-dir", str(second)]) == 0
    assert metrics(first) == metrics(second)


def test_a_step_line_has_its_fields_in_order(files, tmp_path):
    ran = run_control(tiny_config(files, tmp_path, steps=2))
    (line,) = (one for one in ran.lines if one.startswith("step 2/2"))
    names = [part.split()[0] for part in line.split(" | ")]
    assert names[:4] == ["step", "loss", "accept", "lr"]
    assert names[-3:] == ["target", "channel", "eta"]
    assert line.split(" | ")[4].endswith(" tok/s")


def test_the_console_is_thinned_and_the_file_is_not(files, tmp_path):
    said: list[str] = []
    control = Control(tiny_config(files, tmp_path, steps=5), tmp_path, said.append, line_seconds=1e9)
    assert control.run() == 0
    assert [line.split(" | ")[0] for line in said if line.startswith("step ")] == ["step 5/5"]
    assert len(metrics(tmp_path)) == 5


def test_held_out_acceptance_is_measured_before_during_and_after(files, tmp_path):
    talks = [chat("Say ab."), chat("Count."), chat("Go on."), chat("Never read.")]
    write_conversations(tmp_path / "pairs.jsonl", talks)
    write_conversations(tmp_path / "words.jsonl", talks[:1])
    prompts = (str(tmp_path / "pairs.jsonl"), str(tmp_path / "words.jsonl"))
    evaluation = {"prompts": prompts, "every": 2, "num_prompts": 3, "max_new_tokens": 12}
    ran = run_control(tiny_config(files, tmp_path / "run", steps=5, eval=evaluation))
    lines = [line for line in metrics(tmp_path / "run") if "eval/pairs" in line]
    assert [line["step"] for line in lines] == [0, 2, 4, 5]
    assert all(line["eval/pairs"] >= 1.0 and line["eval/words"] >= 1.0 for line in lines)
    # Accepting slot k takes slot k - 1; all of them together are the acceptance length without the bonus token.
    for line in lines:
        shares = line["eval_slots/pairs"]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) + 1 == pytest.approx(line["eval/pairs"], abs=1e-3)
    assert len(ran.control.built.tapes["pairs"]) == 3
    assert sum("evaluation after step" in line for line in ran.lines) == 4
    plain = run_control(tiny_config(files, tmp_path / "plain", steps=5))
    steps = [line for line in metrics(tmp_path / "run") if "loss" in line]
    assert steps == metrics(plain.run_dir), "measuring changed the run"


def test_a_drafter_goes_on_from_an_export(files, tmp_path):
    run_control(tiny_config(files, tmp_path / "first", steps=3))
    assert cli.main(["export", str(tmp_path / "first"), "--output", str(tmp_path / "export")]) == 0
    config = tiny_config(files, tmp_path / "second", steps=1, drafter={"init_from": str(tmp_path / "export")})
    first, second = metrics(tmp_path / "first"), metrics(run_control(config).run_dir)
    assert second[0]["loss"] != first[0]["loss"]
    other = tiny_config(
        files, tmp_path / "third", drafter={"init_from": str(tmp_path / "export"), "intermediate_size": 64}
    )
    with pytest.raises(ConfigError, match=r"its shape differs: intermediate_size 48 \(this run: 64\)"):
        train.run(other, train.Options())


def test_a_draft_vocabulary_restricts_the_head(files, tmp_path):
    ran = run_control(tiny_config(files, tmp_path, steps=2, loss={"draft_vocab": "data"}))
    ids = ran.control.built.loader.store.seen_ids()
    assert ran.control.built.steps[0].head.vocab_size == len(ids) < 300
    assert any(f"draft vocabulary: {len(ids)} ids" in line for line in ran.lines)


def test_epochs_become_steps(files, tmp_path):
    ran = run_control(tiny_config(files, tmp_path, steps=None, epochs=1.0))
    assert len(metrics(ran.run_dir)) == ran.control.built.loader.counts.fills


def test_trackers_get_every_step_and_are_closed(files, tmp_path, monkeypatch):
    calls = []
    fake = SimpleNamespace(
        init=lambda **options: calls.append(("init", sorted(options))),
        log=lambda values, step: calls.append(("log", step, values["loss"])),
        finish=lambda: calls.append(("finish",)),
    )
    monkeypatch.setitem(sys.modules, "trackio", fake)
    ran = run_control(tiny_config(files, tmp_path, steps=3, trackers=("trackio",)))
    losses = [line["loss"] for line in metrics(ran.run_dir)]
    logged = [("log", step, loss) for step, loss in enumerate(losses, 1)]
    assert calls == [("init", ["config", "name", "project"]), *logged, ("finish",)]


def test_a_tracker_that_is_not_installed_is_named_with_its_extra(files, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"--trackers wandb needs its package: pip install 'blockdraft\[wandb\]'"):
        train.run(tiny_config(files, tmp_path, trackers=("wandb",)), train.Options())
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_metrics_file_keeps_what_a_resumed_run_will_not_write_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "eval/a": 1}\n{"step": 1}\n\n{"step": 2}\n{"step": 3}\nbroken\n{"loss": 1}\n{"st')
    file = MetricsFile(path, 2)
    file.write({"step": 3, "loss": float("nan"), "accept": 1.5})
    assert path.read_text().splitlines()[-1] == '{"step": 3, "loss": null, "accept": 1.5}'
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2, 3]
    file.close()


def test_a_crash_while_metrics_are_cut_loses_none(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')

    def full(*_arguments: object, **_more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(OSError, match="No space left"):
        MetricsFile(path, 1).write({"step": 2})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_the_first_step_of_a_run_is_near_ln_v(tmp_path):
    # The tiny targets one by one are in the unit tests of training/start.py; here through the command.
    for name in ("llama", "gemma3"):
        files = make_files(tmp_path / name, name)
        ran = run_control(tiny_config(files, tmp_path / name / "run", steps=1, drafter={"target_layer_ids": (0, 4)}))
        assert metrics(ran.run_dir)[0]["loss"] == pytest.approx(5.7038, rel=0.05)
        assert dataclasses.asdict(read_config(ran.run_dir / "config.json"))["steps"] == 1
