"""Answers from any OpenAI-compatible server, such as vLLM's and SGLang's: many requests at once, each retried.

A request that ends in HTTP 408, 409, 425, 429 or 5xx, in a time-out, a cut connection or a reply that is no whole JSON
is sent again after a growing, jittered wait. What still fails is handed on as a failure with its reason. Only a server
that refuses everybody (401, 403, 404) is an error.
"""

import hashlib
import http.client
import json
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from blockdraft.config import ConfigError
from blockdraft.data.conversations import ChatTemplate, Conversation
from blockdraft.decoding.engine import EngineAnswer, EngineFailure, Sampling, is_looping, split_reasoning

WORTH_RETRYING = frozenset({408, 409, 425, 429})
REFUSED_TO_ALL = frozenset({401, 403, 404})
LONGEST_WAIT_S = 60.0
SENT_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
"""Fields of a message that the server is told; others are this project's own."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """How a server is reached and how patient we are."""

    url: str
    """Such as http://localhost:8000/v1; a bare host gets /v1."""
    model: str = ""
    """Empty: the only one that it serves."""
    api_key: str = ""
    concurrency: int = 32
    timeout_s: float = 600.0
    """For a whole request."""
    retries: int = 5
    first_wait_s: float = 1.0
    """Doubled after each failure, and spread by half in both directions."""


class Reply(NamedTuple):
    """One HTTP reply."""

    status: int
    body: bytes
    retry_after_s: float


class _Failed(RuntimeError):
    """A request that did not work out."""

    def __init__(self, reason: str, detail: str, *, is_final: bool = False, wait_s: float = 0.0) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail, self.is_final, self.wait_s = reason, detail, is_final, wait_s


class _Stopped(RuntimeError):
    """The run ends; nobody waits for this answer."""


