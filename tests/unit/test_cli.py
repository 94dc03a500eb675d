"""The command line: verbs, recipes, flags over a recipe, exit codes."""

import contextlib
import dataclasses
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from blockdraft.cli import VERBS, main
from blockdraft.commands.stops import StopRequested, Stops
from blockdraft.config import ConfigError, LossConfig, RunConfig, to_json
from blockdraft.recipes import RECIPES, list_recipes, load_recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Flags of the stand-in commands."""

    out: str = "here"
    trace: int = 0


class Calls(list[tuple[Any, ...]]):
    """What the stand-in commands were called with, and what they do then."""

    result: int = 0
    error: BaseException | None = None

    def run(self, *arguments: Any) -> int:
        self.append(arguments)
        if self.error is not None:
            raise self.error
        return self.result


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls()
    for verb in VERBS.values():
        module = ModuleType(verb.module, "A stand-in.")
        vars(module).update(Options=Options, run=made.run)
        monkeypatch.setitem(sys.modules, verb.module, module)
    return made


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert main([]) == 0
    assert capsys.readouterr().out == text
    assert all(f"  {name} " in text and verb.help in text for name, verb in VERBS.items())


def test_a_verb_runs_with_its_own_flags_and_returns_its_exit_code(calls: Calls) -> None:
    calls.result = 3
    assert main(["export", "--out", "there"]) == 3
    assert calls == [(Options(out="there"),)]


def test_an_unknown_verb_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evalute"]) == 2
    assert "did you mean evaluate?" in capsys.readouterr().err
    assert main(["zzz"]) == 2
    assert "blockdraft --help lists them" in capsys.readouterr().err


def test_an_unknown_flag_ends_with_code_2(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["export", "--outt", "there"])
    assert stop.value.code == 2
    assert "--outt" in capsys.readouterr().err
    assert calls == []


def test_what_the_user_can_mend_is_a_message_without_traceback(
    calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    calls.error = ConfigError("data.train must be a store, found nothing")
    assert main(["prepare"]) == 2
    assert capsys.readouterr().err == "error: data.train must be a store, found nothing\n"


def test_ctrl_c_ends_with_code_130(calls: Calls) -> None:
    calls.error = KeyboardInterrupt()
    assert main(["generate"]) == 130


def test_any_other_error_keeps_its_traceback(calls: Calls) -> None:
    calls.error = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        main(["evaluate"])


def test_train_without_a_recipe_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text and line in text for name, line in list_recipes().items())
    assert main(["train", "--optim.lr", "3e-4"]) == 2
    assert "expects a recipe before the flags, found --optim.lr" in capsys.readouterr().err


def test_flags_of_train_stand_over_the_recipe(calls: Calls) -> None:
    flags = "--optim.lr 3e-4 --runtime.targets cuda:0 cuda:1 --drafter.target-layer-ids 1 2 --steps None --trace 5"
    assert main(["train", "smollm2_demo", *flags.split()]) == 0
    recipe = RECIPES["smollm2_demo"]()
    expected = dataclasses.replace(
        recipe,
        steps=None,
        optim=dataclasses.replace(recipe.optim, lr=3e-4),
        runtime=dataclasses.replace(recipe.runtime, targets=("cuda:0", "cuda:1")),
        drafter=dataclasses.replace(recipe.drafter, target_layer_ids=(1, 2)),
    )
    ((config, options, stops),) = calls
    assert (config, options) == (expected, Options(trace=5))
    assert isinstance(stops, Stops)


def test_flags_take_none_empty_tuples_choices_and_switches(calls: Calls) -> None:
    flags = "--drafter.target_layer_ids None --trackers wandb trackio --runtime.keep_features --optim.betas 0.8 0.9"
    assert main(["train", "tiny", *flags.split()]) == 0
    config = calls[0][0]
    assert config.drafter.target_layer_ids is None
    assert config.trackers == ("wandb", "trackio")
    assert config.runtime.keep_features is True
    assert config.optim.betas == (0.8, 0.9)
    assert main(["train", "tiny", "--trackers"]) == 0
    assert calls[1][0].trackers == ()


@pytest.mark.parametrize("flags", ["--optim.lr fast", "--target.dtype float16", "--optim.betas 0.9", "--steps 1.5"])
def test_a_flag_of_the_wrong_type_is_refused(calls: Calls, flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", "tiny", *flags.split()])
    assert stop.value.code == 2
    assert flags.split()[0] in capsys.readouterr().err
    assert calls == []


def test_a_recipe_file_is_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from blockdraft.config import RunConfig\n"
        "def recipe() -> RunConfig: return RunConfig(steps=1)\n"
        "def longer() -> RunConfig: return RunConfig(steps=2)\n",
        encoding="utf-8",
    )
    assert load_recipe(str(path)) == RunConfig(steps=1)
    assert load_recipe(f"{path}:longer") == RunConfig(steps=2)


def test_a_saved_config_is_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(to_json(RunConfig(steps=9)), encoding="utf-8")
    assert load_recipe(str(path)) == RunConfig(steps=9)


def test_a_recipe_that_is_not_there_is_refused_with_what_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown recipe 'papre', known: tiny, .*; did you mean paper\?"):
        load_recipe("papre")
    with pytest.raises(ConfigError, match=r"one of your own is FILE\.py"):
        load_recipe("zzz")
    for name in ("none.py", "none.py:mine", "none.json"):
        with pytest.raises(ConfigError, match="no such file"):
            load_recipe(str(tmp_path / name))


def test_a_recipe_file_without_the_function_names_those_it_has(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def other(): return 3\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"expected a function recipe\(\) -> RunConfig, found the functions other"):
        load_recipe(str(path))
    with pytest.raises(ConfigError, match="must return a RunConfig, found int"):
        load_recipe(f"{path}:other")
    path.write_text("recipe = 3\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="found no function"):
        load_recipe(str(path))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_before_the_first_step_is_no_error(
    calls: Calls, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)

    class Broken(RuntimeError):
        """What an import that a stop broke off may raise."""

    def stopped(_config: RunConfig, _options: Options, stops: Stops) -> int:
        with contextlib.suppress(StopRequested):
            os.kill(os.getpid(), number)
            while not stops.count:
                pass
        raise Broken

    sys.modules[VERBS["train"].module].run = stopped  # type: ignore[attr-defined]
    assert main(["train", "tiny"]) == 0
    assert "nothing was trained, nothing to save" in capsys.readouterr().out
    # Handlers are gone with the command, and errors without a stop are errors.
    assert signal.getsignal(number) is before
    calls.error = Broken()
    sys.modules[VERBS["train"].module].run = calls.run  # type: ignore[attr-defined]
    with pytest.raises(Broken):
        main(["train", "tiny"])


def test_a_second_signal_leaves_at_once(calls: Calls) -> None:
    def stopped(_config: RunConfig, _options: Options, stops: Stops) -> int:
        stops.ask = lambda: None
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        return 0

    sys.modules[VERBS["train"].module].run = stopped  # type: ignore[attr-defined]
    assert main(["train", "tiny"]) == 130


def test_a_reader_that_leaves_ends_the_command_without_a_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "blockdraft.cli", "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_run_goes_on_when_its_reader_leaves():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", "from blockdraft.commands.train import _say; _say('a'); _say('b')"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert done.returncode == 0
    assert done.stderr == "nobody reads the output any more; the run goes on, its run directory has the metrics\n"


def test_the_config_of_a_copied_run_is_said_to_name_the_first_place(
    calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "metrics.jsonl").touch()
    (copy / "config.json").write_text(to_json(RunConfig(run_dir=str(tmp_path / "first"))))
    assert main(["train", str(copy / "config.json")]) == 0
    said = f"config.json names the run directory {tmp_path / 'first'}; to go on in {copy} add --run-dir {copy}\n"
    assert capsys.readouterr().err.endswith(said)
    for chosen in (copy, tmp_path / "new"):
        assert main(["train", str(copy / "config.json"), "--run-dir", str(chosen)]) == 0
    (copy / "metrics.jsonl").unlink()
    assert main(["train", str(copy / "config.json")]) == 0
    assert capsys.readouterr().err == ""


def test_train_names_the_flags_that_do_nothing_and_goes_on(
    calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["train", "tiny"]) == 0
    assert main(["train", "tiny", "--steps", "None", "--epochs", "3"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["train", "tiny", "--epochs", "3"]) == 0
    assert capsys.readouterr().err == (
        "note: epochs 3.0 does nothing as things stand: expected no steps, found steps 4\n"
    )
    # A run of an earlier day with such a field can be resumed.
    file = tmp_path / "config.json"
    file.write_text(to_json(RunConfig(loss=LossConfig(objective="dpace", gamma=2.0))))
    assert main(["train", str(file)]) == 0
    assert capsys.readouterr().err == (
        "note: loss.gamma 2.0 does nothing as things stand: expected loss.objective ce or kl, found loss.objective "
        "dpace\n"
    )
    assert len(calls) == 4


def test_a_broken_connection_is_no_reader_that_left(calls: Calls, monkeypatch: pytest.MonkeyPatch):
    calls.error = BrokenPipeError(errno.EPIPE, "a server's")
    with pytest.raises(BrokenPipeError, match="a server's"), Path(os.devnull).open("w") as read:
        monkeypatch.setattr(sys, "stdout", read)
        main(["export"])


def test_closed_output_is_no_fault():
    command = [sys.executable, "-m", "blockdraft.cli", "--help"]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command], timeout=60, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EEXIST])
def test_a_place_that_takes_no_file_is_a_message(calls: Calls, capsys: pytest.CaptureFixture[str], number: int):
    calls.error = OSError(number, os.strerror(number), "there/file")
    assert main(["export"]) == 2
    assert capsys.readouterr().err.startswith(f"error: there/file: {os.strerror(number)}; make room or rights there")


def test_other_faults_of_files_keep_their_traceback(calls: Calls):
    calls.error = FileNotFoundError(errno.ENOENT, "gone", "inside")
    with pytest.raises(FileNotFoundError):
        main(["export"])
