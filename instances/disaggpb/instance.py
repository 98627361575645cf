"""A disaggpb worker: a gRPC server, and control calls over HTTP on the same port (disaggpb protocol page)."""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
from aiohttp import web

from instances.batch import Batch
from instances.disaggpb.calls import Call
from instances.disaggpb.decode import Decoding
from instances.disaggpb.door import Door
from instances.disaggpb.health import Health
from instances.disaggpb.kv import Shape
from instances.disaggpb.prefill import Prefilling
from instances.disaggpb.proto.disagg_pb2 import DecodeRequest, KVBlockStream, PreFillRequest, TokenStream
from instances.disaggpb.settings import MENU, Settings
from instances.faults import Menu
from instances.openai.refusal import answer
from instances.server import Instance

PREFILL, DECODE = "disagg.PrefillWorker", "disagg.DecodeWorker"


class DisaggpbEngine:
    """The disaggpb part of an instance."""

    menu: Menu = MENU
    health_paths: frozenset[str] = frozenset()
    aborts_on_disconnect = True

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.settings = Settings.read(instance.options.settings)
        self.shape = Shape(self.settings.layers, self.settings.kv_heads, self.settings.head_dim)
        self.batch = Batch(instance.clockwork, instance.options.max_running, _nothing, lambda: None)
        self.prefilling = Prefilling(self)
        self.decoding = Decoding(self)
        self._address = f"pd-coordinator-instance/grpc/{os.getpid()}/{id(self)}"
        self.door = Door(self._address, instance.tasks)
        self.live: set[Call] = set()
        self.wrong_kv: Counter[str] = Counter()
        self.prompt_tokens = self.generated_tokens = 0
        self._server: grpc.aio.Server | None = None

    # --- what the server asks for

    def routes(self) -> Iterable[web.RouteDef]:
        """No paths of its own: HTTP is for control calls."""
        return []

    def infers(self, method: str, path: str) -> bool:  # noqa: ARG002 - the interface of engines
        """No HTTP request is one."""
        return False

    def error(self, status: int, text: str) -> web.Response:
        """An error of HTTP, which the real worker does not speak."""
        return answer({"error": text}, status)

    async def start(self) -> None:
        """Start the gRPC server on its local socket, and the batch. Raises ValueError for files that cannot be."""
        settings = self.settings
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", settings.max_message_bytes),
                ("grpc.max_send_message_length", -1),
            ]
        )
        self._server.add_generic_rpc_handlers(self._handlers())
        address = f"unix-abstract:{self._address}"
        if settings.tls_cert:
            self._server.add_secure_port(address, self._credentials())
        else:
            self._server.add_insecure_port(address)
        await self._server.start()
        self.instance.tasks.spawn(self.batch.run(), f"{self.instance.name} generates")

    def _handlers(self) -> list[grpc.GenericRpcHandler]:
        """The services that belong to the role."""
        role = self.instance.role
        services: dict[str, dict[str, Any]] = {}
        if role in ("prefill", "hybrid"):
            services[PREFILL] = {
                "Prefill": grpc.unary_stream_rpc_method_handler(
                    self.prefilling.run, PreFillRequest.FromString, KVBlockStream.SerializeToString
                )
            }
        if role in ("decode", "hybrid"):
            services[DECODE] = {
                "Decode": grpc.unary_stream_rpc_method_handler(
                    self.decoding.run, DecodeRequest.FromString, TokenStream.SerializeToString
                )
            }
        handlers = [grpc.method_handlers_generic_handler(name, methods) for name, methods in services.items()]
        return [*handlers, Health(self, list(services)).handler()] if self.settings.health else handlers

    def _credentials(self) -> grpc.ServerCredentials:
        settings = self.settings
        try:
            key, chain = Path(settings.tls_key).read_bytes(), Path(settings.tls_cert).read_bytes()
            ca = Path(settings.tls_client_ca).read_bytes() if settings.tls_client_ca else None
        except OSError as wrong:
            raise ValueError(f"cannot read {wrong.filename}: {wrong.strerror}") from None
        return grpc.ssl_server_credentials([(key, chain)], ca, ca is not None)

    def accept(self, http: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
        """The protocol for a new connection, whichever it speaks."""
        return self.door.accept(http)

    def went_down(self) -> None:
        """All connections break off."""
        self.door.cut_all()

    def came_up(self) -> None:
        """Nothing goes out from a worker."""

    def forget(self) -> None:
        """End all calls: CANCELLED, if the connection is still there."""
        for call in self.live:
            call.end()
        self.batch.clear()

    async def aclose(self) -> None:
        """End all calls and the server."""
        self.forget()
        if self._server is not None:
            await self._server.stop(None)
        self.door.cut_all()

    def announce(self) -> str:
        """What is spoken, where it is not plain."""
        return "gRPC with TLS" if self.settings.tls_cert else ""

    def act(self, name: str, value: str) -> None:
        """cut: all gRPC connections are reset, the worker goes on. cancel: all calls end."""
        if name == "cut" and not value:
            self.door.cut_all()
        elif name == "cancel" and not value:
            self.forget()
        else:
            raise ValueError(f"cannot do {name!r}")

    def state(self) -> dict[str, Any]:
        """What is going on, as JSON."""
        return {
            "grpc_connections": self.door.connections,
            "grpc_connections_accepted": self.door.accepted,
            "batch": {"running": self.batch.running, "waiting": self.batch.waiting},
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "kv_bytes_sent": self.prefilling.sent_bytes,
            "kv_bytes_received": self.decoding.received_bytes,
            "wrong_kv": dict(self.wrong_kv),
        }


async def _nothing() -> None:
    return
