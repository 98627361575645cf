"""The engine protocol of plain OpenAI-compatible instances."""

import pytest
from engine_world import CHAT, Out, Placed, Watcher, context, instance, request, until
from fake_instances import FakeInstance

from coordinator.config.errors import OptionError
from coordinator.core.errors import EngineFailed, EngineRefused, Side
from coordinator.core.ports import Completed
from coordinator.engines.hybrid import HybridEngine


class World:
    def __init__(self):
        self.fake = FakeInstance()
        self.context = context()
        self.engine = HybridEngine(self.context)


@pytest.fixture
async def world():
    world = World()
    await world.fake.listen()
    world.h0 = instance("h0", world.fake.address, engine="hybrid")
    yield world
    await world.engine.aclose()
    await world.context.client.aclose()
    await world.fake.aclose()


async def test_the_request_goes_through_with_an_id_of_our_own(world):
    async def answer(call):
        call.reply(b'{"x":1}', 200, ("Content-Type", "application/json; charset=utf-8"))

    world.fake.infer = answer
    out, placement = Out(), Placed(world.h0)
    asked = request(stream=False, headers=((b"authorization", b"Bearer t"), (b"content-type", b"text/plain")))
    assert await world.engine.serve(asked, placement, out) == Completed()
    call = world.fake.calls[0]
    assert (call.method, call.target, call.body) == ("POST", CHAT, asked.body)
    assert call.header("authorization") == "Bearer t"
    assert call.header("content-type") == "application/json"
    assert placement.moments[0] == ("sent", call.header("x-request-id"))
    assert placement.names == ["sent", "prefilled", "decoding"]
    assert out.body == b'{"x":1}'


@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_behind_a_200_is_no_answer(world, stream):
    async def answer(call):
        call.reply(b'{"error":{"message":"boom"}}', 200, ("Content-Type", "application/json"))

    world.fake.infer = answer
    out = Out()
    with pytest.raises(EngineFailed) as caught:
        await world.engine.serve(request(stream=stream), Placed(world.h0), out)
    assert (caught.value.reason, caught.value.detail) == ("engine_error", "boom")
    assert not out.started


async def test_a_probe_takes_any_answer_below_500(world):
    for status in (200, 404):

        async def answer(call, status=status):
            call.reply(b"x", status)

        world.fake._answer = answer
        assert await world.engine.probe(world.h0) is None

    async def fail(call):
        call.reply(b"x", 503)

    world.fake._answer = fail
    with pytest.raises(EngineFailed) as caught:
        await world.engine.probe(world.h0)
    assert (caught.value.instance_id, caught.value.side) == ("h0", Side.DECODE)


async def test_links_need_nothing(world):
    watcher = Watcher()
    world.engine.attach(world.h0, watcher)
    assert watcher.told == ["linked"]
    assert world.fake.accepted == 0


async def test_detaching_closes_idle_connections(world):
    await world.engine.call(request(stream=False), world.h0)
    await until(lambda: world.fake.peers)
    await world.engine.detach(world.h0)
    await until(lambda: not world.fake.peers)


@pytest.mark.parametrize(("status", "kind"), [(400, EngineRefused), (502, EngineFailed)])
async def test_other_calls_and_their_errors(world, status, kind):
    async def refuse(call):
        call.reply(b'{"error":{"message":"no"}}', status)

    world.fake.infer = refuse
    with pytest.raises(kind):
        await world.engine.call(request(stream=False), world.h0)


async def test_a_call_to_a_dead_instance(world):
    await world.fake.refuse()
    with pytest.raises(EngineFailed) as caught:
        await world.engine.call(request(stream=False), world.h0)
    assert caught.value.connecting


def test_it_has_no_keys():
    assert HybridEngine.options({}) == {}
    with pytest.raises(OptionError):
        HybridEngine.options({"inter_comm_port": 1})
