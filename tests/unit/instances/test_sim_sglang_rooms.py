"""Prefill and decode meet in a room (SGLang protocol page §1-§4); both legs are driven by hand."""

import asyncio

import pytest
from openai_client import CHAT, COMPLETIONS, DEADLINE_S, Events, chat, completion, get, opened, post, stream, until
from sglang_legs import GENERATE, alone, both, meeting, new_room, pair, words

from instances.options import Options
from instances.run import Fleet
from instances.timing import Timing

PROMPT = "the quiet river " * 40
BODIES = [
    (CHAT, chat(PROMPT, max_tokens=12), None),
    (COMPLETIONS, completion(PROMPT, max_tokens=12), None),
    (GENERATE, {"text": PROMPT}, None),
    (CHAT, chat(PROMPT, n=3), 3),
    (COMPLETIONS, completion(["one two", "three"], n=2), 4),
    (COMPLETIONS, completion(["one two"]), 1),
    (COMPLETIONS, completion(["one two"]), None),
    (GENERATE, {"text": ["one two", "three"]}, 2),
    (GENERATE, {"input_ids": [[1, 2, 3], [4, 5]]}, 2),
    (GENERATE, {"text": "one two", "sampling_params": {"n": 2, "max_new_tokens": 9}}, 2),
]


@pytest.mark.parametrize(("path", "body", "count"), BODIES)
async def test_the_two_legs_give_the_answer_of_one_instance(path, body, count):
    async with pair() as fleet:
        prefill, decode = fleet.instances
        on_prefill, on_decode = await both(fleet, path, body, count)
        right = await alone(path, body)
        assert (on_prefill.status, on_decode.status) == (200, 200)
        assert words(path, on_decode.json) == words(path, right)
        # prefill makes one token for each sequence, and calls that a length
        assert prefill.engine.meters.generated_tokens == (count or 1)
        assert all(w.startswith(p) for w, p in zip(words(path, right), words(path, on_prefill.json), strict=True))
        assert await fleet.kv_empty()
        assert (prefill.engine.rooms.state(), decode.engine.joined) == ([], set())
        assert prefill.engine.rooms.transferred == (count or 1)
        assert all(entry["why"] == "transferred" for entry in prefill.ledger.released)


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_either_leg_may_come_first(first):
    async with pair(bootstrap_timeout_s=5) as fleet:
        prefill, decode = fleet.instances
        body = {**chat(PROMPT), **meeting(prefill)}
        order = [prefill, decode] if first == "prefill" else [decode, prefill]
        async with opened(order[0], CHAT, body) as early:
            await until(lambda: len(prefill.engine.rooms.state()) == 1)
            assert (await post(order[1], CHAT, body)).status == 200
            assert (await early.head())[0] == 200
        assert await fleet.kv_empty()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_leg_alone_times_out(role):
    async with pair(bootstrap_timeout_s=0.03) as fleet:
        instance = fleet.prefill[0] if role == "prefill" else fleet.decode[0]
        body = {**chat(PROMPT), **meeting(fleet.prefill[0])}
        answer = await post(instance, CHAT, body)
        assert (answer.status, answer.json["object"]) == (500, "error")
        assert "Aborted by AbortReq" in answer.json["message"]
        events = await stream(instance, CHAT, {**body, "bootstrap_room": new_room()})
        assert "Aborted by AbortReq" in events.error["message"]
        assert (events.text(), events.done) == ("", 1)
        assert fleet.prefill[0].engine.rooms.state() == []
        assert await fleet.kv_empty()


async def test_other_rooms_do_not_meet():
    async with pair(bootstrap_timeout_s=0.05) as fleet:
        prefill, decode = fleet.instances
        body = {**chat(PROMPT), **meeting(prefill)}
        answers = await asyncio.gather(
            post(prefill, CHAT, body), post(decode, CHAT, {**body, "bootstrap_room": new_room()})
        )
        assert [answer.status for answer in answers] == [500, 500]


async def test_closing_prefill_aborts_the_transfer():
    async with pair(timing=Timing(prefill_ms=60_000), waiting_timeout_s=5) as fleet:
        prefill, decode = fleet.instances
        body = {**chat(PROMPT), **meeting(prefill), "stream": True}
        async with opened(prefill, CHAT, body) as on_prefill, opened(decode, CHAT, body) as on_decode:
            await until(lambda: [room["decode"] for room in prefill.engine.rooms.state()] == [True])
            assert prefill.ledger.count("allocated") > 0
            on_prefill.leave()
            assert (await on_decode.head())[0] == 200
            events = Events(*await on_decode.body())
        assert (events.text(), events.error["message"]) == ("", "Aborted by AbortReq.")
        assert decode.engine.transfers_failed == 1
        assert await fleet.kv_empty()


