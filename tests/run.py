"""The whole suite, for `make test`: most files two at a time, then what must be alone, and one line about all of it.

usage: python tests/run.py [PATH ...]

Marked `alone`: races, that show within seconds or not at all; limits of seconds; the memory of the process. On Linux on
x86-64 everything is there that a race needs, so that a skip among these is a failure.
"""

import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

PATHS: Final = ("tests/unit", "tests/integration", "tests/golden")
# A test that kills its process, as one that hangs does, would be tried again and again. Two share the cores: each gets
# twice the time before it counts as hanging.
BESIDE: Final = ("-m", "not alone", "-n", "2", "--dist", "loadfile", "--max-worker-restart", "0", "--timeout", "240")
ALONE: Final = ("-m", "alone")
WHAT: Final = ("tests", "failures", "errors", "skipped")
NOTHING_CHOSEN: Final = 5
"""Exit code of pytest when no test is left."""


class Found(NamedTuple):
    """What one or both runs came to."""

    passed: int
    failed: int
    skipped: int
    code: int


def run(paths: Sequence[str], options: Sequence[str]) -> Found:
    """One run of pytest; a run that dies leaves no results, and its exit code says so."""
    with tempfile.TemporaryDirectory() as directory:
        results = Path(directory) / "results.xml"
        command = [sys.executable, "-m", "pytest", *paths, *options, f"--junitxml={results}"]
        # Two processes share the cores, and a test's own threads are enough.
        code = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode
        suites = ElementTree.parse(results).getroot().iter("testsuite") if results.is_file() else ()
        counts = [{name: int(suite.attrib[name]) for name in WHAT} for suite in suites]
    tests, failures, errors, skipped = (sum(count[name] for count in counts) for name in WHAT)
    failed = failures + errors
    return Found(tests - failed - skipped, failed, skipped, 0 if code == NOTHING_CHOSEN else code)


def must_not_skip() -> bool:
    """Whether all that races need is made for this machine."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def main(paths: Sequence[str]) -> int:
    """Both runs, whatever the first comes to; 0 when all is well."""
    started = time.monotonic()
    beside, alone = run(paths, BESIDE), run(paths, ALONE)
    passed, failed, skipped, _ = (sum(both) for both in zip(beside, alone, strict=True))
    seconds = time.monotonic() - started
    errors = []
    if any(part.code and not part.failed for part in (beside, alone)):
        errors.append("a part of the suite died, was interrupted or could not be read: see above")
    if alone.skipped and must_not_skip():
        errors.append(f"{alone.skipped} of the tests marked alone were skipped, which none may be on this machine")
    if not passed + failed:
        errors.append("no test ran")
    sys.stdout.write("".join(f"{error}\n" for error in errors))
    # What no test tells of is an error in the last line too: who reads that one alone must not take it for well.
    counted = ((failed, "failed"), (passed, "passed"), (skipped, "skipped"), (len(errors), "error"))
    counts = ", ".join(f"{count} {what}{'s' * (what == 'error' and count > 1)}" for count, what in counted if count)
    # As pytest closes a run of its own, for whoever looks for that line.
    sys.stdout.write(f"{f' {counts} in {seconds:.2f}s ':=^80}\n")
    return 1 if errors or failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or PATHS))
