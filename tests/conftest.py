"""Settings of the whole suite: offline, few threads, reproducible examples."""

import os

# Before transformers is imported: no test reaches for a hub, and none reports to a tracker.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import hypothesis
import pytest
import torch


def pytest_configure() -> None:
    # Tiny tensors gain nothing from a second thread, and workers of a run must not fight for the cores.
    torch.set_num_threads(1)
    # No verdict on speed (the machine may be shared); the same examples on every run.
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile(
        "suite", deadline=None, derandomize=True, print_blob=True, suppress_health_check=slow
    )
    hypothesis.settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
