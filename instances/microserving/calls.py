"""The HTTP calls: three of microserving, two of OpenAI (microserving protocol page §2 to §8).

A caller that leaves is noticed at once only while a stream is being sent. Before its first event, and in calls that are
not streams, it shows with the next output; prep_recv and remote_send run to their end in any case.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from aiohttp import web

from instances.faults import Chosen
from instances.front import CHOSEN, RECORD, Severed
from instances.microserving import bodies, metadata
from instances.microserving.asks import Ask, ask_of
from instances.microserving.bodies import DebugConfig, DisaggConfig, PrepRecv, RemoteSend, StartGenerate, StreamOptions
from instances.microserving.refusal import Refused, bad_request, error_answer, failed
from instances.microserving.stream import Stream, Struck
from instances.microserving.writers import ChatWriter, Chunk, CompletionWriter, Writer
from instances.openai.outlet import DONE, Outlet
from instances.openai.refusal import answer

if TYPE_CHECKING:
    from instances.microserving.instance import MicroservingEngine

_LEFT = "aborted: the caller left"
_Body = bodies.Completion | bodies.Chat


class Calls:
    """The calls of one instance."""

    def __init__(self, engine: "MicroservingEngine") -> None:
        self._engine = engine
        self._instance = engine.instance
        self._loop = engine.loop

    # --- microserving

    async def prep_recv(self, request: web.Request) -> web.StreamResponse:
        """`POST /microserving/prep_recv`, to decode."""
        body = await bodies.read(request, PrepRecv)
        chosen = await self._engine.choose(request)
        await self._strike(request, "prep", chosen)
        self._engine.expect("decode")
        debug = _debug(body)
        debug.disagg_config = DisaggConfig(kind="prepare_receive", kv_window_begin=0, kv_window_end=body.end)
        _plain(body)
        if not self._serves(body.model):
            raise failed("an error where the engine's answer should be")
        usage = (await self._collect(body, chosen))["usage"]
        told = (usage or {}).get("extra") or {}
        if "kv_append_metadata" not in told:
            raise failed("no addresses in the engine's answer")
        request[RECORD].note = f"prep_recv: {told['prefix_matched_length']} tokens known"
        if "prep_die" in chosen:
            self._loop.die("fault")
        if "prep_lost" in chosen:
            raise _cut(request, "lost")
        addresses = fault.value if (fault := chosen.get("metadata")) is not None else told["kv_append_metadata"]
        return answer({"kv_append_metadata": addresses, "prefix_matched_length": told["prefix_matched_length"]})

    async def remote_send(self, request: web.Request) -> web.StreamResponse:
        """`POST /microserving/remote_send`, to prefill; 200 is no proof that anything was sent."""
        body = await bodies.read(request, RemoteSend)
        chosen = await self._engine.choose(request)
        await self._strike(request, "send", chosen)
        self._engine.expect("prefill")
        debug = _debug(body)
        debug.disagg_config = DisaggConfig(
            kind="remote_send",
            kv_window_begin=body.begin,
            kv_window_end=body.end,
            kv_append_metadata=body.kv_addr_info,
            dst_group_offset=body.recv_rank,
        )
        _plain(body)
        if self._serves(body.model):
            await self._collect(body, chosen)
        if "send_lost" in chosen:
            raise _cut(request, "lost")
        return answer({})

    async def start_generate(self, request: web.Request) -> web.StreamResponse:
        """`POST /microserving/start_generate`, to decode."""
        body = await bodies.read(request, StartGenerate)
        reservation = self._loop.reservations.get(body.user or "")
        common = request.get(CHOSEN, Chosen())
        chosen = reservation.ask.chosen if reservation else await self._engine.choose(request)
        await self._strike(request, "generate", chosen)
        self._engine.expect("decode")
        debug = _debug(body)
        debug.disagg_config = DisaggConfig(kind="start_generation", kv_window_begin=body.begin)
        return await self._answer(request, body, self._engine.merged(common, chosen))

    async def _strike(self, request: web.Request, call: str, chosen: Chosen) -> None:
        """Faults of one of the calls."""
        if f"{call}_error" in chosen:
            raise Refused(int(chosen.number(f"{call}_error", 500)), "injected failure")
        if f"{call}_hang" in chosen:
            await self._instance.closing.wait()
            raise Severed("hang")
        if f"{call}_close" in chosen:
            raise _cut(request, "close")

    # --- OpenAI

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`."""
        body = await bodies.read(request, bodies.Completion)
        return await self._answer(request, body, await self._engine.choose(request))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        body = await bodies.read(request, bodies.Chat)
        return await self._answer(request, body, await self._engine.choose(request))

    # --- one way for all

    def _serves(self, model: str | None) -> bool:
        """Whether there is such a model; an engine with one model takes any name."""
        models = self._engine.models
        return len(models) == 1 or model in models

    def _submit(self, body: _Body, chosen: Chosen) -> tuple[Ask, Stream]:
        """Hand a request to the engine; raises Refused."""
        if not self._engine.settings.enable_debug:
            body.debug_config = None
        if not self._serves(body.model):
            raise bad_request(f'The requested model "{body.model}" is not served.')
        ask = ask_of(body, self._loop.most_tokens, chosen)
        addresses = ask.disagg.kv_append_metadata if ask.disagg is not None else None
        try:
            models = metadata.decode(addresses) if addresses is not None else ()
        except ValueError as wrong:
            raise failed(f"kv_append_metadata: {wrong}") from None
        stream = self._loop.submit(ask.user)
        self._loop.work(stream, self._engine.worker.do(stream, ask, models))
        return ask, stream

    def _writer(self, body: _Body, ask: Ask) -> Writer:
        debug = bool(self._engine.settings.enable_debug)
        kind = ChatWriter if isinstance(body, bodies.Chat) else CompletionWriter
        return kind(body, ask, debug=debug)

    async def _chunks(self, writer: Writer, stream: Stream) -> AsyncGenerator[tuple[Chunk, int], None]:
        """All chunks, each with the number of its token; raises what the request fails with."""
        echo = writer.echo()
        if echo is not None:
            yield echo, 0
        while (output := await stream.next()) is not None:
            chunk = writer.chunk(output)
            if chunk is not None:
                yield chunk, output.token
        suffix = writer.suffix()
        if suffix is not None:
            yield suffix, 0

    async def _answer(self, request: web.Request, body: _Body, chosen: Chosen) -> web.StreamResponse:
        if body.stream:
            return await self._stream(request, body, chosen)
        whole = await self._collect(body, chosen)
        if "not_json" in chosen:
            return web.Response(text="this is not JSON", content_type="application/json")
        return answer(whole)

    async def _collect(self, body: _Body, chosen: Chosen) -> Chunk:
        """The whole answer."""
        ask, stream = self._submit(body, chosen)
        writer = self._writer(body, ask)
        try:
            return writer.whole([chunk async for chunk, _ in self._chunks(writer, stream)])
        except asyncio.CancelledError:
            stream.left = True
            raise
        except (Refused, Struck) as ended:
            self._loop.abort(stream, "failed")
            raise ended if isinstance(ended, Refused) else failed(str(ended)) from None
        finally:
            self._loop.release(stream)

    async def _stream(self, request: web.Request, body: _Body, chosen: Chosen) -> web.StreamResponse:
        ask, stream = self._submit(body, chosen)
        writer = self._writer(body, ask)
        try:
            async with aclosing(self._chunks(writer, stream)) as chunks:
                # the header goes with the first chunk, so that an error before it has a status
                first = await anext(chunks, None)
                if first is None:
                    raise failed("no chunks")
                return await self._send(request, chunks, first, (stream, writer, chosen))
        except asyncio.CancelledError:
            stream.left = True
            raise
        except Struck as ended:
            raise failed(str(ended)) from None
        finally:
            self._loop.release(stream)

    async def _send(
        self,
        request: web.Request,
        chunks: AsyncIterator[tuple[Chunk, int]],
        first: tuple[Chunk, int],
        parts: tuple[Stream, Writer, Chosen],
    ) -> web.StreamResponse:
        """The chunks as events; from here on a caller that leaves is noticed at once."""
        stream, writer, chosen = parts
        how = ""
        try:
            outlet = await Outlet.open(request, chosen)
            if outlet is None or "empty" in chosen:
                self._loop.abort(stream, _LEFT)
                return web.Response() if outlet is None else outlet.response
            stream.backlog_bytes = lambda: outlet.backlog_bytes
            if "empty_first" in chosen:
                outlet.event(writer.framed([]))
            outlet.event(*first)
            try:
                async for chunk, token in chunks:
                    outlet.event(chunk, token)
                if "no_done" not in chosen:
                    outlet.event(DONE)
            except Struck as struck:
                how = str(struck)
            except (Refused, Severed):
                how = "stream_close"  # an exception behind a header that is out: the stream is torn
            await outlet.end(how)
        finally:
            self._loop.abort(stream, _LEFT if not how else "failed")
        return outlet.response


def _debug(body: _Body) -> DebugConfig:
    """The body's debug_config, which must be there; raises Refused (500)."""
    if body.debug_config is None:
        raise failed("debug_config is null")
    return body.debug_config


def _plain(body: _Body) -> None:
    """prep_recv and remote_send are never streams."""
    body.stream, body.stream_options = False, StreamOptions(include_usage=True)


def _cut(request: web.Request, why: str) -> Severed:
    """Close the connection."""
    if request.transport is not None:
        request.transport.close()
    return Severed(why)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def guarded(handler: Handler) -> Handler:
    """A handler whose refusals are answers."""

    async def run(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refused as refused:
            request[RECORD].note = refused.text
            return error_answer(refused)
        except Severed as severed:
            raise _cut(request, str(severed)) from None

    return run
