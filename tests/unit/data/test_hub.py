"""Mistyped paths and hubs that do not answer; no test asks a hub beyond this machine."""

import http.server
import threading

import pytest
from huggingface_hub import constants

from blockdraft.config import ConfigError
from blockdraft.data.conversations import Drops, read_conversations
from blockdraft.data.hub import only_cached
from blockdraft.models.target import load_tokenizer, source_of
from tiny_chat import CHATML, tiny_tokenizer

CLOSED = "http://127.0.0.1:9"
"""Nobody listens on the discard port."""
EXPECTED = "target.path: expected a model directory"


@pytest.fixture(autouse=True)
def silent_hub(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "ENDPOINT", CLOSED)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "Qwen3-8B").mkdir(parents=True)


@pytest.fixture
def never_asked(monkeypatch):
    def fail(*_args, **_options):
        raise AssertionError("a path was looked for at the hub")

    monkeypatch.setattr("huggingface_hub.get_session", fail)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("./modles/Qwen3-8B", r"tmp\S*/test_\S+ exists and has no modles, did you mean models\?"),
        ("models/Qwen3-8b/last", r"/models exists and has no Qwen3-8b, did you mean Qwen3-8B\?"),
        ("{here}/models/Llama", r"/models exists and has no Llama; check the path$"),
        ("~/models/Qwen3-8B", "write it in full"),
        ("models/Qwen3-8/", r"/models exists and has no Qwen3-8, did you mean Qwen3-8B\?"),
    ],
)
@pytest.mark.usefixtures("never_asked")
def test_what_no_hub_can_have_is_a_path_and_named_with_what_exists(tmp_path, name, fix):
    with pytest.raises(ConfigError, match=f"found nothing at .*{fix}"):
        load_tokenizer(name.format(here=tmp_path))
    with pytest.raises(ConfigError, match=f"expected a .jsonl or .parquet file.*{fix}"):
        list(read_conversations(name.format(here=tmp_path), Drops()))


@pytest.mark.usefixtures("never_asked")
def test_a_misspelt_gguf_file_is_named_with_the_one_that_exists(tmp_path):
    (tmp_path / "smollm.gguf").touch()
    with pytest.raises(ConfigError, match=r"names no file: .* has no smolm\.gguf, did you mean smollm\.gguf\?"):
        source_of("smolm.gguf")


@pytest.mark.usefixtures("never_asked")
def test_what_is_there_is_not_looked_for_elsewhere():
    assert source_of("models/Qwen3-8B") == ("models/Qwen3-8B", {})


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "models/Qwen3", "gpt2"])
def test_a_hub_that_does_not_answer_is_asked_once(name):
    with pytest.raises(ConfigError, match=rf"found no '{name}' here.*nor in the hub's cache.*{CLOSED}\) does not ans"):
        load_tokenizer(name)
    with pytest.raises(ConfigError, match=r"or a dataset name.* does not answer"):
        list(read_conversations(name, Drops()))


def test_offline_mode_is_named_as_the_reason(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        only_cached("Qwen/Qwen3-8B", EXPECTED, lambda _: False)


def test_a_model_in_the_cache_is_read_from_there_alone(tmp_path):
    home = tmp_path / "hub" / "models--tiny--target"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0" * 40)
    tiny_tokenizer(CHATML).save_pretrained(home / "snapshots" / ("0" * 40))
    (home / "snapshots" / ("0" * 40) / "config.json").write_text('{"model_type": "qwen3"}')
    assert source_of("tiny/target") == ("tiny/target", {"local_files_only": True})


def test_a_hub_that_answers_is_left_to_its_client(monkeypatch):
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(404)
            self.end_headers()

        def log_message(self, *_args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert not only_cached("Qwen/Qwen3-8B", EXPECTED, lambda _: False)
        thread.join(timeout=10)
