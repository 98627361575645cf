"""A client for etcd v3 over its JSON gateway: keys with leases, transactions that create, watches.

Source: etcd's API reference (v3.4 and later serve it under `/v3/`). 64-bit numbers are texts there, keys and values are
base64, and a field with its default value is left out.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from coordinator.core.instance import Address

from .client import HttpClient
from .errors import TransportError
from .reply import Headers
from .sink import ReplySink
from .stream import Stream

T = TypeVar("T")

MAX_LINE_BYTES: Final = 32 << 20
OK: Final = 200


class EtcdError(Exception):
    """A call that etcd did not do; the text is for the log."""


class Compacted(EtcdError):
    """The history that a watch asks for is gone: everything must be read again."""


class KeyValue(msgspec.Struct):
    """One key."""

    key: bytes
    value: bytes = b""
    mod_revision: str = "0"


class Event(msgspec.Struct):
    """A change of one key; `type` is PUT or DELETE."""

    kv: KeyValue
    prev_kv: KeyValue | None = None
    type: str = "PUT"


class _Header(msgspec.Struct):
    revision: str = "0"


class _Range(msgspec.Struct):
    header: _Header = msgspec.field(default_factory=_Header)
    kvs: list[KeyValue] = []


class _Lease(msgspec.Struct):
    ID: str = "0"
    TTL: str = "0"


class _Kept(msgspec.Struct):
    result: _Lease = msgspec.field(default_factory=_Lease)


class _Txn(msgspec.Struct):
    succeeded: bool = False


class _Login(msgspec.Struct):
    token: str


class _Watched(msgspec.Struct):
    canceled: bool = False
    compact_revision: str = "0"
    cancel_reason: str = ""
    events: list[Event] = []


class _Failure(msgspec.Struct):
    message: str = ""


class _Line(msgspec.Struct):
    result: _Watched | None = None
    error: _Failure | None = None


_LINE = msgspec.json.Decoder(_Line)
_FAILURE = msgspec.json.Decoder(_Failure)


@dataclass(frozen=True, slots=True)
class Listing:
    """The keys of a range, as they were at one revision."""

    revision: int
    entries: Mapping[bytes, bytes]


class EtcdClient:
    """Calls to one etcd endpoint.

    Args:
        client: opens the connections.
        address: of the endpoint.
        call_s: how long a call may take.
    """

    def __init__(self, client: HttpClient, address: Address, call_s: float) -> None:
        client.peers.no_engine(address)
        self._client = client
        self._address = address
        self._call_s = call_s
        self._headers: Headers = ((b"content-type", b"application/json"),)

    async def log_in(self, name: str, password: str) -> None:
        """Say who calls from here on; raises EtcdError."""
        told = await self._call("/v3/auth/authenticate", {"name": name, "password": password}, _Login)
        self._headers = (self._headers[0], (b"authorization", told.token.encode()))

    async def put(self, key: bytes, value: bytes, lease: int = 0) -> None:
        """Write a key, which goes with its lease if it has one; raises EtcdError."""
        await self._call("/v3/kv/put", {"key": key, "value": value, "lease": str(lease)}, _Txn)

    async def create(self, key: bytes, value: bytes, lease: int) -> bool:
        """Write a key that is not there; False: it is. Raises EtcdError."""
        return await self._write_if({"key": key, "target": "CREATE", "create_revision": 0}, key, value, lease)

    async def hold(self, key: bytes, value: bytes, lease: int) -> bool:
        """Write a key that is not there, or give one with this value another lease; False: it has another value.

        Raises:
            EtcdError: it may have been done or not.
        """
        if await self.create(key, value, lease):
            return True
        return await self._write_if({"key": key, "target": "VALUE", "value": value}, key, value, lease)

    async def _write_if(self, compare: Mapping[str, object], key: bytes, value: bytes, lease: int) -> bool:
        put = {"request_put": {"key": key, "value": value, "lease": str(lease)}}
        return (await self._call("/v3/kv/txn", {"compare": [compare], "success": [put]}, _Txn)).succeeded

    async def list(self, start: bytes, end: bytes) -> Listing:
        """Read the keys from `start` up to, not including, `end`; raises EtcdError."""
        told = await self._call("/v3/kv/range", {"key": start, "range_end": end}, _Range)
        return Listing(int(told.header.revision), {kv.key: kv.value for kv in told.kvs})

    async def grant(self, ttl_s: int) -> int:
        """A new lease; raises EtcdError."""
        return int((await self._call("/v3/lease/grant", {"TTL": ttl_s}, _Lease)).ID)

    async def keep_alive(self, lease: int) -> bool:
        """Make a lease last for its whole time again; False: it has ended. Raises EtcdError."""
        told = await self._call("/v3/lease/keepalive", {"ID": str(lease)}, _Kept)
        return int(told.result.TTL) > 0

    async def revoke(self, lease: int) -> None:
        """End a lease with its keys; raises EtcdError."""
        await self._call("/v3/lease/revoke", {"ID": str(lease)}, _Txn)

    async def watch(self, start: bytes, end: bytes, revision: int, changed: Callable[[Event], None]) -> "Watch":
        """Have `changed` called with each change from a revision on; close the watch in the end.

        Raises:
            EtcdError: it cannot be begun.
        """
        body = msgspec.json.encode(
            {"create_request": {"key": start, "range_end": end, "start_revision": revision, "prev_kv": True}}
        )
        watch = Watch(changed)
        try:
            async with asyncio.timeout(self._call_s):
                watch.stream = await self._client.open_stream(
                    self._address, b"POST", "/v3/watch", self._headers, body, sink=watch
                )
        except (TransportError, TimeoutError) as error:
            raise EtcdError(str(error) or "no connection in time") from error
        return watch

    async def _call(self, path: str, given: Mapping[str, object], kind: type[T]) -> T:
        try:
            reply = await self._client.fetch(
                self._address,
                b"POST",
                path,
                self._headers,
                msgspec.json.encode(given),
                deadline_s=time.monotonic() + self._call_s,
            )
        except TransportError as error:
            raise EtcdError(str(error)) from error
        if reply.status != OK:
            raise EtcdError(f"{path}: status {reply.status}: {_message(reply.body)}")
        return _read(reply.body, kind, path)


class Watch(ReplySink):
    """The sink of a watch's endless answer: one JSON document per line.

    Attributes:
        ended: fails with EtcdError when nothing more will come.
    """

    def __init__(self, changed: Callable[[Event], None]) -> None:
        self._changed = changed
        self._buffer = bytearray()
        self._status = OK
        self.stream: Stream | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def close(self) -> None:
        """Stop watching."""
        if self.stream is not None:
            self.stream.close()
        self.ended.cancel()

    def head(self, status: int, headers: Headers) -> None:  # noqa: ARG002
        """See transport.sink.ReplySink."""
        self._status = status
        if status != OK:
            self._fail(EtcdError(f"watch: status {status}"))

    def data(self, data: bytes, now_s: float) -> None:  # noqa: ARG002
        """See transport.sink.ReplySink."""
        if self.ended.done():
            return
        self._buffer += data
        *lines, rest = bytes(self._buffer).split(b"\n") if b"\n" in data else [bytes(self._buffer)]
        self._buffer[:] = rest
        for line in lines:
            if line and not self.ended.done():
                self._line(line)
        if len(self._buffer) > MAX_LINE_BYTES:
            self._fail(EtcdError("a line of the watch is too long"))

    def end(self, now_s: float) -> None:  # noqa: ARG002
        """See transport.sink.ReplySink."""
        self._fail(EtcdError("the watch was closed"))

    def lost(self, error: TransportError) -> None:
        """See transport.sink.ReplySink."""
        self._fail(EtcdError(str(error)))

    def _line(self, line: bytes) -> None:
        try:
            told = _LINE.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._fail(EtcdError(f"a line of the watch cannot be read: {error}"))
            return
        result = told.result
        if result is None:
            self._fail(EtcdError(told.error.message if told.error is not None else "the watch says nothing"))
        elif int(result.compact_revision):
            self._fail(Compacted("the history was compacted"))
        elif result.canceled:
            self._fail(EtcdError(f"the watch was cancelled: {result.cancel_reason}"))
        else:
            for event in result.events:
                self._changed(event)

    def _fail(self, error: EtcdError) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # whoever waits gets it; nobody may be waiting any more


def _read(body: bytes, kind: type[T], path: str) -> T:
    try:
        found: Any = msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EtcdError(f"{path}: the answer cannot be read: {error}") from None
    made: T = found
    return made


def _message(body: bytes) -> str:
    try:
        return _FAILURE.decode(body).message[:200]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
