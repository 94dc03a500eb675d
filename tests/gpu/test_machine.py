"""What the doctor says of a machine with GPUs."""

import re
import sys

import pytest
import torch

from blockdraft.runtime.machine import machine_findings

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(120),
]


def test_driver_gpus_and_what_lies_between_them_are_named() -> None:
    found = list(machine_findings())
    sys.stdout.write("\n".join(["", *map(str, found), ""]))
    lines = {finding.check: finding for finding in found}
    assert lines["driver"].verdict == "ok"
    assert re.match(r"CUDA \d+\.\d+ ", lines["driver"].result)
    for index in range(torch.cuda.device_count()):
        assert torch.cuda.get_device_name(index) in lines[f"cuda:{index}"].result
    if torch.cuda.device_count() > 1:
        assert lines["peer access"].verdict == "ok"
