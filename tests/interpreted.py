"""Triton's interpreter: kernels run on a CPU, in a process of their own, since the choice is made at import."""

import os
import subprocess
import sys


def run_interpreted(code: str) -> None:
    """Runs Python that compares kernels with their reference and prints `interpreted alike` when they agree."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(["src", "tests"])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert "interpreted alike" in done.stdout
