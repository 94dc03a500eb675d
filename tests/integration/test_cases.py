"""Cases of the specification that need a whole run: overfitting, padding rows, skipped documents, foreign labels."""

import numpy as np
import pytest
import torch

from blockdraft.config import TargetConfig
from blockdraft.data.template import Encoded
from blockdraft.decoding.replay import record_tapes, replay
from blockdraft.decoding.speculative import generate
from blockdraft.models.target import Target
from blockdraft.training.checkpoint import load_drafter
from integration.tiny import plain_answer
from integration.tiny_run import Files, make_files, metrics, random_documents, run_control, save_run_target, tiny_config

BLOCK_SIZE = 8
LAYERS = (1, 3)
PROMPT = [5, 77, 130, 9, 40]


def load(files: Files) -> Target:
    return Target.load(TargetConfig(path=str(files.target), dtype="float32"), layer_ids=LAYERS)


def own_answer(root, num_tokens: int) -> list[int]:
    save_run_target(root / "target")
    return plain_answer(load(Files(root / "target", root / "store")), PROMPT, num_tokens)


@pytest.mark.slow
def test_overfitting_one_conversation_drafts_nearly_whole_blocks(tmp_path):
    # Case 4. A shift by one anywhere between target, slot, labels and decoding would show here.
    answer = own_answer(tmp_path, 22 * BLOCK_SIZE)
    assert len(set(answer)) > 20, "an answer that repeats itself is no test"
    document = Encoded(PROMPT + answer, [0] * len(PROMPT) + [1] * len(answer))
    files = make_files(tmp_path, documents=[document])
    config = tiny_config(
        files,
        tmp_path / "run",
        steps=120,
        save_every=120,
        drafter={"num_layers": 2, "block_size": BLOCK_SIZE, "target_layer_ids": LAYERS},
        data={"row_length": 192, "num_rows": 1, "num_anchors": 40, "target_tokens": 192},
        optim={"optimizer": "muon", "lr": 0.02, "norm_lr": 0.01, "warmup": 0.05},
    )
    ran = run_control(config)
    lines = metrics(ran.run_dir)
    assert lines[0]["loss"] > 5
    assert lines[-1]["accept"] > 0.9 * BLOCK_SIZE
    target, drafter = load(files), load_drafter(ran.run_dir)
    found = generate(target, drafter, PROMPT, max_new_tokens=len(answer), stop_ids=())
    assert found.token_ids == answer
    acceptance = found.acceptance(BLOCK_SIZE)
    assert acceptance.rounds >= 20
    assert acceptance.acceptance_length >= 0.9 * BLOCK_SIZE
    tapes = record_tapes(target, [PROMPT], max_new_tokens=len(answer), stop_ids=(), batch_size=1)
    assert replay(drafter, target.ends, tapes) == acceptance


def test_a_run_whose_rows_are_mostly_padding_ends_well(tmp_path):
    # Case 5: one short document in four rows; documents without an anchor beside it.
    lonely = Encoded([7] * 20, [0, 1] * 10)
    files = make_files(tmp_path, documents=[lonely, random_documents(2)[1], lonely])
    ran = run_control(tiny_config(files, tmp_path / "run", steps=4, data={"num_rows": 4}))
    assert any("3 documents, 2 skipped (no two supervised tokens in a row)" in line for line in ran.lines)
    assert all(np.isfinite(line["loss"]) and line["blocks"] > 0 for line in metrics(ran.run_dir))
    state = ran.control.built.steps[0].optimizer.state_tensors()
    assert all(torch.isfinite(value).all() for value in state.values())


def test_the_padding_share_is_printed(tmp_path):
    # Case 32; that it is at most a tenth is a test of packing.
    ran = run_control(tiny_config(make_files(tmp_path), tmp_path / "run", steps=1))
    padding = ran.control.built.loader.counts.padding
    assert any(f"{padding.padding / padding.tokens:.1%} of the target's tokens are padding" in one for one in ran.lines)


def test_labels_that_are_not_the_targets_own_are_reported(tmp_path):
    # Case 24.
    ran = run_control(tiny_config(make_files(tmp_path), tmp_path / "run", steps=1))
    (report,) = (line for line in ran.lines if line.startswith("labels that are the target's own greedy choice"))
    assert float(report.split(": ")[1].split("%")[0]) < 10
    assert any(line.startswith("warning: fewer than 70% of the labels") for line in ran.lines)


def test_the_targets_own_answers_bring_no_warning(tmp_path):
    # Case 24, the other way: off by one, this share would be as low as a stranger's.
    answer = own_answer(tmp_path, 40)
    files = make_files(tmp_path, documents=[Encoded(PROMPT + answer, [0] * len(PROMPT) + [1] * len(answer))])
    ran = run_control(tiny_config(files, tmp_path / "run", steps=1))
    assert any("greedy choice: 100.0% of 40" in line for line in ran.lines)
    assert not any("warning" in line for line in ran.lines)


def test_many_short_conversations_get_their_share_of_a_rows_anchors(tmp_path):
    # Case 14, through loader and store.
    draw = np.random.default_rng(0)
    short = [Encoded(draw.integers(3, 250, 12).tolist(), [0] * 4 + [1] * 8) for _ in range(30)]
    long = [Encoded(draw.integers(3, 250, 120).tolist(), [0] * 4 + [1] * 116)]
    files = make_files(tmp_path, documents=[*short, *long])
    data = {"row_length": 512, "num_rows": 1, "num_anchors": 128, "target_tokens": 512, "sort_window": 64}
    ran = run_control(tiny_config(files, tmp_path / "run", steps=1, data=data))
    (fill,) = ran.control.built.loader.fills(0, 1)
    (one,) = fill.passes
    anchor_A = one.anchor_RA[0][one.anchor_RA[0] >= 0]
    assert len(anchor_A) == 128
    counts = one.document_RT[0][anchor_A].bincount()
    assert len(counts) == 31
    assert int(counts.min()) >= 4