class Connection:
    """Requests to one server, from any number of threads; `stop` cuts those under way."""

    def __init__(self, server: Server) -> None:
        parts = urlsplit(server.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--server: expected a URL such as http://localhost:8000/v1, found {server.url!r}")
        self.server = server
        self._host, self._port, self._is_tls = parts.hostname, parts.port, parts.scheme == "https"
        self._base = parts.path.rstrip("/") or "/v1"
        self._tls = ssl.create_default_context() if self._is_tls else None
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if server.api_key:
            self._headers["Authorization"] = f"Bearer {server.api_key}"
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()

    def json(self, method: str, path: str, payload: dict[str, Any] | None, jitter: random.Random) -> dict[str, Any]:
        """A request, retried; the object in its reply.

        Raises:
            _Failed: it did not work out.
            ConfigError: the server refuses everybody.
        """
        for attempt in range(self.server.retries + 1):
            try:
                return self._once(method, path, payload)
            except _Failed as failed:
                if failed.is_final or attempt == self.server.retries:
                    raise
                wait_s = self.server.first_wait_s * 2**attempt * jitter.uniform(0.5, 1.5)
                if self._stopped.wait(min(max(wait_s, failed.wait_s), LONGEST_WAIT_S)):
                    raise _Stopped from failed
        raise AssertionError("unreachable")

    def stop(self) -> None:
        """Ends waits and cuts requests under way."""
        self._stopped.set()
        with self._lock:
            for open_socket in self._open:
                try:
                    open_socket.shutdown(socket.SHUT_RDWR)
                except OSError:
                    # Cut already by the other side.
                    continue

    def _once(self, method: str, path: str, payload: dict[str, Any] | None) -> dict[str, Any]:
        try:
            reply = self._send(method, path, payload)
        except TimeoutError as error:
            raise _Failed("time-out", f"no whole reply within {self.server.timeout_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            if self._stopped.is_set():
                raise _Stopped from error
            raise _Failed("connection failed", f"{type(error).__name__}: {error}") from error
        text = reply.body.decode("utf-8", errors="replace")
        where = f"{self.server.url} answered {method} {self._base}{path} with HTTP {reply.status}: {text[:200]}"
        if reply.status in REFUSED_TO_ALL:
            raise ConfigError(f"{where}; check --server, --server-model and --api-key-file")
        if reply.status != 200:
            is_final = reply.status < 500 and reply.status not in WORTH_RETRYING
            raise _Failed(f"HTTP {reply.status}", text[:200], is_final=is_final, wait_s=reply.retry_after_s)
        try:
            value = json.loads(reply.body)
        except ValueError as error:
            raise _Failed("reply is no whole JSON", text[-200:]) from error
        if not isinstance(value, dict):
            raise _Failed("reply is no JSON object", text[:200])
        return value

    def _send(self, method: str, path: str, payload: dict[str, Any] | None) -> Reply:
        """One request on a connection of its own, within the time-out from first to last byte."""
        end = time.monotonic() + self.server.timeout_s
        timeout = self.server.timeout_s
        connection: http.client.HTTPConnection
        if self._tls is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        else:
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=timeout, context=self._tls)
        try:
            connection.connect()
            open_socket = connection.sock
            with self._lock:
                self._open.add(open_socket)
            try:
                if self._stopped.is_set():
                    raise _Stopped
                body = None if payload is None else json.dumps(payload).encode()
                connection.request(method, self._base + path, body, self._headers)
                open_socket.settimeout(_left(end))
                # The response holds the socket too: left unread, it would keep it open until it is collected.
                with connection.getresponse() as response:
                    chunks = []
                    while True:
                        # A socket's time-out is for one read; a server that drips would never meet it.
                        open_socket.settimeout(_left(end))
                        chunk = response.read1(65536)
                        if not chunk:
                            break
                        chunks.append(chunk)
                    return Reply(response.status, b"".join(chunks), _seconds(response.headers.get("Retry-After")))
            finally:
                with self._lock:
                    self._open.discard(open_socket)
        finally:
            connection.close()


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _seconds(text: str | None) -> float:
    """Retry-After in seconds; its other form, a date, is not worth a wait of its own."""
    return float(text) if text is not None and text.isdigit() else 0.0


def find_model(server: Server) -> str:
    """The model to ask for: the one named, or the only one served.

    Raises:
        ConfigError: the server cannot be reached, or serves none or several.
    """
    if server.model:
        return server.model
    try:
        listed = Connection(server).json("GET", "/models", None, random.Random(0))
    except _Failed as failed:
        raise ConfigError(f"--server {server.url}: expected an OpenAI-compatible server, found {failed}") from failed
    names = [str(entry["id"]) for entry in listed.get("data", [])]
    if len(names) != 1:
        raise ConfigError(f"--server {server.url}: serves {names or 'no model'}; name one by --server-model")
    return names[0]


class ServerEngine:
    """An AnswerEngine whose answers come from a server."""

    def __init__(self, server: Server, template: ChatTemplate, sampling: Sampling) -> None:
        """`server` names its model (`find_model`)."""
        self._server = server
        self._template = template
        self._sampling = sampling

    def answers(
        self, conversations: Sequence[Conversation], made: Callable[[int], None] | None = None
    ) -> Iterator[EngineAnswer | EngineFailure]:
        """Each as soon as it is there. Leaving early (an error, Ctrl-C) cuts the requests under way."""
        connection = Connection(self._server)
        # Rendered here: a tokenizer is not made for several threads.
        opened = [
            self._template.prompt_text(one, thinking=self._sampling.thinking).rstrip().endswith("<think>")
            for one in conversations
        ]
        pool = ThreadPoolExecutor(self._server.concurrency, thread_name_prefix="request")
        try:
            waiting = {pool.submit(self._ask, connection, one): row for row, one in enumerate(conversations)}
            for future in as_completed(waiting):
                row = waiting.pop(future)
                reply = future.result()
                found = reply if isinstance(reply, _Failed) else self._read(row, reply, opened[row])
                if isinstance(found, _Failed):
                    yield EngineFailure(row, found.reason, found.detail)
                    continue
                if made is not None:
                    made(found.num_tokens)
                yield found
        finally:
            connection.stop()
            pool.shutdown(wait=True, cancel_futures=True)

    def _ask(self, connection: Connection, conversation: Conversation) -> dict[str, Any] | _Failed:
        payload: dict[str, Any] = {
            "model": self._server.model,
            "messages": [
                {name: message[name] for name in SENT_FIELDS if name in message} for message in conversation.messages
            ],
            "max_tokens": self._sampling.max_new_tokens,
            "temperature": self._sampling.temperature,
            "stream": False,
        }
        digest = hashlib.sha256(json.dumps([self._sampling.seed, payload["messages"]]).encode()).digest()
        if self._sampling.temperature > 0:
            payload["seed"] = int.from_bytes(digest[:4], "big") >> 1
        if self._sampling.thinking is not None:
            payload["chat_template_kwargs"] = {"enable_thinking": self._sampling.thinking}
        if conversation.tools:
            payload["tools"] = conversation.tools
        try:
            return connection.json("POST", "/chat/completions", payload, random.Random(digest))
        except _Failed as failed:
            return failed

    def _read(self, row: int, reply: dict[str, Any], is_open: bool) -> EngineAnswer | _Failed:
        """The first choice of a reply."""
        try:
            choice = reply["choices"][0]
            message, finish = choice["message"], choice["finish_reason"]
            content = message.get("content") or ""
        except (KeyError, IndexError, TypeError, AttributeError):
            return _Failed("reply without an answer", json.dumps(reply)[:200])
        ended = _finish(finish)
        if ended is None or message.get("tool_calls"):
            return _Failed("tool calls" if message.get("tool_calls") else f"ended by {finish}", content[:200])
        # vLLM's newer name is the second.
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        is_cut = ended == "length" and bool(reasoning) and not content
        if not reasoning:
            reasoning, content, is_cut = split_reasoning(content, is_open=is_open)
        ids = self._template.ids(reasoning + content)
        usage = reply.get("usage") or {}
        return EngineAnswer(
            row,
            content.lstrip("\n") if reasoning else content,
            reasoning.strip("\n"),
            ended,
            is_looping(ids),
            is_cut,
            int(usage.get("completion_tokens") or len(ids)),
        )


def _finish(reason: object) -> Literal["stop", "length"] | None:
    return "stop" if reason == "stop" else "length" if reason == "length" else None
