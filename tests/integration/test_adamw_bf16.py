"""A run whose moments are kept in bfloat16 learns as one with float32 moments does."""

import dataclasses

from safetensors.torch import load_file

from blockdraft.data.template import Encoded
from blockdraft.training.checkpoint import OPTIMIZER, newest_checkpoint
from integration.tiny_run import make_files, metrics, run_control, tiny_config


def test_the_curve_is_nearer_than_that_of_another_seed(tmp_path):
    # One document that repeats every 16 tokens: a drafter learns it within some steps.
    document = Encoded([3 + 7 * (n % 16) for n in range(176)], [0] * 4 + [1] * 172)
    files = make_files(tmp_path, documents=[document])
    config = tiny_config(
        files,
        tmp_path / "run",
        steps=50,
        save_every=50,
        data={"row_length": 192, "num_rows": 1, "num_anchors": 40, "target_tokens": 192},
        optim={"lr": 3e-3},
    )
    curves, kinds = {}, {}
    for name, optimizer, seed in (("float32", "adamw", 0), ("bfloat16", "adamw_bf16", 0), ("seed", "adamw", 1)):
        optim = dataclasses.replace(config.optim, optimizer=optimizer)
        ran = run_control(dataclasses.replace(config, run_dir=str(tmp_path / name), optim=optim, seed=seed))
        curves[name] = [line["loss"] for line in metrics(ran.run_dir)]
        saved = load_file(newest_checkpoint(ran.run_dir) / OPTIMIZER)
        kinds[name] = {str(value.dtype) for key, value in saved.items() if ".exp_avg" in key}
    assert kinds == {"float32": {"torch.float32"}, "bfloat16": {"torch.bfloat16"}, "seed": {"torch.float32"}}

    def apart(name: str) -> float:
        return sum(abs(a - b) for a, b in zip(curves[name], curves["float32"], strict=True)) / len(curves[name])

    assert curves["float32"][-1] < curves["float32"][0] - 0.3
    assert 0 < apart("bfloat16") < 0.1 * apart("seed")
