"""`import` and `export --format speculators`: bytes kept, what is read said, what cannot be read refused."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockdraft.cli import main
from blockdraft.commands import export
from blockdraft.config import ConfigError, RunConfig, TargetConfig
from blockdraft.models.formats import load_export, save_export
from blockdraft.training.checkpoint import contents_of, write_checkpoint
from integration.tiny import tiny_drafter, tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3")


@pytest.fixture
def drafter(target):
    return tiny_drafter(target)


def tensor_bytes(directory):
    return {
        name: (tensor.dtype, tensor.view(torch.uint8).numpy().tobytes())
        for name, tensor in load_file(directory / "model.safetensors").items()
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_published_checkpoint_is_written_again_byte_for_byte(drafter, tmp_path, dtype, capsys):
    save_export(drafter, tmp_path / "theirs", dtype)
    file = tmp_path / "theirs" / "config.json"
    config = json.loads(file.read_text())
    # Fewer fields than ours, and some that mean nothing here.
    for name in ("is_causal", "layer_types", "max_window_layers", "rope_parameters"):
        del config[name]
    config |= {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "transformers_version": "4.57.1"}
    file.write_text(json.dumps(config))
    # A quiet NaN, minus zero and an odd name order must survive.
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    tensors["norm.weight"][0], tensors["norm.weight"][1] = float("nan"), -0.0
    save_file(dict(reversed(tensors.items())), tmp_path / "theirs" / "model.safetensors")

    assert main(["import", str(tmp_path / "theirs"), "--output", str(tmp_path / "ours")]) == 0
    assert tensor_bytes(tmp_path / "ours") == tensor_bytes(tmp_path / "theirs")
    assert load_export(tmp_path / "ours").shape == drafter.shape
    printed = capsys.readouterr().out
    assert "theirs: published format" in printed
    assert "2 layers of width 32, block size 8, mask token 100" in printed
    assert f"25 tensors in {str(dtype).removeprefix('torch.')}" in printed


def test_a_checkpoint_in_several_files(drafter, tmp_path):
    save_export(drafter, tmp_path / "whole")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    split = tmp_path / "split"
    split.mkdir()
    (split / "config.json").write_bytes((tmp_path / "whole" / "config.json").read_bytes())
    names = sorted(tensors)
    files = {name: f"model-{i % 2 + 1:05}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, split / file)
    (split / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert main(["import", str(split), "--output", str(tmp_path / "ours")]) == 0
    assert tensor_bytes(tmp_path / "ours") == tensor_bytes(tmp_path / "whole")
    (split / "model-00001-of-00002.safetensors").unlink()
    assert main(["import", str(split), "--output", str(tmp_path / "ours")]) == 2


def test_out_in_speculators_format_and_back(drafter, target, tmp_path, capsys):
    save_export(drafter, tmp_path / "first")
    target.model.save_pretrained(tmp_path / "target")
    arguments = ["--format", "speculators", "--target", str(tmp_path / "target")]
    assert main(["export", str(tmp_path / "first"), "--output", str(tmp_path / "spec"), *arguments]) == 0
    assert "and 7 speculative tokens come" in capsys.readouterr().out
    # As from speculators itself: without the number of the target's layers, which then comes from the target.
    file = tmp_path / "spec" / "config.json"
    config = json.loads(file.read_text())
    assert config["speculators_config"]["verifier"]["architectures"] == ["Qwen3ForCausalLM"]
    assert config.pop("num_target_layers") == 6
    file.write_text(json.dumps(config))
    assert main(["import", str(tmp_path / "spec"), "--output", str(tmp_path / "back")]) == 0
    assert "speculators' format 0.9.0, made for" in capsys.readouterr().out
    assert tensor_bytes(tmp_path / "back") == tensor_bytes(tmp_path / "first")
    assert (tmp_path / "back" / "config.json").read_bytes() == (tmp_path / "first" / "config.json").read_bytes()

    config["speculators_config"]["verifier"]["name_or_path"] = "a/hub-name"
    file.write_text(json.dumps(config))
    assert main(["import", str(tmp_path / "spec"), "--output", str(tmp_path / "no")]) == 2
    assert "name the target by --target" in capsys.readouterr().err
    named = ["--target", str(tmp_path / "target")]
    assert main(["import", str(tmp_path / "spec"), "--output", str(tmp_path / "again"), *named]) == 0


def test_the_target_of_a_run_is_named(drafter, tmp_path):
    from blockdraft.config import OptimConfig
    from blockdraft.training.optim import MasterOptimizer

    optimizer = MasterOptimizer(drafter, OptimConfig())
    config = RunConfig(target=TargetConfig(path="some/target"))
    write_checkpoint(tmp_path / "run" / "checkpoints", contents_of(3, drafter, optimizer, config), 1)
    options = export.Options(source=tmp_path / "run", output=tmp_path / "spec", format="speculators")
    assert export.find_verifier(options).name_or_path == "some/target"
    assert export.run(options) == 0
    with pytest.raises(ConfigError, match=r"no \.gguf file"):
        export.find_verifier(export.Options(source=tmp_path, output=tmp_path, target="x.gguf"))
    with pytest.raises(ConfigError, match="--target goes with"):
        export.run(export.Options(source=tmp_path / "run", output=tmp_path / "o", target="some/target"))


def test_a_target_that_would_not_be_read_is_refused(drafter, tmp_path, capsys):
    save_export(drafter, tmp_path / "theirs")
    arguments = ["import", str(tmp_path / "theirs"), "--output", str(tmp_path / "ours"), "--target", "some/target"]
    assert main(arguments) == 2
    assert "--target some/target does nothing as things stand" in capsys.readouterr().err
    assert main(arguments[:-2]) == 0


def test_an_import_that_differs_leaves_nothing(drafter, tmp_path, monkeypatch):
    save_export(drafter, tmp_path / "theirs")
    monkeypatch.setattr("blockdraft.models.formats.load_export", damaged_once(load_export, "ours"))
    with pytest.raises(RuntimeError, match="the config read back is not the one written"):
        main(["import", str(tmp_path / "theirs"), "--output", str(tmp_path / "ours")])
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def damaged_once(load, name):
    """Reads another shape where that directory, or what is to become it, is read."""

    def read(directory):
        found = load(directory)
        if name in directory.name:
            found.shape = dataclasses.replace(found.shape, block_size=4)
        return found

    return read


def test_import_onto_itself_is_refused(drafter, tmp_path, capsys):
    save_export(drafter, tmp_path)
    assert main(["import", str(tmp_path), "--output", str(tmp_path)]) == 2
    assert "another directory" in capsys.readouterr().err
