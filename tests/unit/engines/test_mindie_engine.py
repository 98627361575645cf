"""The choreography of a MindIE request against fake instances (MindIE protocol page §4 to §8, §14)."""

import asyncio

import pytest
from engine_world import CHAT, Out, Watcher, chat, instance, request, turns, until
from fake_instances import envelope
from mindie_world import DONE, LAST, World, result, text

from coordinator.config.errors import OptionError
from coordinator.core.errors import EngineFailed, EngineRefused, Side
from coordinator.core.instance import Address
from coordinator.core.ports import Completed, Resume
from coordinator.engines.mindie import MindieEngine
from coordinator.engines.mindie import engine as engine_module

A = text("A").encode()


@pytest.fixture
async def world():
    async with World() as made:
        yield made


class TestToPrefill:
    async def test_the_clients_request_with_our_headers(self, world):
        asked = request(headers=((b"traceparent", b"00-1"), (b"accept", b"*/*")), path=CHAT)
        world.serve(asked)
        call = await world.sent()
        assert (call.method, call.target, call.body) == ("POST", CHAT, asked.body)
        assert call.header("traceparent") == "00-1"
        assert call.header("req-type") == "prefill"
        assert call.header("d-target") == "127.0.0.1"
        assert call.header("d-port") == str(world.d0.address.port)
        assert call.header("is-recompute") is None
        assert call.header("host") == world.p0.address.netloc
        assert call.wire_id.isdecimal()

    async def test_the_inter_comm_port_follows_a_semicolon(self, world):
        other = instance("d0", world.decode.address, options={"inter_comm_port": 7001})
        world.serve(request(), decode=other)
        assert (await world.sent()).header("d-target") == "127.0.0.1;7001"

    async def test_the_query_travels(self, world):
        from msgspec.structs import replace

        world.serve(replace(request(), query="a=1&b"))
        assert (await world.sent()).target == CHAT + "?a=1&b"

    async def test_ids_are_our_own_and_each_is_new(self, world):
        for _ in range(3):
            world.serve(request(ident="same-for-all"))
        await world.sent(3)
        ids = {call.wire_id for call in world.prefill.calls}
        assert len(ids) == 3
        assert "same-for-all" not in ids

    async def test_the_stages_are_told(self, world):
        gate = asyncio.Event()

        async def slow(call):
            await gate.wait()
            await world.answer(call)

        world.prefill.infer = slow
        _, _, placement = world.serve(request())
        call = await world.sent()
        gate_closed = list(placement.moments)
        gate.set()
        assert gate_closed == [("sent", call.wire_id)]
        await until(lambda: "prefilled" in placement.names)
        assert placement.names == ["sent", "prefilled"]
        world.decode.say(call.wire_id, "data", b"x")
        await until(lambda: "decoding" in placement.names)

    async def test_registered_before_it_is_sent(self, world):
        """Decode may speak before prefill's reply is there."""

        async def decode_first(call):
            world.decode.say(call.wire_id, "data", text("B").encode())
            await turns(20)
            world.decode.say(call.wire_id, "lastData", LAST)
            call.reply(envelope(call.wire_id, text("A"), last=False))

        world.prefill.infer = decode_first
        task, out, _ = world.serve(request())
        assert await result(task) == Completed()
        assert out.body == A + text("B").encode() + LAST + DONE

    async def test_no_link_no_request(self, world):
        world.decode.opening = lambda call: call.left()
        world.decode.link.rst()
        await until(lambda: not world.watcher.up)
        task, _, placement = world.serve(request())
        error = await result(task)
        assert (error.reason, error.side, error.instance_id) == ("link_lost", Side.DECODE, "d0")
        assert world.prefill.calls == []
        assert placement.names == []
        assert await world.stopped() == ({}, {})

    async def test_an_instance_that_was_never_attached(self, world):
        task, _, _ = world.serve(request(), decode=instance("d9", Address("127.0.0.1", 9)))
        assert (await result(task)).instance_id == "d9"


