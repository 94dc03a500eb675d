"""The run of the whole suite: both parts always run, and the last line and the exit code tell of both."""

import subprocess
import sys
from pathlib import Path

import pytest

import run
from run import Found

SCRIPT = Path(run.__file__)


@pytest.mark.parametrize(
    ("beside", "alone", "code", "words"),
    [
        (Found(7, 0, 1, 0), Found(2, 0, 0, 0), 0, ["= 9 passed, 1 skipped in 0."]),
        (Found(7, 1, 0, 1), Found(2, 0, 0, 0), 1, ["= 1 failed, 9 passed in 0."]),
        (Found(7, 0, 0, 0), Found(1, 1, 0, 1), 1, ["= 1 failed, 8 passed in 0."]),
        # Interrupted, or broken before it wrote results: no test tells of it.
        (Found(0, 0, 0, 2), Found(2, 0, 0, 0), 1, ["a part of the suite died", "= 2 passed, 1 error in 0."]),
        (Found(9, 0, 0, 0), Found(0, 0, 0, 1), 1, ["a part of the suite died", "= 9 passed, 1 error in 0."]),
        (Found(7, 1, 0, 1), Found(0, 0, 0, 1), 1, ["a part of the", "= 1 failed, 7 passed, 1 error in 0."]),
        (Found(0, 0, 0, 0), Found(0, 0, 0, 0), 1, ["no test ran", "= 1 error in 0."]),
        (Found(0, 0, 0, 4), Found(0, 0, 0, 4), 1, ["a part of the", "no test ran", "= 2 errors in 0."]),
        (Found(0, 1, 0, 1), Found(0, 0, 0, 0), 1, ["= 1 failed in 0."]),
        (
            Found(7, 0, 0, 0),
            Found(2, 0, 1, 0),
            1,
            ["1 of the tests marked alone were", "= 9 passed, 1 skipped, 1 error in 0."],
        ),
    ],
)
def test_the_last_line_and_the_exit_code_tell_of_both_parts(monkeypatch, capsys, beside, alone, code, words):
    asked = []

    def found(paths: list[str], options: tuple[str, ...]) -> Found:
        asked.append((paths, options))
        return beside if options == run.BESIDE else alone

    monkeypatch.setattr(run, "run", found)
    monkeypatch.setattr(run, "must_not_skip", lambda: True)
    assert run.main(["here"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(words)
    assert all(word in line for word, line in zip(words, lines, strict=True)), lines
    assert lines[-1].startswith("====") and lines[-1].endswith("====")
    assert asked == [(["here"], run.BESIDE), (["here"], run.ALONE)]


def test_elsewhere_than_on_linux_a_race_may_be_skipped(monkeypatch, capsys):
    monkeypatch.setattr(run, "run", lambda _paths, options: Found(1, 0, int(options == run.ALONE), 0))
    monkeypatch.setattr(run, "must_not_skip", lambda: False)
    assert run.main(["here"]) == 0
    assert "= 2 passed, 1 skipped in" in capsys.readouterr().out


def test_what_dies_fails_or_cannot_be_read_is_counted_and_the_rest_runs(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone: as here\n")
    (tmp_path / "test_dies.py").write_text("import os\n\ndef test_it():\n    os._exit(3)\n")
    (tmp_path / "test_fails.py").write_text("def test_it():\n    assert False\n\ndef test_passes():\n    pass\n")
    (tmp_path / "test_race.py").write_text(
        "import pytest\n\npytestmark = pytest.mark.alone\n\ndef test_it():\n    pass\n\n"
        "def test_nothing_beside(pytestconfig):\n    assert not pytestconfig.getoption('numprocesses')\n"
    )
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    last = done.stdout.splitlines()[-1]
    assert "= 2 failed, 3 passed in " in last


def test_a_part_that_dies_is_an_error_of_the_last_line(tmp_path):
    # As a test that hangs ends its process; what was well in the other part must not hide it.
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone: as here\n")
    (tmp_path / "test_well.py").write_text("def test_it():\n    pass\n")
    (tmp_path / "test_race.py").write_text(
        "import os\nimport pytest\n\npytestmark = pytest.mark.alone\n\ndef test_it():\n    os._exit(1)\n"
    )
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "= 1 passed, 1 error in " in done.stdout.splitlines()[-1]


def test_races_are_among_those_that_may_not_be_skipped():
    races = sorted((SCRIPT.parent / "unit" / "runtime").glob("test_guards_*.py"))
    assert [file.name for file in races] == ["test_guards_torch.py", "test_guards_triton.py"]
    assert all("pytestmark = [pytest.mark.alone, " in file.read_text(encoding="utf-8") for file in races)
