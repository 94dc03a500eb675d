"""Token store: documents on disk as a `datasets` Arrow dataset, with a manifest that says where they come from.

The directory is what `Dataset.save_to_disk` writes (columns input_ids and loss_mask) plus manifest.json. It is written
to the side and renamed when complete, so a directory at its final place is a whole store. Reading is memory-mapped:
nothing is copied before a document is asked for.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow
from datasets.arrow_writer import ArrowWriter
from numpy.typing import NDArray

from blockdraft.config import ConfigError
from blockdraft.data.locks import try_lock
from blockdraft.data.template import Encoded

FORMAT = "blockdraft token store"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"


class Document(NamedTuple):
    """One document, views of the mapped file; copy before writing to them."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.int8]


@dataclass(frozen=True, kw_only=True)
class ManifestInfo:
    """What a store's manifest says beside the counts, which `write_store` adds."""

    tokenizer: str = ""
    """Path or name the tokenizer was loaded from."""
    tokenizer_hash: str = ""
    template_hash: str = ""
    max_length: int | None = None
    rows_read: int = 0
    cut: int = 0
    """Documents cut at max_length."""
    drops: dict[str, int] = field(default_factory=dict)
    """Dropped rows by reason."""
    drop_examples: dict[str, list[str]] = field(default_factory=dict)
    unrendered_reasoning: int = 0
    """Assistant turns whose reasoning the template left out."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Options of the command that wrote the store."""


@dataclass
class _Totals:
    documents: int = 0
    tokens: int = 0
    supervised_tokens: int = 0


def write_store(
    path: Path | str, encoded: Iterable[Encoded], manifest_info: ManifestInfo | Callable[[], ManifestInfo]
) -> dict[str, Any]:
    """Writes documents, then the manifest, and moves the directory to `path`; returns the manifest.

    A `manifest_info` that is a function is called after the last document, when drops are known. If `encoded` or it
    raises, nothing is left and an existing store stays as it was.

    Raises:
        ConfigError: `path` holds something other than a store, another command writes there, or there were no
            documents.
    """
    path = Path(path)
    _check_replaceable(path)
    side = path.with_name(path.name + ".writing")
    with _alone_in(side):
        return _write_beside(path, side, encoded, manifest_info)


@contextmanager
def _alone_in(side: Path) -> Iterator[None]:
    """Makes the directory, locks it against other commands and empties it; the end of the process unlocks it too.

    Raises:
        ConfigError: another command writes there.
    """
    side.mkdir(parents=True, exist_ok=True)
    held = os.open(side, os.O_RDONLY)
    try:
        # Another one may have moved what was opened here to its place before it was locked.
        if not try_lock(held) or not side.exists() or not os.path.samestat(os.fstat(held), side.stat()):
            raise ConfigError(f"{side}: another command is writing there; wait for its end, or choose another --output")
        for left in side.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield
    finally:
        os.close(held)


def _write_beside(
    path: Path, side: Path, encoded: Iterable[Encoded], manifest_info: ManifestInfo | Callable[[], ManifestInfo]
) -> dict[str, Any]:
    try:
        totals = _write_arrow(side, encoded)
        if totals.documents == 0:
            raise ConfigError(f"{path}: expected at least one document to write, found none")
        manifest = _manifest(totals, manifest_info() if callable(manifest_info) else manifest_info)
        (side / MANIFEST).write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        _move(side, path)
    except BaseException:
        shutil.rmtree(side, ignore_errors=True)
        raise
    return manifest


def open_store(path: Path | str) -> "Store":
    """Opens a store for reading.

    Raises:
        ConfigError: no directory, no manifest, another format version, or files that do not match the manifest.
    """
    return Store(Path(path))


