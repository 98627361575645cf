"""Both legs of an SGLang request, driven by hand."""

import asyncio
import itertools

from openai_client import CHAT, COMPLETIONS, post

from instances.options import Options
from instances.run import Fleet
from instances.timing import Timing

GENERATE = "/generate"
_rooms = itertools.count(2**62)


def pair(*, timing=None, prefill=(), decode=(), **settings):
    """One prefill, one decode."""
    settings = {"bootstrap_timeout_s": 4, "waiting_timeout_s": 4, **settings}
    timing = timing or Timing()
    roles = (("prefill", prefill), ("decode", decode))
    return Fleet(
        [
            Options(engine="sglang", role=role, timing=timing, block_tokens=16, faults=tuple(faults), settings=settings)
            for role, faults in roles
        ]
    )


def new_room():
    return next(_rooms)


def meeting(prefill, count=None):
    """The three keys; arrays if a count is given."""
    port = prefill.engine.bootstrap_port
    if count is None:
        return {"bootstrap_host": prefill.host, "bootstrap_port": port, "bootstrap_room": new_room()}
    return {
        "bootstrap_host": [prefill.host] * count,
        "bootstrap_port": [port] * count,
        "bootstrap_room": [new_room() for _ in range(count)],
    }


async def both(fleet, path, body, count=None):
    """(P's answer, D's answer) for one body."""
    prefill, decode = fleet.instances
    body = {**body, **meeting(prefill, count)}
    return await asyncio.gather(post(prefill, path, body), post(decode, path, body))


async def alone(path, body):
    """What one ordinary instance answers."""
    async with Fleet([Options(engine="sglang")]) as fleet:
        answer = await post(fleet.hybrid[0], path, body)
        assert answer.status == 200, answer.body
        return answer.json


def words(path, value):
    """The texts of an answer."""
    if path == CHAT:
        return [choice["message"]["content"] for choice in value["choices"]]
    if path == COMPLETIONS:
        return [choice["text"] for choice in value["choices"]]
    return [one["text"] for one in (value if isinstance(value, list) else [value])]
