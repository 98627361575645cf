"""Calls of the coordinator to xLLM instances: HTTP/1.1 with JSON, which every brpc server understands (§2, §5.3)."""

import contextlib
import time

import msgspec

from coordinator.core.errors import EngineFailed, Side
from coordinator.core.instance import Address, Instance
from coordinator.core.request import Headers
from coordinator.engines.http_leg import failed, refusal
from coordinator.engines.xllm.info import Info
from coordinator.transport.client import HttpClient
from coordinator.transport.errors import TransportError
from coordinator.transport.reply import Reply

JSON: Headers = ((b"content-type", b"application/json"),)
COMPLETIONS = "/xllm.proto.XllmAPIService/Completions"
LINK = "/xllm.proto.DisaggPDService/LinkInstance"
UNLINK = "/xllm.proto.DisaggPDService/UnlinkInstance"
MAX_REPLY_BYTES = 1 << 20
EMPTY = (b"", b"{}")  # a message without fields


class LinkError(Exception):
    """A link was not made.

    Attributes:
        reached: whether the instance that was to make it has answered at all.
    """

    def __init__(self, reason: str, *, reached: bool) -> None:
        super().__init__(reason)
        self.reached = reached


class _Status(msgspec.Struct):
    ok: bool = False


_STATUS = msgspec.json.Decoder(_Status)


class EngineCalls:
    """The coordinator's calls to instances.

    Args:
        call_s: how long a call may take.

    Attributes:
        call_s: as given; may change.
    """

    def __init__(self, client: HttpClient, call_s: float) -> None:
        self._client = client
        self.call_s = call_s

    async def link(self, initiator: Info, peer: Info) -> None:
        """Have an instance open its KV link to another.

        Raises:
            LinkError: it did not.
        """
        try:
            reply = await self._post(initiator.rpc, LINK, peer.as_peer())
        except TransportError as error:
            if error.reason == "key_refused":
                raise LinkError(f"{initiator.name} refuses the coordinator's key", reached=True) from error
            raise LinkError(f"{initiator.name} cannot be reached: {error.reason}", reached=False) from error
        if not _is_ok(reply):
            raise LinkError(f"{initiator.name} has no link to {peer.name}: it refused", reached=True)

    async def unlink(self, initiator: Info, peer: Info) -> None:
        """Have an instance close its link to another, which may be gone; whatever comes of it."""
        with contextlib.suppress(TransportError):
            await self._post(initiator.rpc, UNLINK, peer.as_peer())

    async def start(self, prefill: Instance, body: bytes, deadline_s: float) -> None:
        """Give a request to prefill, which answers at once; what comes of it arrives elsewhere.

        Raises:
            RequestError: it was not taken.
        """
        try:
            reply = await self._post(prefill.address, COMPLETIONS, body, deadline_s)
        except TransportError as error:
            raise failed(prefill, error) from error
        if reply.status != 200:
            raise refusal(prefill, reply.status, reply.headers, reply.body)
        if reply.body.strip() not in EMPTY:
            raise EngineFailed(Side.PREFILL, prefill.id, "bad_reply", detail="the call is answered with something else")

    async def health(self, instance: Instance, path: str, within_s: float) -> None:
        """Ask an instance whether it is well; raises RequestError."""
        try:
            reply = await self._client.fetch(instance.address, b"GET", path, (), deadline_s=time.monotonic() + within_s)
        except TransportError as error:
            raise failed(instance, error) from error
        if reply.status >= 500:
            raise refusal(instance, reply.status, reply.headers, reply.body)

    async def _post(self, address: Address, target: str, body: bytes, deadline_s: float | None = None) -> Reply:
        limit_s = time.monotonic() + self.call_s
        return await self._client.fetch(
            address,
            b"POST",
            target,
            JSON,
            body,
            deadline_s=limit_s if deadline_s is None else min(limit_s, deadline_s),
            max_reply_bytes=MAX_REPLY_BYTES,
        )


def _is_ok(reply: Reply) -> bool:
    if reply.status != 200:
        return False
    try:
        return _STATUS.decode(reply.body).ok
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