async def test_prefill_alone_waits_for_the_end_of_its_time_when_decode_leaves():
    async with pair(timing=Timing(prefill_ms=50), waiting_timeout_s=0.2) as fleet:
        prefill, decode = fleet.instances
        body = {**chat(PROMPT), **meeting(prefill)}
        async with opened(prefill, CHAT, body) as on_prefill:
            async with opened(decode, CHAT, body) as on_decode:
                await until(lambda: [room["decode"] for room in prefill.engine.rooms.state()] == [True])
                on_decode.leave()
                assert await decode.ledger.wait_empty(DEADLINE_S)
            assert prefill.ledger.count("allocated") > 0
            assert (await on_prefill.head())[0] == 500
        assert prefill.engine.timeouts == 1
        assert await fleet.kv_empty()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_room_that_is_live_is_refused(role):
    async with pair(bootstrap_timeout_s=5) as fleet:
        instance = fleet.prefill[0] if role == "prefill" else fleet.decode[0]
        body = {**chat(PROMPT), **meeting(fleet.prefill[0])}
        async with opened(instance, CHAT, body) as first:
            await until(lambda: len(instance.engine.state()["rooms"]) == 1)
            answer = await post(instance, CHAT, body)
            assert (answer.status, "is in use" in answer.json["message"]) == (400, True)
            assert instance.engine.duplicate_rooms == 1
            # the first one is unharmed
            other = fleet.decode[0] if role == "prefill" else fleet.prefill[0]
            assert (await post(other, CHAT, body)).status == 200
            assert (await first.head())[0] == 200
        # the room is free again
        assert [answer.status for answer in await both(fleet, CHAT, chat(PROMPT))] == [200, 200]
        assert await fleet.kv_empty()


async def test_a_room_that_is_live_kills_the_instance_if_told_so():
    async with pair(bootstrap_timeout_s=5, duplicate_room="crash") as fleet:
        prefill = fleet.prefill[0]
        body = {**chat(PROMPT), **meeting(prefill)}
        async with opened(prefill, CHAT, body) as first:
            await until(lambda: len(prefill.engine.rooms.state()) == 1)
            with pytest.raises((EOFError, ConnectionResetError)):
                await post(prefill, CHAT, body)
            with pytest.raises((EOFError, ConnectionResetError)):
                await first.head()
        with pytest.raises(ConnectionRefusedError):
            await get(prefill, "/health")
        assert await fleet.kv_empty()


WRONG = {
    "no room": ({"bootstrap_room": None}, "without bootstrap room id"),
    "room is text": ({"bootstrap_room": "5"}, "bootstrap_room: Input should be an integer"),
    "room is a float": ({"bootstrap_room": 5.0}, "bootstrap_room: Input should be an integer"),
    "room is true": ({"bootstrap_room": True}, "bootstrap_room: Input should be an integer"),
    "room is negative": ({"bootstrap_room": -1}, "bootstrap_room: Input should be an integer"),
    "room is too large": ({"bootstrap_room": 2**63}, "bootstrap_room: Input should be an integer"),
    "room is a list": ({"bootstrap_room": [5]}, "bootstrap_room: a list is for batches only"),
    "no host": ({"bootstrap_host": None}, "bootstrap_host: Input should be a non-empty string"),
    "port is text": ({"bootstrap_port": "8998"}, "bootstrap_port: Input should be a valid port"),
    "port is zero": ({"bootstrap_port": 0}, "bootstrap_port: Input should be a valid port"),
    "rank": ({"routed_dp_rank": 1}, "routed_dp_rank must be in [0, 1)"),
}


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(("change", "says"), WRONG.values(), ids=WRONG)
async def test_the_meeting_is_validated(role, change, says):
    async with pair() as fleet:
        instance = fleet.prefill[0] if role == "prefill" else fleet.decode[0]
        answer = await post(instance, CHAT, {**chat("hi"), **meeting(fleet.prefill[0]), **change})
        assert (answer.status, answer.json["code"]) == (400, 400)
        assert says in answer.json["message"]
        assert instance.ledger.most_used_blocks == 0


BATCHES = {
    "single values": (None, {}, "a batch needs a list of 2"),
    "too short": (1, {}, "2 values are needed, got 1"),
    "equal rooms": (2, {"bootstrap_room": [7, 7]}, "must differ"),
    "one wrong": (2, {"bootstrap_room": [7, None]}, "Input should be an integer"),
}


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(("count", "change", "says"), BATCHES.values(), ids=BATCHES)
async def test_batches_need_arrays_of_their_length(role, count, change, says):
    async with pair() as fleet:
        instance = fleet.prefill[0] if role == "prefill" else fleet.decode[0]
        body = {**completion(["one", "two"]), **meeting(fleet.prefill[0], count), **change}
        answer = await post(instance, COMPLETIONS, body)
        assert (answer.status, says in answer.json["message"]) == (400, True)


