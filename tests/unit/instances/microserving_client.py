"""Drives simulated MLC engines by hand: written from the protocol page alone."""

import asyncio
import base64
import json

from openai_client import Events, opened, post, until

from instances.options import Options
from instances.run import Fleet
from instances.timing import Timing

PREP, SEND, GENERATE = "/microserving/prep_recv", "/microserving/remote_send", "/microserving/start_generate"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "the quiet river follows a road [[length:9]]"


def pair(*, prefill=(), decode=(), more=None, **settings):
    """One prefill and one decode instance; `more`: further options of both."""
    return Fleet(
        [
            Options(engine="microserving", role=role, faults=tuple(faults), settings=settings, **(more or {}))
            for role, faults in (("prefill", prefill), ("decode", decode))
        ]
    )


def one(*faults, role="hybrid", timing=None, settings=None, **more):
    return Fleet(
        [
            Options(
                engine="microserving",
                role=role,
                faults=faults,
                timing=timing or Timing(),
                settings=settings or {},
                **more,
            )
        ]
    )


def body_of(user, prompt=PROMPT, **more):
    return {"prompt": prompt, "user": user, "max_tokens": 30, "debug_config": {}, **more}


def numbers(metadata):
    return json.loads(base64.b64decode(metadata))


def packed(values):
    return base64.b64encode(json.dumps(values).encode()).decode()


async def prep(decode, user, end=-1, **more):
    """(kv_append_metadata, prefix_matched_length)."""
    answer = await post(decode, PREP, {**body_of(user, **more), "end": end})
    assert answer.status == 200, answer.body
    assert set(answer.json) == {"kv_append_metadata", "prefix_matched_length"}
    return answer.json["kv_append_metadata"], answer.json["prefix_matched_length"]


def send_body(decode, user, metadata, begin=0, end=-1, **more):
    """A remote_send; `rank` for another rank than decode's own."""
    rank = more.pop("rank", None)
    rank = decode.engine.recv_rank if rank is None else rank
    return {**body_of(user, **more), "begin": begin, "end": end, "kv_addr_info": metadata, "recv_rank": rank}


async def send(prefill, decode, user, metadata, begin=0, end=-1, **more):
    answer = await post(prefill, SEND, send_body(decode, user, metadata, begin, end, **more))
    assert (answer.status, answer.json) == (200, {}), answer.body


async def generate(decode, user, begin=-1, **more):
    return await post(decode, GENERATE, {**body_of(user, **more), "begin": begin})


async def generate_stream(decode, user, begin=-1, **more):
    """The events of a streamed start_generate."""
    body = {**body_of(user, **more), "begin": begin, "stream": True}
    async with opened(decode, GENERATE, body) as request:
        status, _, _ = await request.head()
        assert status == 200
        return Events(*await request.body())


async def ready(fleet, user, **more):
    """Prepare and send, so that only start_generate is left."""
    prefill, decode = fleet.instances
    metadata, matched = await prep(decode, user, **more)
    if sum(numbers(metadata)):
        await send(prefill, decode, user, metadata, matched, **more)


async def whole(fleet, user, **more):
    """The answer of all three calls."""
    await ready(fleet, user, **more)
    answer = await generate(fleet.decode[0], user, **more)
    assert answer.status == 200, answer.body
    return answer.json


async def expected(prompt=PROMPT, **more):
    """What one ordinary engine answers."""
    async with one() as fleet:
        answer = await post(fleet.hybrid[0], COMPLETIONS, body_of("x", prompt, **more))
        assert answer.status == 200, answer.body
        return answer.json


async def never_answers(instance, path, body, seconds=0.1):
    """Whether a call hangs, so long after it has arrived; its caller leaves then."""
    known = instance.records.total
    async with opened(instance, path, body) as request:
        await until(lambda: instance.records.total > known and list(instance.records)[-1].body)
        try:
            async with asyncio.timeout(seconds):
                await request.head()
        except TimeoutError:
            request.leave()
            return True
    return False


def error_of(answer):
    """The error within the double-encoded body."""
    return json.loads(json.loads(answer.body))
