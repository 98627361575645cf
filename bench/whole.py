"""Whole requests without a network: a client's bytes in, the engines' bytes in, the answer out.

Everything between the sockets is real: connection, front door, dispatcher, scheduler, engine protocol, transport,
relay, metrics and log line. The sockets are objects: a client's that counts, an engine's that answers at once.
"""

import asyncio
import io
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from coordinator.api.families import FAMILIES
from coordinator.config import parse, to_instances
from coordinator.core.errors import EngineFailed
from coordinator.core.instance import Instance, Role
from coordinator.core.view import ClusterView
from coordinator.dataplane import DataPlane
from coordinator.frontdoor import Telemetry
from coordinator.observability.access import AccessLog
from coordinator.observability.metrics import Metrics
from coordinator.observability.writer import LineWriter
from coordinator.parts import make_engines, make_policies, make_tokenizers, validate_options
from coordinator.scheduler import Scheduler
from coordinator.security.keys import Key
from coordinator.server.connection import ClientConnection
from coordinator.server.limits import ServerLimits
from coordinator.server.shared import Shared
from coordinator.transport.client import HttpClient
from coordinator.transport.connection import Connection

CONFIG = """
cluster:
  engine: {engine}
  instances:
    - {{role: prefill, url: "http://10.0.0.1:1", id: p0{more}}}
    - {{role: decode, url: "http://10.0.0.1:2", id: d0}}
scheduling: {{policy: round_robin}}
"""
MORE = {"sglang": ", bootstrap_port: 8998"}
PARAMS = (
    b'{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[1,2,3,4,5,6,7,8],'
    b'"remote_engine_id":"0123456789abcdef","remote_host":"10.0.0.1","remote_port":5600}'
)
ANSWER = (
    b'{"id":"cmpl-1","object":"chat.completion","created":1700000000,"model":"m","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"one two three four"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":300,"completion_tokens":4,"total_tokens":304}%b}'
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


class _Members:
    """Two instances that are always there (core.ports.Members)."""

    def __init__(self, view: ClusterView) -> None:
        self.view = view

    def charge(self, instance: Instance, error: EngineFailed) -> None:
        raise AssertionError(f"{instance.id} has failed a request: {error}")

    def credit(self, instance: Instance) -> None:
        pass

    def models(self) -> Sequence[str]:
        return ("m",)

    def accepts(self, model: str | None) -> bool:  # noqa: ARG002
        return True

    def ready_pair(self) -> tuple[bool, str]:
        return True, "ready"


class _Socket:
    """A transport; `react` gets what is written."""

    def __init__(self, react: Callable[[bytes], None]) -> None:
        self.write = react

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, **_: int) -> None:
        pass

    def get_extra_info(self, name: str) -> tuple[str, int] | None:
        return ("127.0.0.1", 1) if name == "peername" else None

    def abort(self) -> None:
        raise AssertionError("a connection was aborted")


class _Nowhere(io.StringIO):
    """Takes log lines and keeps none."""

    def write(self, text: str) -> int:
        return len(text)


@dataclass(frozen=True, slots=True)
class Guarded:
    """What a site does beside serving.

    Attributes:
        log: the form of the line for each request; None: there are no lines.
        keys: those that it takes; None: it needs none.
    """

    log: Literal["text", "json"] | None = "text"
    keys: Sequence[Key] | None = None


class Site:
    """A data plane and `width` clients, each of which sends its request again as soon as it has an answer.

    Args:
        engine: name of the engine protocol.
        request: what a client sends.
        reply_of: what an instance of a role answers.
        width: how many clients.
        guarded: what it does beside that.
    """

    def __init__(
        self,
        engine: str,
        request: bytes,
        reply_of: Callable[[Role], bytes],
        width: int,
        guarded: Guarded = Guarded(),  # it is frozen
    ) -> None:
        self._request = request
        self._loop = loop = asyncio.get_running_loop()
        settings = parse(CONFIG.format(engine=engine, more=MORE.get(engine, "")))
        metrics = Metrics([family.name for family in FAMILIES])
        self.client = HttpClient(connect_s=1)
        engines = make_engines(settings, self.client, metrics, make_tokenizers(settings))
        instances = to_instances(settings, validate_options)
        view = ClusterView(1, ready=instances)
        scheduler = Scheduler(make_policies(settings), max_queue=10)
        scheduler.on_view(view)
        log = logging.getLogger(f"pd_coordinator.bench.{guarded.log}")
        log.setLevel(logging.WARNING if guarded.log is None else logging.INFO)
        access = AccessLog(log, LineWriter(_Nowhere()), as_json=guarded.log == "json")
        telemetry = Telemetry(metrics, access, lambda _bytes, _events: None)
        self._data = DataPlane(settings, _Members(view), scheduler, engines, telemetry)
        self._data.secure(settings, guarded.keys)
        door = self._data.door
        self._shared = Shared(
            door.handle, ServerLimits(), log, time.monotonic, ThreadPoolExecutor(1), lambda: None, door.gate
        )
        for instance in instances:
            for _ in range(width):
                self._connect(instance, reply_of(instance.role))
        self._left = 0
        self._done: asyncio.Future[None] = loop.create_future()
        self._clients = [self._greet() for _ in range(width)]

    def _connect(self, instance: Instance, reply: bytes) -> None:
        pool = self.client._pool  # noqa: SLF001  # nothing else opens a connection without a network
        connection = Connection(instance.address, pool)

        def asked(data: bytes) -> None:
            self._wrote(data)
            self._loop.call_soon(connection.data_received, reply)

        connection.connection_made(_Socket(asked))  # type: ignore[arg-type]
        pool.add(connection)
        pool.put(connection, time.monotonic())

    def _greet(self) -> ClientConnection:
        connection = ClientConnection(self._shared)

        def answered(data: bytes) -> None:
            self._wrote(data)
            assert data.startswith(b"HTTP/1.1 200"), data
            self._left -= 1
            if self._left >= len(self._clients):
                self._loop.call_soon(connection.data_received, self._request)
            elif self._left == 0:
                self._done.set_result(None)

        connection.connection_made(_Socket(answered))  # type: ignore[arg-type]
        return connection

    def _wrote(self, data: bytes) -> None:
        """See what goes out."""

    async def serve(self, requests: int) -> None:
        """See so many requests answered; at least as many as there are clients."""
        self._left = requests
        self._done = self._loop.create_future()
        for connection in self._clients:
            connection.data_received(self._request)
        await self._done


def vllm_reply(role: Role) -> bytes:
    """The answer of a vLLM instance, which hands its KV over if it is a prefill one."""
    answer = ANSWER % (b',"kv_transfer_params":' + PARAMS if role is Role.PREFILL else b"")
    return HEAD % len(answer) + answer


def sglang_reply(role: Role) -> bytes:  # noqa: ARG001  # both answer alike
    """The answer of an SGLang instance."""
    answer = ANSWER % b""
    return HEAD % len(answer) + answer
