"""Builders for scheduler tests: instances, requests, a clock that stands still."""

import math
from collections import Counter

from coordinator.core.instance import Address, Capacity, Instance, Role
from coordinator.core.request import Ask, Deadlines, Request
from coordinator.core.view import ClusterView
from coordinator.policies import Policies, load_policy
from coordinator.scheduler import Scheduler

ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "h": Role.HYBRID}


class Clock:
    """Monotonic time that only tests move."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def instance(name, *, engine="mindie", max_requests=None, total_blocks=None, used=0, block_tokens=128, **more):
    """An instance whose role is the first letter of its id; the same id always has the same address."""
    return Instance(
        id=name,
        role=ROLES[name[0]],
        address=Address("127.0.0.1", 10_000 + sum(ord(c) * 31**i for i, c in enumerate(name)) % 50_000),
        engine=engine,
        capacity=Capacity(max_requests, total_blocks, used, block_tokens),
        **more,
    )


def fleet(prefills, decodes, **more):
    """p0, p1, ... and d0, d1, ..."""
    return [instance(f"p{i}", **more) for i in range(prefills)] + [instance(f"d{i}", **more) for i in range(decodes)]


def request(model="m", *, prompt_bytes=100, tokens=None, scheduled_s=math.inf, name="r"):
    """A request with this much prompt."""
    return Request(
        id=name,
        api="openai",
        path="/v1/completions",
        query="",
        headers=(),
        body=b"{}",
        ask=Ask(stream=True, model=model, prompt_bytes=prompt_bytes, prompt_tokens=tokens),
        arrived_s=0.0,
        deadlines=Deadlines(scheduled_s, math.inf, math.inf, 60.0),
    )


def scheduler(*ready, policy="round_robin", options=None, suspect=(), max_queue=0, **more):
    """A scheduler that has seen one view."""
    made = Scheduler(
        Policies(load_policy(policy, options), load_policy(policy, options)), max_queue=max_queue, clock=Clock(), **more
    )
    see(made, *ready, suspect=suspect)
    return made


def see(made, *ready, suspect=()):
    """Publish a view."""
    made.on_view(ClusterView(1, ready=tuple(ready), suspect=tuple(suspect)))


def pair(lease):
    """Ids of a placement."""
    return lease.prefill.id, lease.decode.id


def series(made, count, asked=None):
    """Pairs of so many requests, each over before the next."""
    pairs = []
    for _ in range(count):
        with made.try_place(asked or request()) as lease:
            pairs.append(pair(lease))
    return pairs


def shares(pairs, side):
    """How often each instance occurs; side 0: prefill, 1: decode."""
    return Counter(entry[side] for entry in pairs)


def numbers(made):
    """Id to (requests, blocks, pinned) for everybody with load."""
    return {
        found.id: (load.requests, load.blocks, load.pinned)
        for found, load in made.loads()
        if load.requests or load.blocks or load.pinned or load.tokens or load.lengths
    }
