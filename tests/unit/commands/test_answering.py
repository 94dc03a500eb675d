"""A stop while a server answers: what came is kept, what is under way is cut."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from blockdraft.cli import main
from blockdraft.commands.stops import EXIT_INTERRUPTED
from blockdraft.data.conversations import write_conversations
from tiny_chat import CHATML, chat, save_tokenizer


class Answering(ThreadingHTTPServer):
    """Answers `at_once` requests; then sends this process SIGTERM, and lets the others wait."""

    daemon_threads = True

    def __init__(self, at_once: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.at_once = at_once
        self.asked: list[str] = []
        self.lock = threading.Lock()
        self.released = threading.Event()
        self.partial: Path | None = None

    def wait(self) -> None:
        """Until the answers before are on disk."""
        assert self.partial is not None
        while len(self.partial.read_text().splitlines()) < 1 + self.at_once:
            self.released.wait(0.01)


class Handler(BaseHTTPRequestHandler):
    server: Answering

    def do_POST(self) -> None:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][-1]["content"]
        with self.server.lock:
            self.server.asked.append(question)
            number = len(self.server.asked)
        if number == self.server.at_once + 1:
            self.server.wait()
            os.kill(os.getpid(), signal.SIGTERM)
        if number > self.server.at_once:
            self.server.released.wait(60)
        answer = {"message": {"content": f"to {question}"}, "finish_reason": "stop"}
        reply = json.dumps({"choices": [answer], "usage": {"completion_tokens": 3}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_arguments: object) -> None:
        """Says nothing."""


@pytest.fixture
def server() -> Iterator[Answering]:
    made = Answering(3)
    thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield made
    made.released.set()
    made.shutdown()
    made.server_close()
    thread.join()


def test_a_stop_while_a_server_answers(tmp_path: Path, server: Answering, capsys: pytest.CaptureFixture[str]):
    questions = [f"q{number}" for number in range(9)]
    write_conversations(tmp_path / "chat.jsonl", [chat(question, "old") for question in questions])
    output = tmp_path / "out.jsonl"
    server.partial = tmp_path / "out.jsonl.partial"
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    flags = ["--server", url, "--server-model", "m", "--concurrency", "2", "--output", str(output)]
    target = save_tokenizer(tmp_path / "target", CHATML)
    command = ["regenerate", str(tmp_path / "chat.jsonl"), "--target", target, *flags]
    assert main(command) == EXIT_INTERRUPTED
    assert "stopped after 3 of 9 answers" in capsys.readouterr().out
    assert not output.exists()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("request")]
    answered = server.asked[:3]
    server.released.set()
    server.at_once = 99
    server.asked.clear()
    assert main(command) == 0
    assert sorted(server.asked) == sorted(set(questions) - set(answered))
    found = [json.loads(line)["messages"][-1]["content"] for line in output.read_text().splitlines()]
    assert found == [f"to {question}" for question in questions]
    assert "9 answers to 9 prompts" in capsys.readouterr().out
