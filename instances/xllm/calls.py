"""What every call over baidu_std passes before its method: the record, and the faults that strike at the door."""

import asyncio
import time
from typing import TYPE_CHECKING

from google.protobuf.json_format import MessageToJson
from google.protobuf.message import DecodeError, Message

from instances.faults import BadFault, Chosen
from instances.records import Record
from instances.replies import reset
from instances.xllm.errors import EREQUEST, RpcError, code_of
from instances.xllm.services import Method
from instances.xllm.serving import Call

if TYPE_CHECKING:
    from instances.xllm.instance import XllmEngine


class _Severed(Exception):
    """There is nothing to answer."""


class Calls:
    """Serves the calls of one instance."""

    def __init__(self, engine: "XllmEngine") -> None:
        self._engine = engine
        self._instance = engine.instance

    async def serve(self, call: Call) -> None:
        """Record a call, run it, answer it."""
        began_s = time.monotonic()
        path = f"/{call.service}/{call.method}"
        record = self._instance.records.open(call.connection.peer, "PRPC", path, [], self._instance.role)
        self._instance.live += 1
        chosen = Chosen()
        try:
            method = self._engine.services.find(call.service, call.method, call.port)
            message = _read(method, call.message)
            self._instance.records.fill(record, _shown(message, len(call.message)))
            chosen = self._choose(method, message)
            await self._door(call, chosen)
            reply = await method.run(message, chosen)
            if "reply_delay" in chosen:
                await asyncio.sleep(chosen.number("reply_delay"))
            call.answer(b"" if "empty" in chosen else reply.SerializeToString(), chosen)
            record.outcome = "0"
        except RpcError as error:
            call.fail(error, chosen)
            record.outcome = str(error.code)
        except _Severed as severed:
            record.outcome = str(severed)
        finally:
            self._close(record, began_s)

    def _close(self, record: Record, began_s: float) -> None:
        self._instance.live -= 1
        record.took_s = time.monotonic() - began_s
        if record.outcome == "running":
            record.outcome = "cut off"

    def _choose(self, method: Method, message: Message) -> Chosen:
        if not method.counted:
            always = self._instance.faults.always()
            return always if "reply_delay" in always else Chosen()
        self._instance.ordinal += 1
        try:
            return self._instance.faults.choose(self._instance.ordinal, self._engine.services.text(message))
        except BadFault as bad:
            raise RpcError(EREQUEST, str(bad)) from None

    async def _door(self, call: Call, chosen: Chosen) -> None:
        """Faults of the common menu."""
        if not chosen:
            return
        if "delay" in chosen:
            await asyncio.sleep(chosen.number("delay"))
        if "max_payload" in chosen and len(call.message) > chosen.number("max_payload"):
            raise RpcError(EREQUEST, "payload too large")
        if "hang" in chosen:
            await self._instance.closing.wait()
            raise _Severed("hang")
        if (crash := chosen.get("crash")) is not None:
            self._instance.crash(crash.number(0) if crash.value else None)
            raise _Severed("crash")
        if "close" in chosen:
            call.connection.transport.close()
            raise _Severed("close")
        if "reset" in chosen:
            reset(call.connection.transport)
            raise _Severed("reset")
        if "status" in chosen:
            raise RpcError(code_of(int(chosen.number("status", 500))), "injected failure")


def _read(method: Method, data: bytes) -> Message:
    try:
        return method.request.FromString(data)
    except DecodeError:
        raise RpcError(EREQUEST, f"Fail to parse {method.request.DESCRIPTOR.name}") from None


def _shown(message: Message, size: int) -> bytes:
    """The message as JSON; only its size where that would be long."""
    if size > 1 << 16:
        return b'{"bytes": %d}' % size
    return MessageToJson(message, preserving_proto_field_name=True, indent=None, ensure_ascii=False).encode()