class Store:
    """Random access to the documents of a store, and their lengths."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = _read_manifest(path)
        # The mapped file must outlive the arrays made of it.
        self._dataset = _load(path)
        table = self._dataset.data
        self._ids, self._starts = _columns(table.column("input_ids"))
        self._masks, _ = _columns(table.column("loss_mask"))
        self.lengths: NDArray[np.int64] = np.concatenate(
            [np.diff(offsets) for _, offsets in self._ids] or [np.zeros(0, np.int64)]
        ).astype(np.int64)
        if len(self.lengths) != self.manifest["documents"]:
            raise ConfigError(
                f"{path}: expected {self.manifest['documents']} documents as {MANIFEST} says, found "
                f"{len(self.lengths)}; write the store again with `blockdraft prepare`"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Document:
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        index %= len(self)
        chunk = int(np.searchsorted(self._starts, index, side="right")) - 1
        row = index - int(self._starts[chunk])
        ids, id_offsets = self._ids[chunk]
        mask, mask_offsets = self._masks[chunk]
        return Document(
            ids[id_offsets[row] : id_offsets[row + 1]],
            mask[mask_offsets[row] : mask_offsets[row + 1]],
        )

    def all_ids(self) -> NDArray[np.int64]:
        """Sorted ids that occur anywhere."""
        parts = [np.unique(ids[offsets[0] : offsets[-1]]) for ids, offsets in self._ids]
        return np.unique(np.concatenate([np.zeros(0, np.int64), *parts])).astype(np.int64)

    def seen_ids(self) -> NDArray[np.int64]:
        """Sorted ids that occur at supervised positions (loss mask 1)."""
        found: NDArray[np.int64] = np.zeros(0, np.int64)
        for (ids, id_offsets), (mask, mask_offsets) in zip(self._ids, self._masks, strict=True):
            supervised = mask[mask_offsets[0] : mask_offsets[-1]] == 1
            found = np.union1d(found, ids[id_offsets[0] : id_offsets[-1]][supervised]).astype(np.int64)
        return found


def _write_arrow(side: Path, encoded: Iterable[Encoded]) -> _Totals:
    features = datasets.Features(
        {
            "input_ids": datasets.Sequence(datasets.Value("int32")),
            "loss_mask": datasets.Sequence(datasets.Value("int8")),
        }
    )
    totals = _Totals()
    # In a directory of its own: a dataset refuses to be saved over the file it is mapped from.
    raw = side / "raw" / "raw.arrow"
    raw.parent.mkdir()
    with ArrowWriter(path=str(raw), features=features, writer_batch_size=1000) as writer:
        for document in encoded:
            writer.write({"input_ids": document.input_ids, "loss_mask": document.loss_mask})
            totals.documents += 1
            totals.tokens += len(document.input_ids)
            totals.supervised_tokens += sum(document.loss_mask)
        writer.finalize()
    if totals.documents:
        datasets.Dataset.from_file(str(raw)).save_to_disk(str(side))
    shutil.rmtree(raw.parent)
    return totals


def _manifest(totals: _Totals, info: ManifestInfo) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "documents": totals.documents,
        "tokens": totals.tokens,
        "supervised_tokens": totals.supervised_tokens,
        "max_length": info.max_length,
        "tokenizer": info.tokenizer,
        "tokenizer_hash": info.tokenizer_hash,
        "template_hash": info.template_hash,
        "rows_read": info.rows_read,
        "cut": info.cut,
        "drops": info.drops,
        "drop_examples": info.drop_examples,
        "unrendered_reasoning": info.unrendered_reasoning,
        "settings": info.settings,
    }


def _check_replaceable(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise ConfigError(f"{path}: expected a directory to write to, found a file; choose another --output")
    if any(path.iterdir()):
        try:
            _read_manifest(path)
        except ConfigError as error:
            raise ConfigError(
                f"{path}: expected an empty directory or a token store to replace, found other files; "
                "choose another --output"
            ) from error


def _move(side: Path, path: Path) -> None:
    old = path.with_name(path.name + ".replaced")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    side.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _read_manifest(path: Path) -> dict[str, Any]:
    hint = "give the directory that `blockdraft prepare --output` wrote"
    if not path.is_dir():
        raise ConfigError(f"{path}: expected a token store, found no directory; {hint}")
    file = path / MANIFEST
    if not file.is_file():
        raise ConfigError(f"{path}: expected a token store with {MANIFEST}, found no such file; {hint}")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: expected JSON, found: {error}; {hint}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ConfigError(f"{file}: expected format {FORMAT!r}, found another file; {hint}")
    if manifest["format_version"] != FORMAT_VERSION:
        raise ConfigError(
            f"{file}: expected format version {FORMAT_VERSION}, found {manifest['format_version']}; "
            "write the store again with `blockdraft prepare`"
        )
    return manifest


def _load(path: Path) -> datasets.Dataset:
    try:
        return datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{path}: expected the Arrow files of a token store, found: {error}; "
            "write the store again with `blockdraft prepare`"
        ) from error


def _columns(
    column: pyarrow.ChunkedArray,
) -> tuple[list[tuple[NDArray[Any], NDArray[np.int64]]], NDArray[np.int64]]:
    """(values, offsets) of each chunk, without copying, and the first document of each chunk."""
    chunks = [
        (chunk.values.to_numpy(zero_copy_only=True), chunk.offsets.to_numpy(zero_copy_only=True))
        for chunk in column.chunks
        if len(chunk)
    ]
    counts = [len(offsets) - 1 for _, offsets in chunks]
    return chunks, np.cumsum([0, *counts[:-1]], dtype=np.int64)
