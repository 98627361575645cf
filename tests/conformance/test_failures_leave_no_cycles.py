"""Whole requests that fail, under both event loops: each is freed with its error, not by the garbage collector.

A storm of failures would else grow the process until the collector looks, which it seldom does.
"""

import asyncio

import pytest
from cycles import left_to_the_collector, quick_looks
from dispatched_world import DispatchedWorld
from engine_adapters import ADAPTERS, Script
from engine_kit import FAULTS_5XX
from engine_world import GUARD_S, turns

from coordinator.core.errors import DeadlineExceeded, Draining, EngineFailed, EngineRefused, RequestError

each = pytest.mark.parametrize("adapter", ADAPTERS, ids=[adapter.name for adapter in ADAPTERS])
LEFT = "the client has left"


@pytest.fixture
def quick():
    with quick_looks():
        yield


async def handled(serving):
    """What the front door does with a request: its error ends here, its cancellation goes on."""
    try:
        await serving
    except RequestError as error:
        return type(error)
    return None


class World(DispatchedWorld):
    def __init__(self, adapter, engine=None):
        super().__init__(adapter, engine)
        self.found = {}

    async def run(self, script=None, act=None, **given):
        """One request to its end, which is returned; `act` is called when it is held in a stage."""
        adapter = self.adapter
        adapter.script = script or Script()
        adapter.reached.clear()
        adapter.release.clear()
        client, serving = self.begin(**given)
        task = asyncio.create_task(handled(serving), name="request")
        async with asyncio.timeout(GUARD_S):
            if act is not None:
                await adapter.reached.wait()
                await turns()
                act(task)
            await asyncio.wait([task])
            await adapter.mended()
        adapter.release.set()
        client.exchange = None  # it knows its client
        await self.leaves_nothing()
        await turns(10)
        return LEFT if task.cancelled() else task.result()

    async def look(self, name, ends, *runs):
        """Serve these requests, which end so, and note what the collector has to free after them."""
        for stream in (True, False):
            await self.run(stream=stream)  # they find connections
        with left_to_the_collector() as found:
            for more in runs:
                assert await self.run(**more) is ends, f"{name}: {more}"
        if found:
            self.found[name] = dict(found)


class OnMended:
    """The adapter's engine, which waits with each attempt until its instances are there: nobody else could serve it."""

    def __init__(self, adapter):
        self._adapter = adapter

    async def serve(self, *given):
        await self._adapter.mended()
        return await self._adapter.engine.serve(*given)

    def __getattr__(self, name):
        return getattr(self._adapter.engine, name)


def both(script, **more):
    return tuple({"script": script, "stream": stream, **more} for stream in (True, False))


@each
@pytest.mark.usefixtures("quick")
async def test_failures_of_instances(adapter):
    async with adapter() as made:
        world = World(made)
        await world.look("none", None, *both(Script()))
        for fault in made.refusals:
            await world.look(f"prefill: {fault}", EngineRefused, *both(Script(prefill_fault=fault)))
        for fault in FAULTS_5XX:
            await world.look(f"prefill: {fault}", EngineFailed, *both(Script(prefill_fault=fault)))
        for fault in made.decode_faults:
            ends = EngineRefused if fault == "400" else EngineFailed
            await world.look(f"decode: {fault}", ends, *both(Script(decode_fault=fault)))
        await made.refuse()
        with left_to_the_collector() as found:
            for more in both(Script()):
                assert await world.run(**more) is EngineFailed
        assert not world.found
        assert not found


@each
@pytest.mark.usefixtures("quick")
async def test_ends_from_outside_in_each_stage(adapter):
    async with adapter() as made:
        world = World(made)
        for stage in made.stages:
            for stream in (True, False):
                if made.name == "mindie" and stage == "decode" and not stream:
                    continue  # decode says nothing before it says all
                one = {"script": Script(hold=stage), "stream": stream}
                name = f"{stage}, {stream=}"
                await world.look(f"left in {name}", LEFT, {**one, "act": asyncio.Task.cancel})
                interrupt = {"act": lambda _: world.dispatcher.interrupt_all(Draining())}
                await world.look(f"interrupted in {name}", Draining, {**one, **interrupt})
                await world.look(f"too late in {name}", DeadlineExceeded, {**one, "finished_s": 0.03})
        assert not world.found


@each
@pytest.mark.usefixtures("quick")
async def test_a_failure_that_another_attempt_makes_good(adapter):
    async with adapter() as made:
        world = World(made, OnMended(made))
        world.cluster.on_charge = lambda: setattr(made, "script", Script())
        for fault in ("500", "reset"):
            charged = len(world.cluster.charged)
            await world.look(fault, None, *both(Script(prefill_fault=fault)))
            assert len(world.cluster.charged) == charged + 2
        assert not world.found
