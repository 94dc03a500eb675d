"""Writes the demo's prompts: one narrow family, "Write a Python function that VERB OBJECT."

    python examples/demo_prompts.py runs/demo/prompts --num-train 512 --num-held-out 16

train.jsonl           pairs of seen verbs and seen objects
unseen_pair.jsonl     both words occur in train.jsonl, the pair does not
unseen_words.jsonl    neither the verb nor the object occurs in train.jsonl
unseen_both.jsonl     some of each of these two, for decoding one by one
"""

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

VERBS = [
    *("reverses", "sorts", "counts", "filters", "merges", "copies", "prints", "checks", "converts", "formats"),
    *("splits", "compares", "searches", "rotates", "shuffles", "compresses", "encodes", "summarizes", "cleans"),
    "measures",
]
HELD_OUT_VERBS = ["removes", "groups", "updates", "displays"]
OBJECTS = [
    *("a list of integers", "a string", "a dictionary", "a matrix", "a binary tree", "a linked list"),
    *("a list of words", "a sentence", "a text file", "a JSON object", "a list of tuples", "a set of names"),
    *("a queue", "a stack", "a log line", "a list of prices", "a phone number", "a CSV row"),
    *("a polynomial", "a paragraph", "a list of scores", "a graph", "a bit string", "a list of dates"),
    *("a deck of cards", "a calendar", "a list of floats", "a nested list", "a word", "a list of students"),
    *("a table", "a byte array", "a vector", "a shopping list", "a list of files", "a music playlist"),
]
HELD_OUT_OBJECTS = [
    *("a list of names", "a list of numbers", "a list of cities", "an array"),
    *("a list of grades", "a list of strings", "a set of numbers", "a tree"),
]
# It shortens the prompts: where a conversation has no system turn, the chat template writes one of 25 tokens.
SYSTEM = "You write Python."
SEED = 0

Pair = tuple[str, str]


class Split(NamedTuple):
    """The prompts of each file."""

    train: list[Pair]
    unseen_pair: list[Pair]
    unseen_words: list[Pair]


def split_pairs(num_train: int, num_held_out: int) -> Split:
    """Draws the pairs; every word of `unseen_pair` occurs in `train`."""
    rng = random.Random(SEED)
    seen = [(verb, what) for verb in VERBS for what in OBJECTS]
    unseen = [(verb, what) for verb in HELD_OUT_VERBS for what in HELD_OUT_OBJECTS]
    rng.shuffle(seen)
    rng.shuffle(unseen)
    train, rest = seen[:num_train], seen[num_train:]
    verbs, objects = {verb for verb, _ in train}, {what for _, what in train}
    unseen_pair = [(verb, what) for verb, what in rest if verb in verbs and what in objects]
    for name, found, wanted in (
        ("training", train, num_train),
        ("held-out pairs", unseen_pair, num_held_out),
        ("held-out words", unseen, num_held_out),
    ):
        if len(found) < wanted:
            raise SystemExit(f"{name}: {wanted} prompts wanted, the lists of words give {len(found)}")
    return Split(train, unseen_pair[:num_held_out], unseen[:num_held_out])


def write(path: Path, pairs: Iterable[Pair]) -> None:
    """One conversation a line, as `blockdraft` reads them."""
    with path.open("w", encoding="utf-8") as file:
        for verb, what in pairs:
            user = {"role": "user", "content": f"Write a Python function that {verb} {what}."}
            file.write(json.dumps({"messages": [{"role": "system", "content": SYSTEM}, user]}) + "\n")


def main() -> None:
    """Writes the files."""
    parser = argparse.ArgumentParser(description="Writes the demo's prompts.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--num-train", type=int, default=512)
    parser.add_argument("--num-held-out", type=int, default=16, help="prompts of each held-out set")
    parser.add_argument("--num-decode", type=int, default=8, help="prompts decoded one by one")
    options = parser.parse_args()
    split = split_pairs(options.num_train, options.num_held_out)
    options.directory.mkdir(parents=True, exist_ok=True)
    for name, pairs in split._asdict().items():
        write(options.directory / f"{name}.jsonl", pairs)
    half = options.num_decode // 2
    both = [*split.unseen_pair[: options.num_decode - half], *split.unseen_words[:half]]
    write(options.directory / "unseen_both.jsonl", both)
    counts = ", ".join(f"{len(pairs)} {name}" for name, pairs in split._asdict().items())
    print(f"{options.directory}: {counts}, {len(both)} unseen_both")


if __name__ == "__main__":
    main()
