"""`blockdraft plan`: from given, estimated and measured rates, for one GPU and for many nodes."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Qwen3Config

from blockdraft.cli import main
from blockdraft.config import OptimConfig, read_config, to_json
from integration.tiny_run import make_files
from unit.runtime.test_stages import write_run


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Qwen3-8B's shapes, without weights."""
    path = tmp_path_factory.mktemp("plan")
    Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(path)  # fmt: skip
    return str(path)


def plan(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    code = main(["plan", "paper", *flags])
    return code, capsys.readouterr().out


def test_given_rates_decide_the_split_and_the_hours(target: str, capsys) -> None:
    rates = ("--target-tok-s", "25000", "--drafter-tok-s", "25000", "--tokens", "1e9")
    code, text = plan(capsys, "--target.path", target, *rates, "--gpus", "8", "--epochs", "6")
    assert code == 0
    assert "rates on one GPU alone, as given" in text
    assert "a target takes 15" in text and "a drafter 2" in text
    assert "tokens/s" in text and "for 1,000,000,000 tokens x 6 epochs" in text
    rows = {int(line.split()[0]): line.split() for line in text.splitlines() if line.split()[0].isdigit()}
    assert set(rows) == {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000}
    rate = float(rows[8][2].replace(",", ""))
    assert float(rows[8][4]) == pytest.approx(6e9 / rate / 3600, abs=0.01)
    assert float(rows[1][2].replace(",", "")) < rate / 7


def test_without_rates_they_are_estimated(target: str, capsys) -> None:
    _, text = plan(capsys, "--target.path", target, "--gpus", "2")
    assert "estimated from products at 790 TFLOP/s" in text
    assert "name the data (--tokens or --data.train) for hours" in text
    _, slower = plan(capsys, "--target.path", target, "--gpus", "2", "--rate-tflops", "79")
    first, second = (float(found.split("  target ")[1].split()[0].replace(",", "")) for found in (text, slower))
    assert second == pytest.approx(first / 10, rel=0.01)


def test_what_does_not_fit_is_divided_or_refused_with_what_helps(target: str, capsys) -> None:
    rates = ("--target.path", target, "--target-tok-s", "25000", "--drafter-tok-s", "25000")
    code, text = plan(capsys, *rates, "--gpus", "1", "--gpu-gib", "30")
    assert code == 1
    assert "no split of 1 GPU fits" in text
    code, text = plan(capsys, *rates, "--gpu-gib", "25", "--drafter.num-layers", "2")
    assert code == 0
    assert "on each of" not in text
    code, text = plan(capsys, *rates, "--gpu-gib", "12", "--drafter.num-layers", "2", "--data.num-anchors", "64")
    assert code == 0
    assert "on each of 2" in text and "over 2 GPUs each" in text and "--runtime.targets cuda:0+cuda:1" in text
    code, text = plan(capsys, *rates, "--gpu-gib", "13")
    assert code == 1
    assert "the drafter does not fit; what helps:" in text


def test_a_divided_state_needs_two_drafters_of_a_node_and_less_memory_of_each(target: str, capsys) -> None:
    rates = ("--target.path", target, "--target-tok-s", "90000", "--drafter-tok-s", "25000")

    def drafter_gib(text: str) -> float:
        return float(text.split("a drafter ")[1].split()[0])

    _, whole = plan(capsys, *rates)
    code, text = plan(capsys, *rates, "--optim.shard")
    assert code == 0
    # Of 2 bytes of 1,048,626,432 numbers, 7/8 come in to each drafter: 1.71 GiB, in 6.44 ms.
    (line,) = (line for line in text.splitlines() if line.startswith("  optim.shard: "))
    assert line.startswith(
        "  optim.shard: 6.4 ms of each step are counted for an exchange of weights (1.71 GiB into each"
    )
    assert line.endswith("that a drafter updates only its share is not counted") and "optim.shard" not in whole

    def rate(text: str) -> float:
        return float(text.split(" tokens/s; name the data")[0].split()[-1].replace(",", ""))

    assert rate(text) < rate(whole)
    _, slow = plan(capsys, *rates, "--optim.shard", "--peer-gb-s", "28.5")
    assert "optim.shard: 64.4 ms" in slow and "exchanges of weights set the pace" in slow
    # Half of 12 bytes of 1,048,626,432 numbers.
    assert drafter_gib(whole) - drafter_gib(text) == pytest.approx(5.86, abs=0.1)
    rows = {int(line.split()[0]): line for line in text.splitlines() if line.split()[0].isdigit()}
    assert "too few" in rows[1] and "too few" not in rows[2]
    assert not any("and 1 drafter," in line for line in rows.values())
    code, text = plan(capsys, *rates, "--optim.shard", "--gpus", "1")
    assert code == 1
    assert "no split of 1 GPU fits" in text and "optim.shard divides the state over two drafters of a node" in text
    code, text = plan(capsys, *rates, "--gpus", "1", "--gpu-gib", "13")
    assert code == 1 and "optim.shard divides" not in text


def test_fewer_nodes_that_do_as_well_are_said(target: str, capsys) -> None:
    rates = ("--target.path", target, "--target-tok-s", "25000", "--drafter-tok-s", "25000", "--gpus", "64")
    _, text = plan(capsys, *rates, "--node-gb-s", "1")
    assert "64 GPUs: 8 GPUs, each with target and drafter" in text and "--nnodes" not in text
    assert "  8 nodes would be no faster: sums of gradients between them take longer than they save" in text
    _, text = plan(capsys, *rates, "--node-gb-s", "2.9")
    assert "64 GPUs: 8 nodes of 8 GPUs" in text and "no faster" not in text
    assert "  8 GPUs, each with target and drafter reach 102,600 tokens/s, 97% of that on 8 GPUs; flags: --r" in text
    _, text = plan(capsys, *rates)
    assert "64 GPUs: 8 nodes of 8 GPUs" in text and "no faster" not in text and "of that on" not in text


def test_a_run_is_measured_and_its_own_config_used(tmp_path: Path, capsys) -> None:
    files = make_files(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    write_run(run)
    flags = ["--target.path", str(files.target), "--data.train", str(files.store), "--data.row-length", "64"]
    sizes = ["--data.target-tokens", "64", "--drafter.target-layer-ids", "1", "2", "--drafter.num-layers", "1"]
    assert main(["plan", "tiny", "--run", str(run), *flags, *sizes]) == 0
    assert "measured in" in capsys.readouterr().out


def test_a_measured_run_that_divided_its_state_has_paid_for_its_exchange(tmp_path: Path, target: str, capsys) -> None:
    config = replace(read_config(write_run(tmp_path) / "config.json"), optim=OptimConfig(accumulation=2, shard=True))
    config = replace(config, runtime=replace(config.runtime, drafters=("cpu", "cpu")))
    (tmp_path / "config.json").write_text(to_json(config))
    flags = ("--target.path", target, "--run", str(tmp_path), "--optim.shard")
    _, text = plan(capsys, *flags)
    assert "  optim.shard: exchanges of weights are part of the measured drafter's rate" in text
    # Another drafter's rate, as given, has none.
    _, text = plan(capsys, *flags, "--drafter-tok-s", "25000")
    assert " ms of each step are counted for an exchange of weights (" in text


def test_nothing_to_plan_from_is_said(capsys) -> None:
    assert main(["plan"]) == 2
    assert "expects a recipe, such as `plan paper`, or --run DIR" in capsys.readouterr().err
    assert main(["plan", "paper", "--gpus", "0"]) == 2
    assert "--gpus: expected a finite number above 0, found 0" in capsys.readouterr().err
