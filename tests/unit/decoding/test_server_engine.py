"""A server that answers, fails, stalls, drips and cuts: every prompt ends answered, or failed with its reason."""

import gc
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from blockdraft.cli import main
from blockdraft.commands.regenerate import Options, run
from blockdraft.config import ConfigError
from blockdraft.data.conversations import ChatTemplate, write_conversations
from blockdraft.decoding.engine import EngineAnswer, EngineFailure, Sampling
from blockdraft.decoding.server_engine import Server, ServerEngine, find_model
from tiny_chat import CHATML, OPENED_THINKING, chat, save_tokenizer, tiny_tokenizer

pytestmark = pytest.mark.alone

Handle = Callable[["Handler", dict[str, Any], int], None]


def reply(text: str, finish: str = "stop", **fields: Any) -> dict[str, Any]:
    """A chat completion."""
    message = {"role": "assistant", "content": text} | fields
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": {"completion_tokens": 7}}


class Handler(BaseHTTPRequestHandler):
    """Hands each request to the test's function, with how many times its prompt was seen before."""

    server: "ChatServer"

    def do_GET(self) -> None:
        self.send({"object": "list", "data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][-1]["content"]
        with self.server.lock:
            seen = self.server.seen.get(prompt, 0)
            self.server.seen[prompt] = seen + 1
            self.server.bodies.append(body)
            self.server.keys.append(self.headers.get("Authorization"))
            self.server.under_way += 1
            self.server.most = max(self.server.most, self.server.under_way)
        try:
            self.server.handle_chat(self, body, seen)
        except OSError:
            pass  # The client has gone.
        finally:
            with self.server.lock:
                self.server.under_way -= 1

    def send(self, value: dict[str, Any], status: int = 200, *, cut: int | None = None, **headers: str) -> None:
        """A reply; `cut` sends so many bytes of it only."""
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(data[:cut])

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on the console."""


class ChatServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, handle_chat: Handle) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.handle_chat = handle_chat
        self.lock = threading.Lock()
        self.models = ["tiny"]
        self.seen: dict[str, int] = {}
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.under_way = self.most = 0
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


@pytest.fixture
def serve() -> Iterator[Callable[[Handle], ChatServer]]:
    started: list[tuple[ChatServer, threading.Thread]] = []

    def start(handle_chat: Handle) -> ChatServer:
        server = ChatServer(handle_chat)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        started.append((server, thread))
        return server

    yield start
    for server, thread in started:
        server.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


def plain(handler: Handler, body: dict[str, Any], _seen: int) -> None:
    handler.send(reply("to " + body["messages"][-1]["content"]))


def drip(handler: Handler) -> None:
    """Every read of the client is answered in time, the whole reply never comes."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(100):
        handler.wfile.write(b" ")
        time.sleep(0.05)


TROUBLE: dict[str, Callable[[Handler], object]] = {
    "500": lambda handler: handler.send({"error": "broken"}, 500),
    "429": lambda handler: handler.send({"error": "slow down"}, 429, Retry_After="0"),
    "400": lambda handler: handler.send({"error": "too long"}, 400),
    "stalls": lambda handler: handler.server.released.wait(20),
    "drips": drip,
    "cut": lambda handler: handler.connection.close(),
    "truncated": lambda handler: handler.send(reply("a long answer"), cut=40),
    "nothing": lambda handler: handler.send({"choices": []}),
}


def troubled(handler: Handler, body: dict[str, Any], seen: int) -> None:
    """The last word of a prompt is its trouble, gone at the third request unless the prompt says always."""
    prompt = body["messages"][-1]["content"]
    trouble = TROUBLE.get(prompt.split()[-1])
    if trouble is None or (seen >= 2 and not prompt.startswith("always")):
        plain(handler, body, seen)
    else:
        trouble(handler)


TROUBLES = ["fine", "500", "429", "stalls", "drips", "cut", "truncated"]


def engine(server: ChatServer, template: str = CHATML, **changes: Any) -> ServerEngine:
    values = {"timeout_s": 0.5, "retries": 3, "first_wait_s": 0.01, "concurrency": 8, "model": "tiny"} | changes
    sampling = Sampling(max_new_tokens=9, batch_size=1)
    return ServerEngine(Server(url=server.url, **values), ChatTemplate(tiny_tokenizer(template)), sampling)


def test_every_prompt_is_answered_after_trouble(serve: Callable[[Handle], ChatServer]) -> None:
    server = serve(troubled)
    prompts = [f"prompt {i} {trouble}" for i, trouble in enumerate(TROUBLES * 3)]
    found = sorted(engine(server).answers([chat(prompt) for prompt in prompts]))
    assert [answer.row for answer in found] == list(range(len(prompts)))
    for answer, prompt in zip(found, prompts, strict=True):
        assert answer == EngineAnswer(answer.row, f"to {prompt}", "", "stop", False, False, 7)
    assert {server.seen[prompt] for prompt in prompts if "fine" not in prompt} == {3}
    assert {server.seen[prompt] for prompt in prompts if "fine" in prompt} == {1}


def test_what_never_works_is_a_failure_with_its_reason(serve: Callable[[Handle], ChatServer]) -> None:
    server = serve(troubled)
    prompts = [f"always {trouble}" for trouble in [*TROUBLES[1:], "400", "nothing"]]
    found = {a.row: a for a in engine(server, retries=1, timeout_s=0.3).answers([chat(prompt) for prompt in prompts])}
    reasons = []
    for row in range(len(prompts)):
        assert isinstance(found[row], EngineFailure)
        reasons.append(found[row].reason)
    assert reasons == [
        *("HTTP 500", "HTTP 429", "time-out", "time-out", "connection failed", "reply is no whole JSON", "HTTP 400"),
        "reply without an answer",
    ]
    # Asked twice, but what the server refused for good once.
    assert [server.seen[prompt] for prompt in prompts] == [2, 2, 2, 2, 2, 2, 1, 1]
    # What was given up is closed: a socket that is open when it is collected is an error here.
    gc.collect()


def test_what_is_asked(serve: Callable[[Handle], ChatServer]) -> None:
    server = serve(plain)
    sampling = Sampling(max_new_tokens=9, batch_size=1, temperature=0.7, seed=3, thinking=False)
    settings = Server(url=server.url, model="tiny", api_key="secret", concurrency=2)
    asked = ServerEngine(settings, ChatTemplate(tiny_tokenizer(CHATML)), sampling)
    conversation = chat("q1", "a1", "q2")
    conversation.messages[1]["finish"] = "length"
    list(asked.answers([conversation, chat("other")]))
    first = next(body for body in server.bodies if len(body["messages"]) == 3)
    assert first["messages"][1] == {"role": "assistant", "content": "a1"}
    assert (first["model"], first["max_tokens"], first["temperature"], first["stream"]) == ("tiny", 9, 0.7, False)
    assert first["chat_template_kwargs"] == {"enable_thinking": False}
    seeds = {body["seed"] for body in server.bodies}
    assert len(seeds) == 2
    assert server.keys == ["Bearer secret"] * 2
    server.bodies.clear()
    list(asked.answers([chat("other"), conversation]))
    assert {body["seed"] for body in server.bodies} == seeds


def test_requests_run_side_by_side_up_to_the_limit(serve: Callable[[Handle], ChatServer]) -> None:
    together = threading.Barrier(4, timeout=10)

    def wait_for_three_others(handler: Handler, body: dict[str, Any], seen: int) -> None:
        together.wait()
        plain(handler, body, seen)

    server = serve(wait_for_three_others)
    found = list(engine(server, concurrency=4, timeout_s=10).answers([chat(f"q{i}") for i in range(12)]))
    assert all(isinstance(answer, EngineAnswer) for answer in found)
    assert server.most == 4


@pytest.mark.parametrize(
    ("template", "message", "expected"),
    [
        (CHATML, reply("a", reasoning_content="\nr\n"), ("a", "r", "stop", False)),
        (CHATML, reply("\n\na", reasoning="r"), ("a", "r", "stop", False)),
        (CHATML, reply("<think>\nr\n</think>\n\na"), ("a", "r", "stop", False)),
        (OPENED_THINKING, reply("r\n</think>\n\na"), ("a", "r", "stop", False)),
        (OPENED_THINKING, reply("r r", "length"), ("", "r r", "length", True)),
        (CHATML, reply("", "length", content=None, reasoning_content="r"), ("", "r", "length", True)),
        (CHATML, reply("cut", "length"), ("cut", "", "length", False)),
    ],
    ids=str,
)
def test_reasoning_and_finish(
    serve: Callable[[Handle], ChatServer], template: str, message: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    server = serve(lambda handler, _body, _seen: handler.send(message))
    (found,) = engine(server, template).answers([chat("q")])
    assert isinstance(found, EngineAnswer)
    assert (found.content, found.reasoning, found.finish, found.is_cut_in_reasoning) == expected


@pytest.mark.parametrize(
    ("message", "reason"),
    [(reply("x", "content_filter"), "ended by content_filter"), (reply("", tool_calls=[{"id": "1"}]), "tool calls")],
    ids=str,
)
def test_other_endings_are_failures(
    serve: Callable[[Handle], ChatServer], message: dict[str, Any], reason: str
) -> None:
    server = serve(lambda handler, _body, _seen: handler.send(message))
    (found,) = engine(server).answers([chat("q")])
    assert isinstance(found, EngineFailure)
    assert found.reason == reason


def test_leaving_early_cuts_what_is_under_way(serve: Callable[[Handle], ChatServer]) -> None:
    def first_only(handler: Handler, body: dict[str, Any], seen: int) -> None:
        if body["messages"][-1]["content"] != "q0":
            handler.server.released.wait(60)
        plain(handler, body, seen)

    server = serve(first_only)
    answers = engine(server, timeout_s=60.0, concurrency=4).answers([chat(f"q{i}") for i in range(20)])
    assert next(answers).row == 0
    before = time.monotonic()
    answers.close()
    assert time.monotonic() - before < 20
    assert len(server.seen) < 10
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("request")]


def test_the_only_model_is_found(serve: Callable[[Handle], ChatServer]) -> None:
    server = serve(plain)
    assert find_model(Server(url=server.url)) == "tiny"
    assert find_model(Server(url=server.url.removesuffix("/v1"))) == "tiny"
    server.models.append("other")
    with pytest.raises(ConfigError, match=r"\['tiny', 'other'\]; name one by --server-model"):
        find_model(Server(url=server.url))
    with pytest.raises(ConfigError, match="expected a URL"):
        find_model(Server(url="localhost:8000"))
    with pytest.raises(ConfigError, match="expected an OpenAI-compatible server, found connection failed"):
        find_model(Server(url="http://127.0.0.1:1/v1", retries=0))


def test_a_server_that_refuses_everybody_is_an_error(serve: Callable[[Handle], ChatServer]) -> None:
    server = serve(lambda handler, _body, _seen: handler.send({"error": "no such model"}, 404))
    with pytest.raises(ConfigError, match=r"HTTP 404.*no such model.*check --server"):
        list(engine(server).answers([chat(f"q{i}") for i in range(50)]))
    assert sum(server.seen.values()) < 50


# The command.


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Options]:
    monkeypatch.setattr(random.Random, "uniform", lambda *_arguments: 0.01)
    target = save_tokenizer(tmp_path / "target", CHATML)

    def make(name: str, server: ChatServer, prompts: list[str], **changes: Any) -> Options:
        source = tmp_path / f"{name}-chat.jsonl"
        write_conversations(source, [chat(prompt, "old") for prompt in prompts])
        values = {"concurrency": 4, "retries": 2, "request_timeout_s": 0.5, "max_drop": 0.5} | changes
        output = tmp_path / f"{name}.jsonl"
        return Options(conversations=(str(source),), target=target, output=output, server=server.url, **values)

    return make


def contents(path: Path) -> list[str]:
    return [json.loads(line)["messages"][-1]["content"] for line in path.read_text().splitlines()]


def test_the_command_keeps_order_and_counts(
    serve: Callable[[Handle], ChatServer], options: Callable[..., Options], capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["short", "a longer one 500", "always 400", "x truncated", "the very longest of them all", "always cut"]
    assert run(options("out", serve(troubled), prompts)) == 0
    answered = [prompt for prompt in prompts if not prompt.startswith("always")]
    path = options("out", serve(troubled), prompts).output
    assert contents(path) == [f"to {prompt}" for prompt in answered]
    assert {json.loads(line)["messages"][-1]["finish"] for line in path.read_text().splitlines()} == {"stop"}
    counts = json.loads(path.with_name("out.jsonl.summary.json").read_text())["counts"]
    assert counts["not answered, HTTP 400"] == counts["not answered, connection failed"] == 1
    assert counts["written"] == 4
    printed = capsys.readouterr().out
    assert "4 answers to 6 prompts" in printed
    assert "1 not answered, HTTP 400" in printed
    # What was not answered is asked for again, and nothing once all is there.
    for server, asked in ((serve(plain), 2), (serve(plain), 0)):
        assert run(options("out", server, prompts)) == 0
        assert len(server.seen) == asked
        assert contents(path) == [f"to {prompt}" for prompt in prompts]


def test_an_interrupted_run_goes_on_to_the_same_file(
    serve: Callable[[Handle], ChatServer], options: Callable[..., Options]
) -> None:
    prompts = [f"q{i}" + " and more" * (i % 5) for i in range(30)] + ["always 400"]
    whole = options("whole", serve(troubled), prompts)
    run(whole)

    partial = whole.output.with_name("parts.jsonl.partial")

    def dies(handler: Handler, body: dict[str, Any], seen: int) -> None:
        if len(handler.server.seen) <= 12:
            return troubled(handler, body, seen)
        while len(partial.read_text().splitlines()) < 4:
            time.sleep(0.01)
        return handler.send({"error": "going down"}, 403)

    dying = serve(dies)
    with pytest.raises(ConfigError, match="HTTP 403"):
        run(options("parts", dying, prompts, request_timeout_s=60.0))
    recorded = len(partial.read_text().splitlines()) - 1
    assert 3 <= recorded <= 13
    back = serve(troubled)
    assert run(options("parts", back, prompts)) == 0
    # Only what was not recorded is asked for.
    assert len(back.seen) == len(prompts) - recorded
    assert whole.output.with_name("parts.jsonl").read_bytes() == whole.output.read_bytes()


def test_too_many_failures_end_the_run_and_keep_what_is_there(
    serve: Callable[[Handle], ChatServer], options: Callable[..., Options]
) -> None:
    prompts = ["fine one", "fine two", *(f"always {i} 400" for i in range(30))]
    server = serve(troubled)
    with pytest.raises(ConfigError, match=r"prompts could not be answered.*\n.*chat.jsonl:\d+: HTTP 400"):
        run(options("out", server, prompts, max_drop=0.1, concurrency=1))
    assert len(server.seen) < 20


def test_reasoning_can_be_dropped(serve: Callable[[Handle], ChatServer], options: Callable[..., Options]) -> None:
    server = serve(lambda handler, _body, _seen: handler.send(reply("a", reasoning_content="r")))
    kept, dropped = options("kept", server, ["q"]), options("dropped", server, ["q"], reasoning=False)
    run(kept), run(dropped)
    assert json.loads(kept.output.read_text())["messages"][-1]["reasoning_content"] == "r"
    assert "reasoning_content" not in json.loads(dropped.output.read_text())["messages"][-1]


def test_the_flags_and_the_key_file(
    serve: Callable[[Handle], ChatServer], options: Callable[..., Options], tmp_path: Path
) -> None:
    server = serve(plain)
    made = options("out", server, ["q"])
    (tmp_path / "key").write_text("secret\n")
    flags = ["--server", server.url, "--server-model", "named", "--api-key-file", str(tmp_path / "key")]
    command = ["regenerate", *made.conversations, "--target", made.target, "--output", str(made.output), *flags]
    assert main(command) == 0
    assert server.keys == ["Bearer secret"]
    assert server.bodies[0]["model"] == "named"
    assert "secret" not in "".join(path.read_text() for path in tmp_path.glob("out*"))
    with pytest.raises(ConfigError, match="expected a file with the key"):
        run(options("other", server, ["q"], api_key_file=tmp_path / "missing"))
    with pytest.raises(ConfigError, match="name the server too"):
        run(Options(conversations=("x",), target="t", output=tmp_path / "o", server_model="m"))
    with pytest.raises(ConfigError, match="found 0, 5 and"):
        run(Options(conversations=("x",), target="t", output=tmp_path / "o", server=server.url, concurrency=0))
