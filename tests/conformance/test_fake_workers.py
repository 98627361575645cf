"""Fakes that leave something behind make tests fail now and then: a cancelled worker closes all that it has begun."""

import asyncio
import contextlib
import sys

import grpc
import pytest
from disagg_adapter import DisaggpbAdapter
from disagg_messages import PreFillRequest
from disagg_workers import FakeWorker
from engine_world import GUARD_S, turns
from grpc import aio

MUCH = bytes(32 << 20)  # more than a caller's window takes: writing it lasts until it is read


@contextlib.contextmanager
def generators_left_to_the_loop():
    """Notes each async generator that nobody has closed: the loop does so, in a task of its own, some turns later."""
    before, left = sys.get_asyncgen_hooks(), []

    def found(generator):
        left.append(generator.__qualname__)
        before.finalizer(generator)

    sys.set_asyncgen_hooks(finalizer=found)
    try:
        yield left
    finally:
        sys.set_asyncgen_hooks(*before)


@contextlib.asynccontextmanager
async def called(script):
    """A worker with this script, and a call of its prefill."""
    worker = await FakeWorker().listen()
    worker.prefill = script
    async with aio.insecure_channel(worker.address.netloc) as channel:
        ask = channel.unary_stream("/disagg.PrefillWorker/Prefill")
        try:
            yield worker, ask(PreFillRequest(request_id="7").SerializeToString())
        finally:
            await worker.aclose()


async def until_left(worker):
    async with asyncio.timeout(GUARD_S):
        await worker.calls[0].left.wait()
    await turns(10)


@pytest.mark.parametrize("where", ["writing", "working"])
async def test_a_cancelled_worker_closes_what_it_has_begun(where):
    begun, closed, resumed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def script(ask):
        try:
            begun.set()
            if where == "working":
                await asyncio.Event().wait()
            yield MUCH
            resumed.set()
        finally:
            closed.set()

    with generators_left_to_the_loop() as left:
        async with called(script) as (worker, call):
            async with asyncio.timeout(GUARD_S):
                await begun.wait()
            await turns()
            call.cancel()
            await until_left(worker)
            async with asyncio.timeout(GUARD_S):
                await closed.wait()
            assert not resumed.is_set()
            assert not worker.calls[0].ended
    assert left == []


async def test_a_worker_that_fails_a_call_closes_what_it_has_begun():
    async def script(ask):
        yield b""
        await ask.fail(grpc.StatusCode.INTERNAL, "broken")

    with generators_left_to_the_loop() as left:
        async with called(script) as (worker, call):
            assert await call.read() == b""
            with pytest.raises(aio.AioRpcError):
                await call.read()
            await until_left(worker)
            assert worker.calls[0].ended
    assert left == []


async def test_a_client_that_leaves_a_disaggpb_pair_leaves_no_generator():
    """As the conformance kit's cancelled requests do, between two messages of a worker."""
    with generators_left_to_the_loop() as left:
        async with DisaggpbAdapter() as made:

            async def much(ask):
                for _ in range(3):
                    yield MUCH  # no KV: the engine fails the request, and cancels the call

            made.prefill.prefill = much
            asked = made.request()
            with pytest.raises(Exception, match="prefill instance failed"), made.scheduler.try_place(asked) as lease:
                await made.engine.serve(asked, lease, None)
            await until_left(made.prefill)
            await turns(10)
    assert left == []
