"""The clients of the soak: calls in every dialect, faults that they order, and ways to leave early."""

import asyncio
import json
import random
import re
import socket
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

HOST = "127.0.0.1"
MODEL = "soak"
SILENCE_S = 30.0  # nothing for so long: the request hangs
PAUSE_S = 0.05  # after a connection that nobody took
THINGS = ("sea", "wind", "forest", "school", "market", "island", "winter", "morning")
LENGTHS = (4, 16, 48, 96)
# faults that a prompt orders, with their weights; `@K` becomes a token of the answer
FAULTS = {
    "": 160, "decode_error@K": 4, "preempt@K": 12, "refuse_handover": 2, "pull_failed": 2, "not_json": 2, "empty": 1,
    "status=500": 2, "status=429": 2, "status=422": 2, "reset": 2, "close": 2, "reply_delay=0.2": 6, "split@K": 6,
    "merge@K": 6, "unknown_req_id@K": 3, "late_events=3": 3, "stall@K": 4,
    "dresult_reset@K": 0.05, "dresult_end@K": 0.05,
}  # fmt: skip
PHASES = ("half a request", "at once", "at the head", "in the middle")
_DATA = re.compile(rb"^data: ?(.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Dialect:
    """One call: its path, the body for a prompt, and the text of a complete answer."""

    path: str
    body: Callable[[str], dict[str, Any]]
    text: Callable[[bytes], str]


def _chat(prompt: str) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": prompt}]}


def _chat_stream(prompt: str) -> dict[str, Any]:
    return {**_chat(prompt), "stream": True}


def _inputs(prompt: str) -> dict[str, Any]:
    return {"inputs": prompt, "stream": True, "parameters": {"max_new_tokens": 200}}


def _vllm(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "stream": True, "max_tokens": 200}


def _triton(prompt: str) -> dict[str, Any]:
    return {"text_input": prompt, "parameters": {"max_new_tokens": 200}}


def _choices(raw: bytes) -> str:
    *chunks, done = _DATA.findall(raw)
    if done != b"[DONE]":
        return "no [DONE]"
    return "".join(json.loads(chunk)["choices"][0]["delta"]["content"] for chunk in chunks)


def _outputs(raw: bytes) -> str:
    return "".join(json.loads(event)["text_output"] for event in _DATA.findall(raw))


def _content(raw: bytes) -> str:
    text: str = json.loads(raw)["choices"][0]["message"]["content"]
    return text


def _generated(raw: bytes) -> str:
    text: str = json.loads(_DATA.findall(raw)[-1])["generated_text"]
    return text


def _pieces(raw: bytes) -> str:
    return "".join(json.loads(piece)["text"][0] for piece in raw.split(b"\0")[:-1])


DIALECTS = {
    "chat stream": Dialect("/v1/chat/completions", _chat_stream, _choices),
    "chat": Dialect("/v1/chat/completions", _chat, _content),
    "tgi stream": Dialect("/generate_stream", _inputs, _generated),
    "mindie stream": Dialect("/infer", _inputs, _generated),
    "vllm stream": Dialect("/generate", _vllm, _pieces),
    "triton stream": Dialect(f"/v2/models/{MODEL}/generate_stream", _triton, _outputs),
    "triton": Dialect(f"/v2/models/{MODEL}/generate", _triton, lambda raw: str(json.loads(raw)["text_output"])),
}


class Left(Exception):
    """The client has left on purpose."""


class Connection:
    """One keep-alive connection; `complete` tells whether the last answer ended as its framing demands."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.status = 0
        self.complete = False
        self.reusable = True

    @classmethod
    async def open(cls, port: int) -> "Connection":
        return cls(*await asyncio.open_connection(HOST, port))

    def send(self, path: str, body: dict[str, Any], *, half: bool = False) -> None:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: soak\r\nContent-Length: {len(data)}\r\n\r\n"
        whole = head.encode() + data
        self._writer.write(whole[: len(whole) // 2] if half else whole)

    async def answer(self, leave_after: int | None) -> bytes:
        """The body, as far as it comes; raises Left after that many pieces."""
        self.status, self.complete = 0, False
        head = await self._reader.readuntil(b"\r\n\r\n")
        self.status = int(head[9:12])
        self.reusable = b"connection: close" not in head.lower()
        length = re.search(rb"(?i)content-length: (\d+)", head)
        if leave_after == 0:
            raise Left
        if length is not None:
            body = await self._reader.readexactly(int(length.group(1)))
            self.complete = True
            return body
        return await self._chunks(leave_after)

    async def _chunks(self, leave_after: int | None) -> bytes:
        parts: list[bytes] = []
        while True:
            size = int(await self._reader.readuntil(b"\r\n"), 16)
            data = await self._reader.readexactly(size + 2)
            if not size:
                self.complete = True
                return b"".join(parts)
            parts.append(data[:-2])
            if len(parts) == leave_after:
                raise Left

    def close(self, *, reset: bool) -> None:
        if reset:
            sock = self._writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._writer.transport.abort()
        else:
            self._writer.close()


class Clients:
    """Keeps a number of requests alive until `stop`.

    Attributes:
        outcomes: how requests ended: whole, left, broken (visibly cut short), refused, hung, wrong, or a status.
        wrong: examples of answers that look whole and are not what the same prompt got before.
    """

    def __init__(self, port: int, count: int, seed: int, leaving: float) -> None:
        self._port = port
        self._random = random.Random(seed)
        self._leaving = leaving
        self._right: dict[tuple[str, str], str] = {}
        self._stopping = False
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._tasks = [asyncio.create_task(self._client(), name=f"client {number}") for number in range(count)]

    async def stop(self) -> None:
        """Let the live requests end; those that hang do so by themselves."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _client(self) -> None:
        connection: Connection | None = None
        while not self._stopping:
            if connection is None:
                try:
                    connection = await Connection.open(self._port)
                except OSError:
                    self.outcomes["refused"] += 1
                    await asyncio.sleep(PAUSE_S)
                    continue
            outcome = await self._request(connection)
            self.outcomes[outcome] += 1
            if not (connection.complete and connection.reusable):
                connection.close(reset=self._random.choice((True, False)))
                connection = None
        if connection is not None:
            connection.close(reset=False)

    def _prompt(self) -> tuple[str, bool]:
        """A prompt, and whether its answer never ends by itself."""
        length = self._random.choice(LENGTHS)
        fault = self._random.choices(list(FAULTS), list(FAULTS.values()))[0]
        order = f" [[fault:{fault.replace('K', str(length // 2))}]]" if fault else ""
        return f"Tell me about the {self._random.choice(THINGS)} [[length:{length}]]{order}", "stall" in fault

    async def _request(self, connection: Connection) -> str:
        name = self._random.choice(list(DIALECTS))
        prompt, endless = self._prompt()
        leaves = endless or self._random.random() < self._leaving
        phase = self._random.choice(PHASES[1:] if endless else PHASES) if leaves else ""
        try:
            async with asyncio.timeout(SILENCE_S):
                raw = await self._exchange(connection, name, prompt, phase)
        except Left:
            return "left"
        except TimeoutError:
            connection.complete = False
            return "hung"
        except (OSError, EOFError):
            return "broken"
        if connection.status != 200:
            return str(connection.status)
        return self._judge(name, prompt, raw)

    async def _exchange(self, connection: Connection, name: str, prompt: str, phase: str) -> bytes:
        dialect, stream = DIALECTS[name], name.endswith("stream")
        connection.complete = False
        connection.send(dialect.path, dialect.body(prompt), half=phase == "half a request")
        if phase in ("half a request", "at once"):
            await asyncio.sleep(self._random.random() * 0.1)
            raise Left
        # a stalled answer may have no more than one piece
        pieces = {"at the head": 0, "in the middle": 1 if "stall" in prompt else self._random.randint(1, 3)}.get(phase)
        if phase and not stream:
            try:
                async with asyncio.timeout(self._random.random()):  # a whole answer has no middle
                    return await connection.answer(None)
            except TimeoutError:
                raise Left from None
        return await connection.answer(pieces)

    def _judge(self, name: str, prompt: str, raw: bytes) -> str:
        try:
            text = DIALECTS[name].text(raw)
        except (ValueError, LookupError, TypeError) as error:
            self.wrong.append(f"{name} {prompt!r}: {type(error).__name__} in {raw[-200:]!r}")
            return "wrong"
        right = self._right.setdefault((name, prompt), text)
        if text and text == right:
            return "whole"
        self.wrong.append(f"{name} {prompt!r}: {text[-200:]!r} instead of {right[-200:]!r}")
        return "wrong"
