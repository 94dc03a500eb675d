"""Gathers the demo's numbers: summary.json, acceptance.svg and a short table.

    python examples/demo_summary.py runs/demo

Reads metrics.jsonl of the training run and the JSON results of `blockdraft evaluate`.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

from demo_picture import Curve, picture

SETS: Final = {"unseen_pair": "unseen pair of seen words", "unseen_words": "both words unseen"}
SHORT: Final = {"unseen_pair": "pair", "unseen_words": "words"}


def read_curve(metrics: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, acceptance length) of every evaluation during the run, by set."""
    curve: dict[str, list[tuple[int, float]]] = {name: [] for name in SETS}
    for line in metrics.read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        for name in SETS:
            if f"eval/{name}" in values:
                curve[name].append((values["step"], values[f"eval/{name}"]))
    for name, points in curve.items():
        if not points or points[0][0] != 0:
            sys.exit(f"{metrics}: expected evaluations of {name} from step 0 on, found {points[:1]}")
    return curve


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object."""
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


def summarise(runs: Path) -> dict[str, Any]:
    """The numbers of summary.json."""
    curve = read_curve(runs / "train" / "metrics.jsonl")
    results = {name: read_json(runs / "evaluate.json")["sets"][name] for name in SETS}
    decoded = read_json(runs / "evaluate_decode.json")
    stages = read_json(runs / "seconds.json")
    before = {name: points[0][1] for name, points in curve.items()}
    acceptance: dict[str, float] = {"before": sum(before.values()) / len(before)}
    for name, result in results.items():
        acceptance[f"before_{name}"] = before[name]
        acceptance[f"after_{name}"] = result["acceptance_length"]
        for control in ("ngram", "prompt_lookup"):
            acceptance[f"{control}_control_{SHORT[name]}"] = result["controls"][control]["acceptance_length"]
    return {
        "acceptance_length": acceptance,
        "rounds": sum(result["rounds"] for result in results.values()),
        "rounds_by_set": {name: result["rounds"] for name, result in results.items()},
        "lossless_float32": decoded["lossless"],
        "prompts": sum(result["num_prompts"] for result in results.values()),
        "prompts_by_set": {name: result["num_prompts"] for name, result in results.items()},
        "decode": {
            "prompts": decoded["num_prompts"],
            "acceptance_length": decoded["acceptance_length"],
            "tokens_per_second": decoded["tokens_per_second"],
            "plain_tokens_per_second": decoded["plain_tokens_per_second"],
            "speedup": decoded["speedup"],
            "dtype": decoded["settings"]["dtype"],
        },
        "steps": curve["unseen_pair"][-1][0],
        "seconds": round(sum(stages.values()), 1),
        "stage_seconds": stages,
    }


def draw(runs: Path, summary: dict[str, Any]) -> Path:
    """Acceptance length over steps, with the controls as dashed lines."""
    found = summary["acceptance_length"]
    curves = {
        name: Curve(
            SETS[name],
            points,
            found[f"after_unseen_{SHORT[name]}"],
            found[f"ngram_control_{SHORT[name]}"],
        )
        for name, points in read_curve(runs / "train" / "metrics.jsonl").items()
    }
    path = runs / "acceptance.svg"
    path.write_text(picture("SmolLM2-135M-Instruct on prompts that it was not trained on", curves), encoding="utf-8")
    return path


def table(summary: dict[str, Any]) -> str:
    """For people."""
    found, decoded = summary["acceptance_length"], summary["decode"]
    lines = [f"{'acceptance length':<28}{'before':>8}{'after':>8}{'n-gram':>8}{'look-up':>9}{'prompts':>9}"]
    for name, spelled in SETS.items():
        short = SHORT[name]
        lines.append(
            f"{spelled:<28}{found[f'before_{name}']:>8.2f}{found[f'after_{name}']:>8.2f}"
            f"{found[f'ngram_control_{short}']:>8.2f}{found[f'prompt_lookup_control_{short}']:>9.2f}"
            f"{summary['prompts_by_set'][name]:>9}"
        )
    lossless = "equal" if summary["lossless_float32"] else "NOT equal"
    lines.append(f"decoding in float32: {decoded['prompts']} answers {lossless} to plain greedy decoding")
    lines.append(
        f"speed on this machine: {decoded['tokens_per_second']:.1f} tok/s, "
        f"plain {decoded['plain_tokens_per_second']:.1f} tok/s"
    )
    lines.append(f"{summary['steps']} steps; {summary['seconds']:.0f} s for all stages")
    return "\n".join(lines)


def main(runs: Path) -> None:
    """Writes both files and prints the table."""
    summary = summarise(runs)
    (runs / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    picture = draw(runs, summary)
    print(table(summary))
    print(f"written: {runs / 'summary.json'}, {picture}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} RUNS_DIRECTORY")
    main(Path(sys.argv[1]))
