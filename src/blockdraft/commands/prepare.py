"""`blockdraft prepare`: conversations to a token store, by the target's own tokenizer and chat template."""

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from blockdraft.commands.outputs import check_directory
from blockdraft.config import ConfigError

if TYPE_CHECKING:
    from blockdraft.data.conversations import ChatTemplate, Conversation, Drops, Encoded
    from blockdraft.data.store import ManifestInfo


@dataclass(frozen=True, kw_only=True)
class Options:
    """Turn conversations into token ids and loss masks, stored for training."""

    conversations: tyro.conf.Positional[tuple[str, ...]]
    """.jsonl or .parquet files, directories or names of datasets (NAME or NAME:SPLIT)."""
    target: str
    """Directory, .gguf file or hub name of the target; its tokenizer and chat template are used."""
    output: Path
    """Directory of the token store; an existing store is replaced."""
    max_length: int = 4096
    """Longest document, in tokens; at most the row length of the training run."""
    long: Literal["cut", "drop"] = "cut"
    """Documents longer than that: cut at max-length if two supervised tokens in a row remain, or drop."""
    reasoning: bool = True
    """Keep the reasoning of the answers; without it they are rendered as in the non-thinking mode."""
    max_drop: float = 0.05
    """Largest share of the rows that may be dropped, for whatever reason, before the command fails."""
    trust_remote_code: bool = False
    """Run tokenizer code that comes with the target."""


def run(options: Options) -> int:
    """Writes the store and prints counts; returns the exit code.

    Raises:
        ConfigError: nothing to read, too many rows dropped, or a template without a stable prefix.
    """
    from blockdraft.data.conversations import ChatTemplate, Drops
    from blockdraft.data.store import ManifestInfo, write_store
    from blockdraft.data.template import template_hash, tokenizer_hash
    from blockdraft.models.target import load_tokenizer

    _check(options)
    check_directory(options.output)
    tokenizer = load_tokenizer(options.target, options.trust_remote_code)
    template = ChatTemplate(tokenizer)
    drops = Drops(options.max_drop)
    work = _Work(options, template, drops)

    def manifest_info() -> "ManifestInfo":
        return ManifestInfo(
            tokenizer=options.target,
            tokenizer_hash=tokenizer_hash(tokenizer),
            template_hash=template_hash(tokenizer),
            max_length=options.max_length,
            rows_read=drops.num_rows,
            cut=work.num_cut,
            drops=dict(drops.counts),
            drop_examples=drops.examples,
            unrendered_reasoning=work.num_unrendered,
            settings={**dataclasses.asdict(options), "output": str(options.output)},
        )

    manifest = write_store(options.output, work.documents(), manifest_info)
    lines = [
        f"{options.output}: {manifest['documents']:,} documents of {drops.num_rows:,} rows, "
        f"{manifest['tokens']:,} tokens, {manifest['supervised_tokens']:,} supervised"
    ]
    if work.num_cut:
        lines.append(f"cut at {options.max_length:,} tokens: {work.num_cut:,}")
    if work.num_unrendered:
        lines.append(f"answers whose reasoning the chat template leaves out: {work.num_unrendered:,}")
    if drops.num_dropped:
        lines += [f"dropped: {drops.num_dropped:,}", *drops.lines()]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


class _Work:
    """Documents one after the other, and what was done to them."""

    def __init__(self, options: Options, template: "ChatTemplate", drops: "Drops") -> None:
        self._options = options
        self._template = template
        self._drops = drops
        self.num_cut = 0
        self.num_unrendered = 0

    def documents(self) -> "Iterator[Encoded]":
        """Documents to store; at the end, stops if too many rows were dropped."""
        from tqdm import tqdm

        from blockdraft.data.conversations import read_conversations

        with tqdm(desc="prepare", unit=" rows", smoothing=0.05) as bar:
            for source in self._options.conversations:
                for conversation in read_conversations(source, self._drops, need_answers=True):
                    document = self._encode(conversation)
                    bar.update(self._drops.num_rows - bar.n)
                    if document is not None:
                        yield document
            bar.update(self._drops.num_rows - bar.n)
        self._drops.check()

    def _encode(self, conversation: "Conversation") -> "Encoded | None":
        from blockdraft.data.conversations import RowRefused

        try:
            document = self._template.encode(conversation, reasoning=self._options.reasoning)
        except RowRefused as error:
            self._drops.add("refused by the chat template", conversation.source, str(error))
            return None
        length, limit = len(document.input_ids), self._options.max_length
        if length > limit and self._options.long == "drop":
            self._drops.add("over-long", conversation.source, f"{length:,} tokens, more than {limit:,}")
            return None
        if length > limit:
            document = document._replace(input_ids=document.input_ids[:limit], loss_mask=document.loss_mask[:limit])
        if not _has_pair(document.loss_mask):
            reason = "over-long" if length > limit else "no two supervised tokens in a row"
            detail = f"{length:,} tokens; no two supervised tokens in a row among the first {limit:,}"
            self._drops.add(reason, conversation.source, detail)
            return None
        self.num_cut += length > limit
        self.num_unrendered += document.unrendered_reasoning
        return document


def _has_pair(loss_mask: list[int]) -> bool:
    # An anchor and the token after it: without such a pair a document has nothing to draft.
    return any(a and b for a, b in pairwise(loss_mask))


def _check(options: Options) -> None:
    if not options.conversations:
        raise ConfigError("expected at least one file or dataset of conversations, found none")
    if options.max_length < 2:
        raise ConfigError(f"--max-length: expected at least 2, found {options.max_length}")
    if not 0 <= options.max_drop <= 1:
        raise ConfigError(f"--max-drop: expected a share between 0 and 1, found {options.max_drop}")