class TestFailuresOfPrefill:
    @pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 429])
    async def test_its_4xx_is_the_clients(self, world, status):
        async def refuse(call):
            call.reply(b'{"error":"n must be 1 in dmi mode"}', status, ("Retry-After", "7"))

        world.prefill.infer = refuse
        task, out, _ = world.serve(request())
        error = await result(task)
        assert isinstance(error, EngineRefused)
        assert (error.status, error.message, error.retry_after_s) == (status, "n must be 1 in dmi mode", 7)
        assert out.events == []
        assert await world.stopped() == ({}, {})

    @pytest.mark.parametrize(
        ("way", "reason"),
        [("status", "http_5xx"), ("reset", "reset"), ("closed", "closed"), ("cut", "closed"), ("nonsense", "bad_reply"),
         ("wrong id", "bad_reply"), ("no output", "bad_reply"), ("redirect", "bad_reply")],
    )  # fmt: skip
    async def test_everything_else_is_its_failure(self, world, way, reason):
        async def fail(call):
            match way:
                case "status":
                    call.reply(b'{"error":"Engine callback timeout."}', 500)
                case "reset":
                    call.rst()
                case "closed":
                    call.fin()
                case "cut":
                    call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{")
                    call.fin()
                case "nonsense":
                    call.reply(b"this is not JSON")
                case "wrong id":
                    call.reply(envelope("1", "x", last=False))
                case "no output":
                    call.reply(envelope(call.wire_id, last=False))
                case "redirect":
                    call.reply(b"", 302, ("Location", "http://203.0.113.9/"))

        world.prefill.infer = fail
        task, out, _ = world.serve(request())
        error = await result(task)
        assert isinstance(error, EngineFailed)
        assert (error.reason, error.side, error.instance_id) == (reason, Side.PREFILL, "p0")
        assert not error.connecting
        assert out.events == []
        wire_id = (await world.sent()).wire_id
        assert await world.stopped() == ({wire_id: 1}, {wire_id: 1})

    @pytest.mark.parametrize("wire_id", ["", "4711"])
    async def test_decode_that_does_not_take_the_request_is_charged_and_prefill_avoided_too(self, world, wire_id):
        async def not_taken(call):
            call.reply(b'{"error":"[P Node] Send D request failed: no","error_type":"Incomplete Generation"}', 500)

        world.prefill.infer = not_taken
        task, _, _ = world.serve(request(wire_id=wire_id))
        error = await result(task)
        assert (error.reason, error.side, error.instance_id) == ("handoff_failed", Side.DECODE, "d0")
        assert (error.doubted, error.connecting) == ("p0", False)
        assert len(world.prefill.calls) == 1  # a recompute is not sent again: its id is known no more
        call = await world.sent()
        assert await world.stopped() == ({call.wire_id: 1}, {call.wire_id: 1})

    async def test_a_port_that_refuses(self, world):
        await world.prefill.refuse()
        task, _, _ = world.serve(request())
        error = await result(task)
        assert (error.reason, error.connecting) == ("connect_refused", True)
        assert await world.stopped() == ({}, {})

    async def test_a_huge_error_body_is_cut(self, world):
        async def fail(call):
            call.send(b"HTTP/1.1 500 X\r\nContent-Length: 100000000\r\n\r\n" + b"x" * 1_000_000)

        world.prefill.infer = fail
        task, _, _ = world.serve(request())
        error = await result(task)
        assert error.reason == "http_5xx"
        assert len(error.detail) < 500


class TestFailuresOfDecode:
    async def test_before_prefills_reply_not_streaming(self, world):
        async def refuse(call):
            world.decode.say(call.wire_id, "error", b"Pull kv failed irreversibly.")
            await call.left()

        world.prefill.infer = refuse
        task, out, _ = world.serve(request(stream=False))
        error = await result(task)
        assert (error.reason, error.side, error.instance_id) == ("engine_error", Side.DECODE, "d0")
        assert error.doubted == "p0"  # its KV may be out of every decode instance's reach
        assert out.events == []
        wire_id = (await world.sent()).wire_id
        assert await world.stopped() == ({wire_id: 1}, {wire_id: 1})

    async def test_after_output(self, world):
        task, out, _ = world.serve(request())
        call = await world.sent()
        await until(lambda: out.started)
        world.decode.say(call.wire_id, "error", b" gone")
        error = await result(task)
        assert (error.reason, error.doubted) == ("engine_error", "")
        assert out.body == A
        assert await world.stopped() == ({call.wire_id: 1}, {call.wire_id: 1})

    async def test_the_link_is_lost_while_prefill_works(self, world):
        world.prefill.infer = lambda call: call.left()
        task, _, _ = world.serve(request())
        call = await world.sent()
        world.decode.link.rst()
        assert (await result(task)).reason == "link_lost"
        assert await world.stopped() == ({call.wire_id: 1}, {call.wire_id: 1})

    async def test_the_link_is_lost_while_decode_works(self, world):
        task, out, _ = world.serve(request())
        await until(lambda: out.started)
        world.decode.link.end()
        assert (await result(task)).reason == "link_lost"
        assert not out.over


class TestEnds:
    async def test_prefill_alone(self, world):
        async def all_of_it(call):
            call.reply(envelope(call.wire_id, LAST.decode() + DONE.decode(), last=True))

        world.prefill.infer = all_of_it
        task, out, placement = world.serve(request())
        assert await result(task) == Completed()
        assert out.body == LAST + DONE
        assert placement.names == ["sent", "prefilled", "decoding"]
        assert await world.stopped() == ({}, {})

    async def test_prefill_alone_not_streaming(self, world):
        async def all_of_it(call):
            call.reply(envelope(call.wire_id, '{"x":1}', stream=False, last=True))

        world.prefill.infer = all_of_it
        task, out, _ = world.serve(request(stream=False))
        assert await result(task) == Completed()
        assert out.events == [("whole", b'{"x":1}', True)]

    async def test_a_whole_answer_does_not_wait_for_prefill(self, world, monkeypatch):
        """Its reply is still read, so that the connection can be used again."""
        monkeypatch.setattr(engine_module, "PREFILL_GRACE_S", 60.0)
        gate = asyncio.Event()

        async def late(call):
            world.decode.say(call.wire_id, "lastData", b'{"x":1}')
            await gate.wait()
            call.reply(envelope(call.wire_id, stream=False))

        world.prefill.infer = late
        task, out, placement = world.serve(request(stream=False))
        await until(lambda: out.over)
        assert not task.done()
        gate.set()
        assert await result(task) == Completed()
        assert placement.names == ["sent", "decoding", "prefilled"]
        assert await world.stopped() == ({}, {})
        client = world.context.client
        assert client.open_connections == client.idle_connections == 1

    @pytest.mark.parametrize("way", ["mute", "status", "reset", "nonsense"])
    async def test_and_prefill_cannot_spoil_it(self, world, monkeypatch, way):
        monkeypatch.setattr(engine_module, "PREFILL_GRACE_S", 0.03 if way == "mute" else 60.0)

        async def late(call):
            world.decode.say(call.wire_id, "lastData", b'{"x":1}')
            await until(lambda: out.over)
            match way:
                case "mute":
                    await call.left()
                case "status":
                    call.reply(b"{}", 500)
                case "reset":
                    call.rst()
                case "nonsense":
                    call.reply(b"nonsense")

        world.prefill.infer = late
        out = Out()
        task, _, _ = world.serve(request(stream=False), out=out)
        assert await result(task) == Completed()
        assert await world.stopped() == ({}, {})
        await until(lambda: world.context.client.open_connections == world.context.client.idle_connections)

    async def test_after_the_answer_a_cancellation_stops_nobody(self, world, monkeypatch):
        monkeypatch.setattr(engine_module, "PREFILL_GRACE_S", 60.0)

        async def late(call):
            world.decode.say(call.wire_id, "lastData", b'{"x":1}')
            await call.left()

        world.prefill.infer = late
        task, out, _ = world.serve(request(stream=False))
        await until(lambda: out.over)
        task.cancel()
        assert await result(task) == "cancelled"
        assert await world.stopped() == ({}, {})

    async def test_connections_to_prefill_are_used_again_whatever_it_says(self, world):
        """It says `Connection: close` and keeps the connection open (protocol page §4.2)."""

        async def close(call):
            call.reply(envelope(call.wire_id, LAST.decode(), last=True), 200, ("Connection", "close"))

        world.prefill.infer = close
        for _ in range(3):
            assert await result(world.serve(request())[0]) == Completed()
        assert world.prefill.accepted == 1


class TestCancellation:
    async def test_while_prefill_works(self, world):
        world.prefill.infer = lambda call: call.left()
        task, out, _ = world.serve(request())
        call = await world.sent()
        task.cancel()
        assert await result(task) == "cancelled"
        assert await world.stopped() == ({call.wire_id: 1}, {call.wire_id: 1})
        await call.left()
        assert out.events == []

    async def test_before_decode_speaks_and_while_it_does(self, world):
        for word in (None, b"x"):
            task, out, _ = world.serve(request())
            await until(lambda out=out: out.started)
            wire_id = world.prefill.calls[-1].wire_id
            if word:
                world.decode.say(wire_id, "data", word)
                await until(lambda out=out, word=word: out.body == A + word)
            task.cancel()
            assert await result(task) == "cancelled"
            assert world.engine._links[world.d0.key].boxes._boxes == {}
            stopped = await world.stopped()
            assert stopped[0][wire_id] == stopped[1][wire_id] == 1

    async def test_late_events_are_dropped(self, world):
        task, out, _ = world.serve(request())
        await until(lambda: out.started)
        wire_id = (await world.sent()).wire_id
        task.cancel()
        await result(task)
        events = list(out.events)
        for keyword in ("data", "lastData", "error", "retry"):
            world.decode.say(wire_id, keyword, b"late")
        other, other_out, _ = world.serve(request())
        call = await world.sent(2)
        world.decode.say(call.wire_id, "lastData", LAST)
        assert await result(other) == Completed()
        assert out.events == events
        assert b"late" not in other_out.body

    async def test_the_stop_names_the_model_that_the_instance_knows(self, world):
        """Not the client's word for it (protocol page §7)."""
        task, out, _ = world.serve(request(model="an-alias"))
        await until(lambda: out.started)
        task.cancel()
        await result(task)
        await world.stopped()
        assert world.prefill.stop_models == world.decode.stop_models == {"m"}

    async def test_the_model_may_have_been_found_out_by_a_probe(self, world):
        nameless = [instance(i.id, i.address, model=None) for i in (world.p0, world.d0)]
        world.p0 = nameless[0]
        for each in nameless:
            assert await world.engine.probe(each) == "m"
        task, out, _ = world.serve(request(model="asked"), decode=nameless[1])
        await until(lambda: out.started)
        task.cancel()
        await result(task)
        await world.stopped()
        assert world.prefill.stop_models == {"m"}


class TestRecompute:
    BODY = b'{"model":"m","messages":"2,1,2,3","stream":true}'

    async def test_the_request_comes_back_with_its_id(self, world):
        task, _, _ = world.serve(request())
        call = await world.sent()
        world.decode.say(call.wire_id, "retry", self.BODY)
        assert await result(task) == Resume(self.BODY, call.wire_id)
        assert await world.stopped() == ({}, {})

    async def test_it_goes_out_again_under_it(self, world):
        out = Out()
        asked = request(body=self.BODY, wire_id="4711")
        task, _, placement = world.serve(asked, out=out)
        call = await world.sent()
        assert (call.wire_id, call.header("is-recompute"), call.body) == ("4711", "true", self.BODY)
        assert placement.moments[0] == ("sent", "4711")
        world.decode.say("4711", "lastData", LAST)
        assert await result(task) == Completed()

    async def test_an_id_that_is_still_registered_is_tried_again(self, world, monkeypatch):
        monkeypatch.setattr(engine_module, "RESEND_PAUSE_S", 0.001)
        statuses = [500, 424, 503]

        async def still_there(call):
            if len(world.prefill.calls) <= len(statuses):
                call.reply(b'{"error":"Failed to enqueue inferRequest. Runtime request has been used before."}',
                           statuses[len(world.prefill.calls) - 1])  # fmt: skip
            else:
                await world.answer(call)

        world.prefill.infer = still_there
        task, out, placement = world.serve(request(wire_id="4711", body=self.BODY))
        await until(lambda: out.started)
        assert [call.wire_id for call in world.prefill.calls] == ["4711"] * 4
        assert placement.names == ["sent", "prefilled"]
        world.decode.say("4711", "lastData", LAST)
        assert await result(task) == Completed()

    async def test_but_not_for_ever(self, world, monkeypatch):
        monkeypatch.setattr(engine_module, "RESEND_PAUSE_S", 0.001)

        async def still_there(call):
            call.reply(b'{"error":"used before"}', 500)

        world.prefill.infer = still_there
        task, _, _ = world.serve(request(wire_id="4711", body=self.BODY))
        assert (await result(task)).reason == "http_5xx"
        assert len(world.prefill.calls) == engine_module.RESENDS + 1

    async def test_the_pause_can_be_cancelled(self, world):
        async def still_there(call):
            call.reply(b'{"error":"used before"}', 500)

        world.prefill.infer = still_there
        task, _, _ = world.serve(request(wire_id="4711", body=self.BODY))
        await world.sent()
        await turns(20)
        task.cancel()
        assert await result(task) == "cancelled"
        assert len(world.prefill.calls) == 1
        assert await world.stopped() == ({"4711": 1}, {"4711": 1})

    async def test_a_first_request_is_not_sent_twice(self, world):
        async def fail(call):
            call.reply(b'{"error":"used before"}', 500)

        world.prefill.infer = fail
        assert (await result(world.serve(request())[0])).reason == "http_5xx"
        assert len(world.prefill.calls) == 1

    async def test_a_stop_of_the_failed_round_cannot_hit_the_next_one(self, world, monkeypatch):
        """Both carry the same id: what is due of the old stop must be over before the id goes out again."""
        monkeypatch.setattr(engine_module, "RESENDS", 0)
        gate = asyncio.Event()
        order = []

        async def slow_stop(call):
            await gate.wait()
            order.append("stopped")
            call.reply(call.body)

        async def fail_once(call):
            order.append("asked")
            if len(world.prefill.calls) == 1:
                call.reply(b"{}", 500)
            else:
                await world.answer(call)

        world.decode.stopping = slow_stop
        world.prefill.infer = fail_once
        assert (await result(world.serve(request(wire_id="4711", body=self.BODY))[0])).reason == "http_5xx"
        task, _, _ = world.serve(request(wire_id="4711", body=self.BODY))
        await until(lambda: world.decode.stops["4711"])
        await turns(50)
        gate.set()
        await world.sent(2)
        assert order == ["asked", "stopped", "asked"]
        world.decode.say("4711", "lastData", LAST)
        assert await result(task) == Completed()


class TestOneInstanceForBoth:
    """A flex instance, or a hybrid one (protocol page §4.5)."""

    @pytest.fixture
    async def flex(self, world):
        world.p0 = instance("h0", world.prefill.address)
        return world

    async def stream(self, call, *words, end=True):
        call.open_stream()
        for word in words:
            call.chunk(word)
        if end:
            call.end()

    async def test_its_own_answer_is_passed_through(self, flex):
        async def answer(call):
            await self.stream(call, A, LAST, DONE)

        flex.prefill.infer = answer
        task, out, placement = flex.serve(request(), decode=flex.p0)
        assert await result(task) == Completed()
        assert out.body == A + LAST + DONE
        call = await flex.sent()
        assert call.wire_id.isdecimal()
        assert call.header("req-type") is None
        assert call.header("d-target") is None
        assert placement.names == ["sent", "prefilled", "decoding"]

    async def test_the_two_parts_of_a_flex_instance(self, world):
        async def answer(call):
            call.reply(b'{"x":1}')

        world.prefill.infer = answer
        part = instance("d7", world.prefill.address)
        task, out, _ = world.serve(request(stream=False), decode=part)
        assert await result(task) == Completed()
        assert out.body == b'{"x":1}'
        assert (await world.sent()).header("d-target") == "127.0.0.1"

    async def test_a_cancellation_stops_it_once(self, flex):
        async def answer(call):
            await self.stream(call, A, end=False)
            await call.left()

        flex.prefill.infer = answer
        task, out, _ = flex.serve(request(), decode=flex.p0)
        await until(lambda: out.started)
        task.cancel()
        assert await result(task) == "cancelled"
        wire_id = (await flex.sent()).wire_id
        assert await flex.stopped() == ({wire_id: 1}, {})

    async def test_a_refusal_stops_nothing(self, flex):
        async def refuse(call):
            call.reply(b'{"error":"no"}', 422)

        flex.prefill.infer = refuse
        assert (await result(flex.serve(request(), decode=flex.p0)[0])).status == 422
        assert await flex.stopped() == ({}, {})

    async def test_a_failure_before_a_connection_stops_nothing(self, flex):
        await flex.prefill.refuse()
        error = await result(flex.serve(request(), decode=flex.p0)[0])
        assert (error.reason, error.connecting) == ("connect_refused", True)
        assert await flex.stopped() == ({}, {})


class TestInstances:
    async def test_only_decode_instances_have_a_stream(self, world):
        watcher = Watcher()
        world.engine.attach(world.p0, watcher)
        assert watcher.told == ["linked"]
        await turns(20)
        assert [call.target for call in world.decode.links] == ["/dresult"]
        await world.engine.detach(world.p0)

    async def test_detaching_ends_the_stream_and_its_requests(self, world):
        task, _, _ = world.serve(request())
        await world.sent()
        await world.engine.detach(world.d0)
        assert (await result(task)).reason == "link_lost"
        await until(lambda: not world.decode.peers or all(c.peer.gone.is_set() for c in world.decode.links))
        assert len(world.decode.links) == 1

    async def test_a_probe_asks_for_the_models(self, world):
        assert await world.engine.probe(world.p0) == "m"

    @pytest.mark.parametrize("body", [b"", b"[]", b'{"data":[]}', b'{"data":[{"name":"x"}]}', b"\xff", b"[" * 9999])
    async def test_a_probe_takes_what_it_gets(self, world, body):
        async def odd(call):
            call.reply(body)

        world.prefill._answer = odd
        assert await world.engine.probe(world.p0) is None

    @pytest.mark.parametrize(("status", "alive"), [(404, True), (401, True), (500, False), (503, False)])
    async def test_alive_is_who_answers_without_a_5xx(self, world, status, alive):
        async def answer(call):
            call.reply(b"{}", status)

        world.prefill._answer = answer
        if alive:
            assert await world.engine.probe(world.p0) is None
        else:
            with pytest.raises(EngineFailed) as caught:
                await world.engine.probe(world.p0)
            assert caught.value.reason == "http_5xx"

    async def test_a_probe_of_a_dead_one(self, world):
        await world.prefill.refuse()
        with pytest.raises(EngineFailed) as caught:
            await world.engine.probe(world.p0)
        assert (caught.value.side, caught.value.connecting) == (Side.PREFILL, True)

    async def test_closing_sends_the_stops_that_are_due(self, world):
        tasks = []
        for _ in range(5):
            task, out, _ = world.serve(request())
            await until(lambda out=out: out.started)
            tasks.append(task)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await world.engine.aclose()
        ids = {call.wire_id: 1 for call in world.prefill.calls}
        assert dict(world.prefill.stops) == dict(world.decode.stops) == ids
        await until(lambda: all(call.peer.gone.is_set() for call in world.decode.links))


class TestCalls:
    async def test_the_tokenizer(self, world):
        async def answer(call):
            call.reply(b'{"token_number":1,"tokens":[7]}', 200, ("Content-Type", "application/json; charset=utf-8"))

        world.prefill.infer = answer
        asked = request(api="mindie", path="/v1/tokenizer", body=b'{"inputs":"x"}', stream=False)
        answered = await world.engine.call(asked, world.p0)
        assert (answered.status, answered.body) == (200, b'{"token_number":1,"tokens":[7]}')
        assert answered.content_type == b"application/json; charset=utf-8"
        call = await world.sent()
        assert call.wire_id.isdecimal()
        assert call.header("req-type") is None

    @pytest.mark.parametrize(("status", "kind"), [(422, EngineRefused), (500, EngineFailed)])
    async def test_its_errors(self, world, status, kind):
        async def refuse(call):
            call.reply(b'{"error":"no"}', status)

        world.prefill.infer = refuse
        with pytest.raises(kind):
            await world.engine.call(request(path="/v1/tokenizer", stream=False), world.p0)


class TestOptions:
    def test_the_one_key(self):
        assert MindieEngine.options({"inter_comm_port": 7001}) == {"inter_comm_port": 7001}
        assert MindieEngine.options({}) == {}

    @pytest.mark.parametrize(
        "given",
        [{"inter_com_port": 1}, *({"inter_comm_port": value} for value in ("7001", 0, 65536, -1, True, None, 1.5))],
    )
    def test_what_is_wrong(self, given):
        with pytest.raises(OptionError):
            MindieEngine.options(given)


async def test_a_chat_body_is_never_touched(world):
    """What the client sent goes out byte for byte."""
    body = chat("é").replace(b"}", b' ,"seed":9007199254740993,"x":{"a":null,"t":1e-9} }', 1)
    world.serve(request(body=body))
    assert (await world.sent()).body == body
