"""One attempt of a pattern: the calls that a router may make, and what of them must be put right afterwards."""

import math
import time
from collections.abc import AsyncIterator, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from coordinator.core.errors import EngineFailed, NoInstance, RequestError
from coordinator.core.instance import Instance, Role
from coordinator.core.ports import Placement
from coordinator.core.request import Headers, Request
from coordinator.engines.headers import engine_headers
from coordinator.engines.http_leg import failed, side_of
from coordinator.engines.microserving.errands import ReplyTask, Reservation
from coordinator.engines.microserving.leg import OK
from coordinator.engines.microserving.means import Means, explained
from coordinator.engines.microserving.pattern_stream import Chunks
from coordinator.sdk.run import Preference, Server
from coordinator.tokens import Tokenizer
from coordinator.transport.errors import TransportError
from coordinator.transport.reply import Reply
from coordinator.wire.json_edit import Fields, number, read_fields, text
from coordinator.wire.microserving import GENERATE, ONLY_DECODE, ONLY_GENERATE, PREPARE, SEND, free_body

_WINDOW = ("begin", "end", "kv_addr_info", "recv_rank")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the attempts of one pattern share.

    Attributes:
        shared: what routers keep for each other.
        alone: the mode is round-robin.
    """

    means: Means
    shared: MutableMapping[str, Any]
    alone: bool


class PatternRun:
    """Implements coordinator.sdk.Run for one attempt.

    Every reservation that a pattern makes and does not use is freed in the end, every stream it has not read is closed.

    Attributes:
        wire_id: the id under which the pattern calls engines.
    """

    def __init__(
        self, around: Surroundings, request: Request, placement: Placement, tokenizer: Tokenizer | None
    ) -> None:
        self._around = around
        self._placement = placement
        self._tokenizer = tokenizer
        self.wire_id = around.means.ids.next()
        self._headers: Headers = engine_headers(request, self.wire_id)
        self._reserved: dict[str, Reservation] = {}
        self._sending: dict[str, ReplyTask] = {}
        self._streams: list[Chunks] = []

    # --- coordinator.sdk.Run

    @property
    def prefill(self) -> Server:
        """See coordinator.sdk.Run."""
        return _server(self._placement.prefill)

    @property
    def decode(self) -> Server:
        """See coordinator.sdk.Run."""
        return _server(self._placement.decode)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """See coordinator.sdk.Run."""
        return self._tokenizer

    @property
    def shared(self) -> MutableMapping[str, Any]:
        """See coordinator.sdk.Run."""
        return self._around.shared

    @property
    def balance(self) -> float:
        """See coordinator.sdk.Run."""
        return self._around.means.settings.pd_balance_factor

    @property
    def alone(self) -> bool:
        """See coordinator.sdk.Run."""
        return self._around.alone or self._placement.prefill.address == self._placement.decode.address

    def servers(self, role: str) -> Sequence[Server]:
        """See coordinator.sdk.Run."""
        return [_server(one, load) for one, load in self._placement.candidates(Role(role))]

    def place(self, role: str, prefer: Preference | None) -> Server:
        """See coordinator.sdk.Run."""
        holder = self._placement.prefill if Role(role) is Role.PREFILL else self._placement.decode
        candidates = self._placement.candidates(Role(role))
        if not candidates:
            return _server(holder)
        ranked = [
            ((prefer(_server(one, load)) if prefer is not None else 0.0), one.key == holder.key, -at, one)
            for at, (one, load) in enumerate(candidates)
        ]
        chosen = max(ranked, key=lambda rank: rank[:3])[3]
        self._placement.hand_to(chosen)
        return _server(self._placement.prefill if Role(role) is Role.PREFILL else self._placement.decode)

    def leave(self, role: str) -> None:
        """See coordinator.sdk.Run."""
        if Role(role) is Role.PREFILL and not self.alone:
            self._placement.prefilled(time.monotonic(), pinned=False)

    async def prepare(self, server_url: str, body: bytes) -> bytes:
        """See coordinator.sdk.Run."""
        instance, fields = self._instance(server_url), self._fields(body)
        user, end = text(fields["user"]) or "", int(number(fields.get("end")) or 0)
        for name in ONLY_GENERATE:  # the engine would fail of some of them
            fields.pop(name, None)
        kept = {name: value for name, value in fields.items() if name not in _WINDOW}
        reservation = Reservation(instance, user, self._headers, free_body(kept, user, end))
        errands, within_s = self._around.means.errands, self._around.means.settings.prep_recv_s
        reply = await self._call(instance, PREPARE, fields, within_s, lambda task: errands.free_late(reservation, task))
        self._reserved[user] = reservation
        return reply.body

    async def send(self, server_url: str, body: bytes) -> None:
        """See coordinator.sdk.Run."""
        instance, fields = self._instance(server_url), self._fields(body)
        user = text(fields["user"]) or ""
        for name in ONLY_GENERATE | ONLY_DECODE:
            fields.pop(name, None)
        if instance is self._placement.prefill:
            self._placement.prefill_sent(user)
        within_s = self._around.means.settings.remote_send_s
        await self._call(instance, SEND, fields, within_s, lambda task: self._sending.__setitem__(user, task))
        if instance is self._placement.prefill:
            self._placement.prefilled(time.monotonic(), pinned=False)

    def generate(self, server_url: str, path: str, body: bytes) -> AsyncIterator[bytes]:
        """See coordinator.sdk.Run."""
        instance, fields = self._instance(server_url), self._fields(body)
        user = text(fields["user"]) or ""

        def reached(status: int) -> None:
            """The engine has looked at the request; what it refuses (4xx) is still reserved."""
            if not 400 <= status < 500:
                self._reserved.pop(user, None)

        stream = Chunks(
            self._around.means,
            instance,
            path,
            self._headers,
            msgspec.json.encode(fields),
            reached if path == GENERATE else None,
        )
        self._streams.append(stream)
        return stream

    # --- for the engine

    def pause(self) -> None:
        """Stop reading from engines: the client is slow."""
        for stream in self._streams:
            stream.held = True

    def resume(self) -> None:
        """Read on."""
        for stream in self._streams:
            stream.held = False

    def finish(self) -> None:
        """The pattern is over: free and close what it has left behind."""
        for stream in self._streams:
            stream.close()
        for user, reservation in self._reserved.items():
            self._around.means.errands.free(reservation, self._sending.get(user))
        self._reserved.clear()

    def guilty(self, error: RequestError) -> RequestError:
        """The error of a pattern's call; one of an instance that was not placed is nobody's who could be charged."""
        placed = (self._placement.prefill.id, self._placement.decode.id)
        if isinstance(error, EngineFailed) and error.instance_id not in placed:
            return NoInstance("an engine that the pattern has called failed", detail=f"{error.instance_id}: {error}")
        return error

    # --- inside

    def _instance(self, server_url: str) -> Instance:
        url = server_url.rstrip("/")
        for placed in (self._placement.prefill, self._placement.decode):
            if placed.url == url:
                return placed
        known = [one for role in (Role.PREFILL, Role.DECODE) for one, _ in self._placement.candidates(role)]
        found = next((one for one in known if one.url == url), None)
        if found is None:
            raise LookupError("a pattern can only call instances that its request could have got")
        return found

    def _fields(self, body: bytes) -> Fields:
        """A pattern's body with an id and the object that the engine needs."""
        fields = read_fields(body)
        fields = {name: value for name, value in fields.items() if bytes(memoryview(value)[:4]) != b"null"}
        fields.setdefault("user", msgspec.Raw(msgspec.json.encode(self.wire_id)))
        fields.setdefault("debug_config", msgspec.Raw(b"{}"))
        return fields

    async def _call(
        self, instance: Instance, path: str, fields: Fields, within_s: float, left: Callable[[ReplyTask], None]
    ) -> Reply:
        means = self._around.means
        work = means.client.fetch(
            instance.address,
            b"POST",
            path,
            self._headers,
            msgspec.json.encode(fields),
            deadline_s=math.inf,
            retry_stale=path == SEND,
        )
        try:
            reply = await means.errands.call(f"{path.rpartition('/')[2]} {self.wire_id}", work, within_s, left)
        except TransportError as error:
            raise failed(instance, error) from error
        if reply.status != OK:
            raise explained(instance, reply)
        try:
            read_fields(reply.body)
        except ValueError as error:
            raise EngineFailed(side_of(instance), instance.id, "bad_reply", detail=str(error)) from error
        return reply


def _server(instance: Instance, in_flight: int = 0) -> Server:
    rank = instance.options.get("recv_rank")
    return Server(instance.id, instance.url, instance.role.value, rank if isinstance(rank, int) else None, in_flight)
