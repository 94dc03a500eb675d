"""The best checkpoint of a run: kept, and chosen anew where a resumed run measures on something else."""

import pytest

from blockdraft.commands import boundary
from blockdraft.data.conversations import write_conversations
from blockdraft.training.best import read_best
from blockdraft.training.checkpoint import list_checkpoints
from integration.tiny_run import Files, make_files, run_control, tiny_config
from tiny_chat import chat


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return make_files(tmp_path_factory.mktemp("best"))


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory) -> dict[str, object]:
    path = tmp_path_factory.mktemp("prompts") / "pairs.jsonl"
    write_conversations(path, [chat("Say ab."), chat("Count.")])
    return {"prompts": (str(path),), "every": 2, "max_new_tokens": 12}


def test_the_best_checkpoint_is_kept_and_chosen_anew(files, tmp_path, evaluation, monkeypatch):
    lengths = iter([1.0, 1.5, 3.0, 2.0, 2.5])
    found = boundary.evaluate

    def evaluate(*arguments):
        value = found(*arguments)
        (name,) = value.sets
        return value._replace(sets={name: value.sets[name]._replace(acceptance_length=next(lengths))})

    monkeypatch.setattr(boundary, "evaluate", evaluate)
    changes = {"steps": 8, "save_every": 2, "keep_last": 1, "eval": evaluation}
    ran = run_control(tiny_config(files, tmp_path, **changes))
    assert [path.name[-1] for path in list_checkpoints(tmp_path / "checkpoints")] == ["4", "8"]
    best = read_best(tmp_path / "checkpoints")
    assert best is not None
    assert best[:2] == (4, 3.0)
    assert any("best checkpoint so far: step 4" in line for line in ran.lines)
    assert best.measured_on is not None
    assert best.measured_on.max_new_tokens == 12
    # Resumed with fewer prompts: what they give is not compared with what all of them gave.
    lengths = iter([1.2])
    fewer = changes | {"steps": 10, "eval": evaluation | {"every": 10, "num_prompts": 1}}
    config = tiny_config(files, tmp_path, **fewer)
    resumed = run_control(config, resume=list_checkpoints(tmp_path / "checkpoints")[-1])
    best = read_best(tmp_path / "checkpoints")
    assert best is not None
    assert best[:2] == (10, 1.2)
    assert best.measured_on is not None
    assert best.measured_on.num_prompts == 1
    assert sum("the best checkpoint is chosen anew: step 4" in line for line in resumed.lines) == 1
