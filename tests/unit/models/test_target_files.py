"""A target whose files are not whole."""

import functools

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from blockdraft.config import ConfigError, TargetConfig
from blockdraft.models.target import Target
from integration.tiny import CONFIGS


@pytest.mark.parametrize("ties", [False, True])
def test_weights_that_no_file_has_are_not_made_up(tmp_path, ties):
    config = CONFIGS["qwen3"]()
    config.tie_word_embeddings = ties
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    # A head that is the embedding is in no file, and missed by nobody.
    load = functools.partial(Target.load, TargetConfig(path=str(tmp_path), dtype="float32"), layer_ids=(1,))
    load()
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    gone = [name for name in tensors if "layers.5." in name]
    save_file({name: value for name, value in tensors.items() if name not in gone}, file, metadata={"format": "pt"})
    more = f"{gone[-1].split('.')[0]}.* and {len(gone) - 3} more; download or copy"
    with pytest.raises(ConfigError, match=rf"expected the weights of the whole model, found none for {more}"):
        load()
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="could not be loaded"):
        load()