async def test_prefill_wants_its_own_address():
    async with pair() as fleet:
        prefill, decode = fleet.instances
        for change in ({"bootstrap_host": "10.0.0.1"}, {"bootstrap_port": prefill.port}):
            answer = await post(prefill, CHAT, {**chat("hi"), **meeting(prefill), **change})
            assert (answer.status, "bootstrap_host and bootstrap_port must be" in answer.json["message"]) == (400, True)
        # decode's own address is no bootstrap server; nor is a closed port
        for port in (decode.port, 1):
            answer = await post(decode, CHAT, {**chat("hi"), **meeting(prefill), "bootstrap_port": port})
            assert answer.status == 500
        assert await fleet.kv_empty()


async def test_a_null_port_means_the_port_that_the_instance_was_started_with():
    async with Fleet([Options(engine="sglang", role="prefill")]) as first:
        port = first.prefill[0].engine.bootstrap_port
        async with Fleet([Options(engine="sglang", role="decode", settings={"bootstrap_port": port})]) as second:
            body = {**chat("hi"), **meeting(first.prefill[0]), "bootstrap_port": None}
            answers = await asyncio.gather(*(post(i, CHAT, body) for i in (*first.instances, *second.instances)))
            assert [answer.status for answer in answers] == [200, 200]


async def test_ranks():
    async with pair(dp_size=4, bootstrap_timeout_s=0.4) as fleet:
        prefill, decode = fleet.instances
        room = meeting(prefill)

        async def run(on_prefill, on_decode, number):
            body = {**chat("hi"), **room, "bootstrap_room": 4 * new_room() % 2**62 + number}
            legs = ((prefill, on_prefill), (decode, on_decode))
            answers = await asyncio.gather(*(post(instance, CHAT, {**body, **more}) for instance, more in legs))
            return [answer.status for answer in answers]

        assert await run({}, {}, 3) == [200, 200]
        assert await run({"routed_dp_rank": 1}, {"disagg_prefill_dp_rank": 1}, 3) == [200, 200]
        assert await run({"routed_dp_rank": 3}, {}, 3) == [200, 200]
        # prefill was routed to a rank that the room does not belong to, and decode was not told
        assert await run({"routed_dp_rank": 1}, {}, 3) == [500, 500]
        assert await fleet.kv_empty()


async def test_a_hybrid_does_not_look_at_the_meeting():
    async with Fleet([Options(engine="sglang")]) as fleet:
        assert (await post(fleet.hybrid[0], CHAT, {**chat("hi"), "bootstrap_room": "x"})).status == 200


async def test_the_port_may_be_the_instances_own():
    async with pair(bootstrap_port=-1) as fleet:
        assert fleet.prefill[0].engine.bootstrap_port == fleet.prefill[0].port
        assert [answer.status for answer in await both(fleet, CHAT, chat("hi"))] == [200, 200]


async def test_the_kv_of_another_prompt_shows_in_the_text():
    async with pair() as fleet:
        prefill, decode = fleet.instances
        room = meeting(prefill)
        _, answer = await asyncio.gather(
            post(prefill, CHAT, {**chat("hello"), **room}), post(decode, CHAT, {**chat("goodbye"), **room})
        )
        assert set(answer.json["choices"][0]["message"]["content"].split()) == {"<KV-LOST>"}
        assert decode.engine.wrong_kv == 1


async def test_abort_request():
    async with pair(bootstrap_timeout_s=5) as fleet:
        prefill, decode = fleet.instances
        body = {**chat("hi"), **meeting(prefill), "rid": "my-request"}
        async with opened(prefill, CHAT, body) as waiting:
            await until(lambda: len(prefill.engine.rooms.state()) == 1)
            assert (await post(prefill, CHAT, {**body, **meeting(prefill)})).status == 400  # the id is live
            assert (await post(prefill, "/abort_request", {"rid": "another"})).status == 200
            assert len(prefill.engine.serving.live) == 1
            assert (await post(prefill, "/abort_request", {"rid": "my-request"})).status == 200
            assert (await waiting.head())[0] == 500
        body = {**chat("[[fault:stall@2]]"), **meeting(prefill), "stream": True}
        async with opened(decode, CHAT, body) as running:
            await post(prefill, CHAT, {**body, "stream": False})
            await until(lambda: decode.engine.meters.generated_tokens == 2)
            assert (await post(decode, "/abort_request", {"abort_all": True})).status == 200
            await running.head()
            events = Events(*await running.body())
        assert events.error["message"] == "Aborted by AbortReq."
        assert (prefill.engine.aborted, decode.engine.aborted) == (1, 1)
        assert await fleet.kv_empty()


async def test_prefill_crashes_while_decode_waits():
    async with pair(bootstrap_timeout_s=5) as fleet:
        prefill, decode = fleet.instances
        async with opened(decode, CHAT, {**chat("hi"), **meeting(prefill)}) as request:
            await until(lambda: len(prefill.engine.rooms.state()) == 1)
            prefill.crash()
            assert (await request.head())[0] == 500
        assert await fleet.kv_empty()
