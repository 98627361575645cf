"""What every request passes before the engine sees it: the record, and the faults that strike at the door."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from aiohttp import web

from instances.faults import BadFault, Chosen
from instances.records import Record
from instances.replies import faulty, reset, wants_faulty_body

if TYPE_CHECKING:
    from instances.server import Instance

CHOSEN = web.RequestKey("chosen", Chosen)
RECORD = web.RequestKey("record", Record)
_UNAUTHORIZED, _TOO_LARGE, _UNAVAILABLE = 401, 413, 503
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Severed(Exception):
    """The connection was closed on purpose; there is nothing to answer."""


class Front:
    """The middleware of one instance."""

    def __init__(self, instance: "Instance") -> None:
        self._instance = instance

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Record a request and let it through to its handler; control calls pass unseen."""
        if request.path.startswith("/sim/"):
            return await handler(request)
        began_s = time.monotonic()
        peer = request.transport.get_extra_info("peername") if request.transport is not None else None
        connection = f"{peer[0]}:{peer[1]}" if peer else "gone"
        headers = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in request.raw_headers]
        record = self._instance.records.open(connection, request.method, request.raw_path, headers, self._instance.role)
        request[RECORD] = record
        self._instance.live += 1
        try:
            response = await self._serve(request, handler, record)
            record.outcome = str(response.status) if record.outcome == "running" else record.outcome
        except Severed as severed:
            record.outcome = str(severed)
            return web.Response()
        except ConnectionResetError:  # the caller left before its answer could begin
            record.outcome = "left"
            return web.Response()
        except BaseException:
            record.outcome = "cut off"
            raise
        else:
            return response
        finally:
            self._instance.live -= 1
            record.took_s = time.monotonic() - began_s

    async def _serve(
        self,
        request: web.Request,
        handler: Handler,
        record: Record,
    ) -> web.StreamResponse:
        try:
            body = await request.read()
            self._instance.records.fill(record, body)
            if request.path in self._instance.engine.health_paths:
                return await self._health() or await handler(request)
            if not self._instance.engine.infers(request.method, request.path):
                return await handler(request)
            self._instance.ordinal += 1
            chosen = self._instance.faults.choose(self._instance.ordinal, body.decode("utf-8", "replace"))
            request[CHOSEN] = chosen
            response = await self._before(request, chosen, len(body)) or await handler(request)
            if isinstance(response, web.Response) and wants_faulty_body(chosen):
                return await faulty(request, response, chosen)
        except BadFault as bad:
            return self._instance.engine.error(400, str(bad))
        except web.HTTPException as refused:
            return self._instance.engine.error(refused.status, refused.reason)
        else:
            return response

    async def _before(self, request: web.Request, chosen: Chosen, body_bytes: int) -> web.Response | None:
        """Faults that strike before the engine sees the request."""
        if (wanted := request.headers.get("X-Return-Error")) is not None and wanted.isdecimal():
            return self._instance.engine.error(int(wanted), "returned on request")
        if not chosen:
            return None
        if "delay" in chosen:
            await asyncio.sleep(chosen.number("delay"))
        key = chosen.get("api_key")
        if key is not None and request.headers.get("Authorization") != f"Bearer {key.value}":
            return self._instance.engine.error(_UNAUTHORIZED, "missing or wrong API key")
        if "max_payload" in chosen and body_bytes > chosen.number("max_payload"):
            return self._instance.engine.error(_TOO_LARGE, "payload too large")
        await self._sever(request, chosen)
        if "status" in chosen:
            status = int(chosen.number("status", 500))
            text = chosen.get("body")
            if text is not None:
                return web.Response(status=status, text=text.value, content_type="application/json")
            return self._instance.engine.error(status, "injected failure")
        return None

    async def _sever(self, request: web.Request, chosen: Chosen) -> None:
        transport = request.transport
        if "hang" in chosen:
            await self._instance.closing.wait()
            raise Severed("hang")
        if (crash := chosen.get("crash")) is not None:
            self._instance.crash(crash.number(0) if crash.value else None)
            raise Severed("crash")
        for name, cut in (("close", _close), ("reset", reset)):
            if name in chosen:
                if transport is not None:
                    cut(transport)
                raise Severed(name)

    async def _health(self) -> web.Response | None:
        chosen = self._instance.faults.always()
        if "health_hang" in chosen:
            await self._instance.closing.wait()
            raise Severed("hang")
        if "health_status" in chosen:
            return self._instance.engine.error(int(chosen.number("health_status", _UNAVAILABLE)), "unhealthy")
        fails_after = chosen.get("health_fail_after")
        age_ms = self._instance.age_s * 1000
        if self._instance.starting or (fails_after is not None and age_ms >= fails_after.number(0)):
            return self._instance.engine.error(_UNAVAILABLE, "not ready")
        return None


def _close(transport: asyncio.Transport) -> None:
    transport.close()
