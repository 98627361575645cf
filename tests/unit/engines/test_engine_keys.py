"""Instances that do not take the key that they get from us: their side is to blame, and no check finds them alive."""

import pytest
from engine_world import GUARD_S, Out, Placed, context, instance, request
from fake_instances import FakeInstance

from coordinator.core.errors import EngineFailed, EngineRefused
from coordinator.engines.table import load_engine
from coordinator.transport.client import HttpClient
from coordinator.transport.peers import Peer, Peers

ENGINES = ("vllm", "sglang", "mindie", "microserving", "xllm", "hybrid")
SECRET = b'{"error":{"message":"secret words"}}'


class World:
    """One instance that answers `status` to everything but its health path."""

    def __init__(self, engine, key):
        self.fake = FakeInstance()
        self.fake._answer = self.fake.infer = self.answer
        self.status = 401
        self.context = context(client=HttpClient(connect_s=GUARD_S, peers=Peers(Peer(key=key))))
        self.engine = load_engine(engine)(self.context)

    async def answer(self, call):
        key = self.context.client.peers.of(self.fake.address).key
        assert call.header("authorization") == ("Bearer ours" if key else None)
        if call.target in ("/health", "/metrics"):
            call.reply(b"{}")
        else:
            call.reply(SECRET, self.status)

    async def __aenter__(self):
        await self.fake.listen()
        return self

    async def __aexit__(self, *_):
        await self.engine.aclose()
        await self.context.client.aclose()
        await self.fake.aclose()


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("model", ["m", None])
@pytest.mark.parametrize("engine", ENGINES)
async def test_a_check_that_is_refused_finds_nobody_alive(engine, model, status):
    async with World(engine, b"ours") as world:
        world.status = status
        asked = instance("d0", world.fake.address, engine=engine, model=model)
        for _ in range(2):
            with pytest.raises(EngineFailed) as caught:
                await world.engine.probe(asked)
            assert (caught.value.reason, caught.value.connecting) == ("key_refused", False)
            assert f"status {status}" in caught.value.detail


@pytest.mark.parametrize("engine", ENGINES)
async def test_without_a_key_of_ours_a_refusal_is_a_sign_of_life(engine):
    async with World(engine, b"") as world:
        await world.engine.probe(instance("d0", world.fake.address, engine=engine))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("engine", ["hybrid", "vllm", "sglang", "mindie"])
async def test_requests_fail_by_the_engines_fault(engine, stream):
    async with World(engine, b"ours") as world:
        h0 = instance("h0", world.fake.address, engine=engine)
        out = Out()
        with pytest.raises(EngineFailed) as caught:
            await world.engine.serve(request(stream=stream), Placed(h0), out)
        assert (caught.value.instance_id, caught.value.reason) == ("h0", "key_refused")
        assert "secret" not in caught.value.message + caught.value.detail
        assert not out.started


@pytest.mark.parametrize("stream", [True, False])
async def test_without_a_key_of_ours_a_refusal_is_the_clients(stream):
    async with World("hybrid", b"") as world:
        h0 = instance("h0", world.fake.address, engine="hybrid")
        with pytest.raises(EngineRefused) as caught:
            await world.engine.serve(request(stream=stream), Placed(h0), Out())
        assert (caught.value.status, caught.value.message) == (401, "secret words")
