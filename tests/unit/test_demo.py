"""The demo's parts that can be checked without a model: what is held out, and how the numbers are gathered."""

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from blockdraft import cli
from blockdraft.commands import control

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def examples_import_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("num_train", [100, 320, 640])
def test_held_out_prompts_are_what_their_names_say(num_train: int) -> None:
    train, unseen_pair, unseen_words = load("demo_prompts").split_pairs(num_train, 16)
    assert (len(set(train)), len(set(unseen_pair)), len(set(unseen_words))) == (num_train, 16, 16)
    verbs, objects = {verb for verb, _ in train}, {what for _, what in train}
    assert not set(train) & set(unseen_pair)
    assert all(verb in verbs and what in objects for verb, what in unseen_pair)
    assert not any(verb in verbs or what in objects for verb, what in unseen_words)


def test_more_prompts_than_the_words_give_are_refused() -> None:
    with pytest.raises(SystemExit, match="held-out words: 100 prompts wanted"):
        load("demo_prompts").split_pairs(320, 100)


def test_the_demos_commands_are_such_that_blockdraft_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    demo, commands = load("demo"), []
    monkeypatch.setattr(demo.Demo, "run", lambda _self, _stage, command: commands.append(command))
    monkeypatch.setattr(sys, "argv", ["demo.py", "--runs-dir", str(tmp_path / "runs")])
    demo.main()
    verbs = [command[1] for command in commands if command[0] == "blockdraft"]
    assert verbs == ["regenerate", "prepare", "train", "export", "evaluate", "evaluate", "report"]
    begun = []
    # What a verb does behind its flags and first checks is other tests' subject.
    monkeypatch.setattr(control, "Control", lambda config, *_args, **_more: begun.append(config) or Ended())
    for verb in ("regenerate", "prepare", "evaluate"):
        monkeypatch.setattr(
            importlib.import_module(f"blockdraft.commands.{verb}"),
            "run",
            lambda options, *_stops: begun.append(options) or 0,
        )
    for command in commands:
        if command[0] == "blockdraft" and command[1] not in ("export", "report"):
            assert cli.main(command[1:]) == 0, command
    assert len(begun) == 5


class Ended:
    """A run that is over at once."""

    def run(self) -> int:
        return 0


def write_results(runs: Path) -> None:
    """What training and evaluation leave, with numbers that tell where they came from."""

    def evaluation(accept: float, ngram: float, **more: Any) -> dict[str, Any]:
        found = {"acceptance_length": accept, "rounds": 100, "num_prompts": 16, "settings": {"dtype": "float32"}}
        found["controls"] = {"ngram": {"acceptance_length": ngram}, "prompt_lookup": {"acceptance_length": 1.1}}
        return found | more

    (runs / "train").mkdir()
    lines: list[dict[str, float]] = [
        {"step": 0, "eval/unseen_pair": 1.02, "eval/unseen_words": 1.04},
        {"step": 1, "loss": 10.0},
        {"step": 85, "eval/unseen_pair": 2.0, "eval/unseen_words": 1.5},
    ]
    (runs / "train" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sets = {"unseen_pair": evaluation(2.4, 2.7), "unseen_words": evaluation(1.9, 2.0)}
    (runs / "evaluate.json").write_text(json.dumps(evaluation(2.2, 2.4, sets=sets)))
    speeds = {"tokens_per_second": 40.0, "plain_tokens_per_second": 30.0, "speedup": 1.333}
    (runs / "evaluate_decode.json").write_text(json.dumps(evaluation(2.1, 0.0, lossless=True, **speeds)))
    (runs / "seconds.json").write_text(json.dumps({"train": 200.0, "decode": 10.5}))


def test_the_summary_takes_each_number_from_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_results(tmp_path)
    load("demo_summary").main(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    found = summary["acceptance_length"]
    assert found["before"] == pytest.approx(1.03)
    assert (found["after_unseen_pair"], found["after_unseen_words"]) == (2.4, 1.9)
    assert (found["ngram_control_pair"], found["ngram_control_words"]) == (2.7, 2.0)
    assert (summary["rounds"], summary["prompts"], summary["steps"]) == (200, 32, 85)
    assert summary["lossless_float32"] is True
    assert summary["seconds"] == 210.5
    drawn = (tmp_path / "acceptance.svg").read_text(encoding="utf-8")
    texts = [element.text for element in ElementTree.fromstring(drawn).iter() if element.tag.endswith("text")]
    assert {"2.40  drafter, unseen pair of seen words", "2.70  5-gram table, unseen pair of seen words"} <= set(texts)
    assert {"1.90  drafter, both words unseen", "2.00  5-gram table, both words unseen"} <= set(texts)
    assert drawn.count('class="line"') == 2
    assert "NOT equal" not in capsys.readouterr().out


def test_a_run_without_its_first_evaluation_is_refused(tmp_path: Path) -> None:
    write_results(tmp_path)
    (tmp_path / "train" / "metrics.jsonl").write_text(json.dumps({"step": 85, "eval/unseen_pair": 2.0}) + "\n")
    with pytest.raises(SystemExit, match="from step 0 on"):
        load("demo_summary").main(tmp_path)
