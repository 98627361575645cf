"""Prefill, decode and the coordinator in front, and one question asked of both ways."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from processes import Coordinator, until
from raw_client import Client, ask
from vllm_server import MODEL, Books, VllmServer

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RELEASED_S = 15.0  # half of the lease: what is free by then, somebody has freed
WORDS = ["prefill", "reads", "the", "prompt", "and", "decode", "writes", "one", "token", "after", "a", "b", "c", "d"]
JSON_TYPE = {"Content-Type": "application/json"}  # vLLM wants it; the coordinator's clients may leave it out
SETTINGS = {
    "server": {"port": 0, "management_port": 0, "route_headers": True},
    "timeouts": {"connect_s": 5, "schedule_s": 5, "first_token_s": 120},
    "health": {"interval_s": 1, "timeout_s": 10, "fail_after": 2, "recover_after": 1},
}
_seeds = iter(range(1, 10**6))


def prompt(words: int = 150) -> str:
    """A text that no instance has seen: 150 words are about 180 tokens, 6 blocks."""
    chosen = random.Random(next(_seeds)).choices(WORDS, k=words)
    return " ".join(chosen)


def question(path: str, words: int = 150, **more: Any) -> dict[str, Any]:
    """A greedy request with a prompt of its own."""
    text = prompt(words)
    asked = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    return {"model": MODEL, "temperature": 0, "max_tokens": 32, **asked, **more}


@dataclass
class Choice:
    """One choice of an answer."""

    text: str = ""
    finish: str | None = None
    logprobs: list[tuple[str, float]] = field(default_factory=list)


@dataclass
class Answer:
    """An answer as a client puts it together, from a stream or not."""

    choices: dict[int, Choice]
    usage: dict[str, Any] | None

    @property
    def texts(self) -> dict[int, tuple[str, str | None]]:
        """Text and finish reason of each choice."""
        return {index: (choice.text, choice.finish) for index, choice in sorted(self.choices.items())}

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were found in a cache, as the usage tells."""
        assert self.usage, "no usage"
        return int((self.usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def read(client: Client) -> Answer:
    """Put a whole answer together; fails if it is not whole."""
    assert client.status == 200, (client.status, client.body)
    assert client.complete, client.body[-500:]
    if not str(client.header("content-type")).startswith("text/event-stream"):
        return _assemble([json.loads(client.body)])
    events = [event.removeprefix(b"data: ") for event in client.body.split(b"\n\n") if event]
    assert events[-1] == b"[DONE]", events[-1]
    return _assemble([json.loads(event) for event in events[:-1]])


def _assemble(parts: list[dict[str, Any]]) -> Answer:
    choices: dict[int, Choice] = {}
    usage = None
    for part in parts:
        assert "error" not in part, part
        usage = part.get("usage") or usage
        for row in part["choices"]:
            choice = choices.setdefault(row["index"], Choice())
            said = row.get("message") or row.get("delta") or row
            choice.text += said.get("text") or said.get("content") or ""
            choice.finish = row["finish_reason"] or choice.finish
            choice.logprobs += _logprobs(row.get("logprobs"))
    return Answer(choices, usage)


def _logprobs(given: dict[str, Any] | None) -> list[tuple[str, float]]:
    if not given:
        return []
    if "content" in given:
        return [(row["token"], row["logprob"]) for row in given["content"] or ()]
    return list(zip(given["tokens"], given["token_logprobs"], strict=True))


@dataclass(frozen=True)
class Moved:
    """What both instances did for some requests: their counters' growth."""

    prefill: Books
    decode: Books


class Pair:
    """The processes.

    Args:
        home: what setup.sh has made.
        folder: where logs go.
    """

    def __init__(self, home: Path, folder: Path) -> None:
        self._folder = folder
        self.prefill = VllmServer(home, "prefill", folder)
        self.decode = VllmServer(home, "decode", folder)
        self.coordinator: Coordinator | None = None
        self.moves: list[Books] = []  # of decode, for the summary

    @property
    def port(self) -> int:
        """The coordinator's data port."""
        assert self.coordinator
        return self.coordinator.port

    def start(self) -> None:
        """Wait for the instances, then start the coordinator."""
        self.prefill.wait_ready()
        self.decode.wait_ready()
        instances = [
            {"role": "prefill", "id": "p0", "url": self.prefill.url},
            {"role": "decode", "id": "d0", "url": self.decode.url},
        ]
        config = {**SETTINGS, "cluster": {"engine": "vllm", "model": MODEL, "instances": instances}}
        self.coordinator = Coordinator(config, self._folder)
        self.coordinator.wait_ready()

    def stop(self) -> None:
        """End everything, whatever state it is in."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.prefill.stop)
            stack.callback(self.decode.stop)
            if self.coordinator:
                stack.callback(self.coordinator.kill)
                self.coordinator.stop()

    def restart_decode(self) -> None:
        """Start a decode process at the address of the one that has ended. Returns at once."""
        self.decode = self.decode.again()

    def wait_ready(self) -> None:
        """Wait until decode answers and the coordinator has seen it."""
        self.decode.wait_ready()
        assert self.coordinator
        self.coordinator.wait_ready()

    def wait_idle(self, within_s: float = RELEASED_S) -> None:
        """Wait until no instance that lives holds a request or a KV block, and the coordinator's gauges are at zero."""
        servers = [server for server in (self.prefill, self.decode) if server.running]
        for server in servers:
            until(lambda server=server: server.books().idle, f"{server.role} is idle: {server.books()}", within_s)
        assert self.coordinator
        self.coordinator.wait_idle(within_s)

    async def alone(self, path: str, body: Mapping[str, Any]) -> Answer:
        """What one instance answers by itself: prefill, so that decode knows nothing of the prompt."""
        return read(await ask(self.prefill.port, path, body, JSON_TYPE))

    async def through(self, path: str, body: Mapping[str, Any]) -> Answer:
        """What the coordinator answers."""
        client = await ask(self.port, path, body)
        answer = read(client)
        route = [client.header(f"x-pd-{name}") for name in ("prefill", "decode", "attempts")]
        assert route == ["p0", "d0", "1"], route
        return answer

    @contextlib.asynccontextmanager
    async def moving(self) -> AsyncIterator[list[Moved]]:
        """What happens on the instances meanwhile; to be read after the block, from the one item of the list."""
        before = self.prefill.books(), self.decode.books()
        moved: list[Moved] = []
        yield moved
        await asyncio.to_thread(self.wait_idle)
        after = self.prefill.books(), self.decode.books()
        moved.append(Moved(*(_difference(old, new) for old, new in zip(before, after, strict=True))))
        self.moves.append(moved[0].decode)


def _difference(old: Books, new: Books) -> Books:
    counted = ("transfers", "transferred_bytes", "transferred_tokens", "computed_tokens", "generated_tokens")
    counted += ("expired", "failed")
    return replace(new, **{name: getattr(new, name) - getattr(old, name) for name in counted})
