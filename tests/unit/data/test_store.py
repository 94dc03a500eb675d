"""Token store: what is written is read back; wrong directories are told apart."""

import json
from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
import pytest

from blockdraft.config import ConfigError
from blockdraft.data.store import ManifestInfo, open_store, write_store
from blockdraft.data.template import Encoded

DOCUMENTS = [Encoded([5, 6, 7], [0, 1, 1]), Encoded([9], [0]), Encoded([300, 2, 2, 1], [1, 0, 1, 0])]


def test_documents_lengths_and_seen_ids(tmp_path: Path):
    write_store(tmp_path / "s", DOCUMENTS, ManifestInfo(max_length=8, drops={"duplicate": 2}, rows_read=5))
    store = open_store(tmp_path / "s")
    assert len(store) == 3
    assert (store.lengths.tolist(), store.lengths.dtype) == ([3, 1, 4], np.int64)
    for index, document in enumerate(DOCUMENTS):
        assert store[index].input_ids.tolist() == document.input_ids
        assert store[index].loss_mask.tolist() == document.loss_mask
    assert store[2].input_ids.dtype == np.int32
    assert store[2].loss_mask.dtype == np.int8
    assert store[-1].input_ids.tolist() == DOCUMENTS[2].input_ids
    with pytest.raises(IndexError):
        store[3]
    assert store.seen_ids().tolist() == [2, 6, 7, 300]
    counts = {
        name: store.manifest[name] for name in ("documents", "tokens", "supervised_tokens", "max_length", "drops")
    }
    assert counts == {"documents": 3, "tokens": 8, "supervised_tokens": 4, "max_length": 8, "drops": {"duplicate": 2}}


def test_a_store_of_many_chunks(tmp_path: Path):
    documents = [Encoded(list(range(n % 7 + 1)), [n % 2] * (n % 7 + 1)) for n in range(2500)]
    write_store(tmp_path / "s", iter(documents), ManifestInfo())
    store = open_store(tmp_path / "s")
    assert store.lengths.tolist() == [n % 7 + 1 for n in range(2500)]
    for index in (0, 999, 1000, 1999, 2000, 2499):
        assert store[index].input_ids.tolist() == documents[index].input_ids
        assert store[index].loss_mask.tolist() == documents[index].loss_mask


def test_it_is_a_datasets_directory(tmp_path: Path):
    write_store(tmp_path / "s", DOCUMENTS, ManifestInfo())
    table = datasets.load_from_disk(str(tmp_path / "s"))
    assert table[0] == {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s"]
    assert not (tmp_path / "s" / "raw").exists()


def test_two_commands_do_not_write_one_store(tmp_path: Path):
    def beside() -> Iterator[Encoded]:
        yield DOCUMENTS[0]
        with pytest.raises(ConfigError, match=r"s\.writing: another command is writing there; wait for its end"):
            write_store(tmp_path / "s", DOCUMENTS[:1], ManifestInfo())
        yield DOCUMENTS[2]

    write_store(tmp_path / "s", beside(), ManifestInfo())
    assert len(open_store(tmp_path / "s")) == 2
    write_store(tmp_path / "s", DOCUMENTS, ManifestInfo())
    assert len(open_store(tmp_path / "s")) == 3
    assert [found.name for found in tmp_path.iterdir()] == ["s"]


def test_what_a_killed_command_left_is_removed(tmp_path: Path):
    (tmp_path / "s.writing" / "raw").mkdir(parents=True)
    (tmp_path / "s.writing" / "raw" / "raw.arrow").write_text("half")
    (tmp_path / "s.writing" / "state.json").write_text("{")
    write_store(tmp_path / "s", DOCUMENTS, ManifestInfo())
    assert len(open_store(tmp_path / "s")) == 3
    assert [found.name for found in tmp_path.iterdir()] == ["s"]


def failing() -> Iterator[Encoded]:
    yield DOCUMENTS[0]
    raise ConfigError("too many drops")


def test_a_failed_write_leaves_the_store_before_it(tmp_path: Path):
    with pytest.raises(ConfigError, match="too many drops"):
        write_store(tmp_path / "s", failing(), ManifestInfo())
    assert list(tmp_path.iterdir()) == []
    write_store(tmp_path / "s", DOCUMENTS, ManifestInfo())
    with pytest.raises(ConfigError, match="too many drops"):
        write_store(tmp_path / "s", failing(), ManifestInfo())
    assert len(open_store(tmp_path / "s")) == 3
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_a_store_is_replaced_and_nothing_else_is(tmp_path: Path):
    write_store(tmp_path / "s", DOCUMENTS, ManifestInfo())
    write_store(tmp_path / "s", DOCUMENTS[:1], lambda: ManifestInfo(cut=1))
    assert len(open_store(tmp_path / "s")) == 1
    (tmp_path / "empty").mkdir()
    write_store(tmp_path / "empty", DOCUMENTS, ManifestInfo())
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("dear")
    with pytest.raises(ConfigError, match="expected an empty directory or a token store"):
        write_store(tmp_path / "home", DOCUMENTS, ManifestInfo())
    assert (tmp_path / "home" / "letter").read_text() == "dear"
    with pytest.raises(ConfigError, match="found a file"):
        write_store(tmp_path / "home" / "letter", DOCUMENTS, ManifestInfo())
    with pytest.raises(ConfigError, match="at least one document"):
        write_store(tmp_path / "none", [], ManifestInfo())


def test_what_is_no_store_is_told_apart(tmp_path: Path):
    with pytest.raises(ConfigError, match="found no directory"):
        open_store(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"expected a token store with manifest\.json"):
        open_store(tmp_path)
    path = tmp_path / "s"
    write_store(path, DOCUMENTS, ManifestInfo())
    manifest = json.loads((path / "manifest.json").read_text())
    for change, message in (
        ({"format_version": 99}, "expected format version 1, found 99"),
        ({"format": "recipes"}, "found another file"),
        ({"documents": 4}, r"expected 4 documents as manifest\.json says, found 3"),
    ):
        (path / "manifest.json").write_text(json.dumps(manifest | change))
        with pytest.raises(ConfigError, match=message):
            open_store(path)
    (path / "manifest.json").write_text("{")
    with pytest.raises(ConfigError, match="expected JSON"):
        open_store(path)
    (path / "manifest.json").write_text(json.dumps(manifest))
    (path / "state.json").unlink()
    with pytest.raises(ConfigError, match="expected the Arrow files"):
        open_store(path)
