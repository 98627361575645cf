"""Whatever happens, in whatever order: every load returns to zero, and nobody ineligible is chosen."""

import asyncio

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_world import instance, request, scheduler, see

from coordinator.core.errors import NoInstance, TooManyRequests
from coordinator.scheduler.search import Search

MAX_QUEUE = 4
POLICIES = [
    ("round_robin", {}),
    ("load_balance", {}),
    ("load_balance", {"order": "shortest"}),
    ("load_balance", {"sequence_cost": 1, "busiest_cost": 1}),
]


def members():
    """Instances with models, groups, peers and caps of all kinds."""
    found = []
    for number, (model, group, peers, cap) in enumerate(
        [(None, None, None, 2), ("a", None, None, None), ("a", "g", None, 1), (None, None, {"p0", "d0"}, 1)]
    ):
        known = peers if peers is None else frozenset(peers)
        found += [
            instance(f"{role}{number}", model=model, group=group, peers=known, max_requests=cap, total_blocks=9)
            for role in "pd"
        ]
    found += [instance("h0", model="a", max_requests=1), instance("h1", max_requests=2)]
    return found


def fits(lease, model):
    """Whether the placement obeys the rules of pairing."""
    prefill, decode = lease.prefill, lease.decode
    if model is not None and {prefill.model, decode.model} - {None, model}:
        return False
    if len({prefill.model, decode.model} - {None}) > 1:
        return False
    if prefill is decode:
        return prefill.id[0] == "h"
    peers = [known for known in (prefill.peers, decode.peers) if known is not None]
    linked = not peers or any({prefill.id, decode.id} & known for known in peers)
    return (prefill.id[0], decode.id[0]) == ("p", "d") and prefill.group == decode.group and linked


class Traffic(RuleBasedStateMachine):
    """Requests come, go on, end and are cancelled while the cluster changes."""

    @initialize(policy=st.sampled_from(POLICIES), fallback=st.sampled_from(["hybrid", "none"]))
    def start(self, policy, fallback):
        self.loop = asyncio.new_event_loop()
        self.everybody = members()
        name, options = policy
        self.made = scheduler(*self.everybody, policy=name, options=options, max_queue=MAX_QUEUE, fallback=fallback)
        self.made.on_idle = self.told_idle
        self.view = {found.key for found in self.everybody}
        self.tasks = {}
        self.leases = []
        self.serial = 0

    def told_idle(self, found):
        """Only those that have left are told of, once nothing needs them."""
        assert found.key not in self.view
        assert self.made.in_flight(found) == 0
        assert found.key not in {other.key for other, _ in self.made.loads()}

    def step(self):
        """Let all tasks run until they wait."""

        async def turns():
            for _ in range(4):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())
        for task, model in list(self.tasks.items()):
            if task.done():
                del self.tasks[task]
                if not task.cancelled() and task.exception() is None:
                    lease = task.result()
                    assert fits(lease, model)
                    self.leases.append(lease)
                elif not task.cancelled():
                    assert isinstance(task.exception(), NoInstance | TooManyRequests)

    @rule(
        model=st.sampled_from(["a", "b", None]),
        tokens=st.integers(0, 1500),
        avoid=st.frozensets(st.sampled_from(["p0", "p1", "d0", "d1", "h0"]), max_size=3),
        again=st.integers(1, 3),
    )
    def come(self, model, tokens, avoid, again):
        for _ in range(again):
            self.serial += 1
            asked = request(model, tokens=tokens)
            task = self.loop.create_task(self.made.place(asked, avoid), name=str(self.serial))
            self.tasks[task] = model
        self.step()

    @rule(data=st.data(), what=st.sampled_from(["prefilled", "decoding", "end"]))
    @precondition(lambda self: self.leases)
    def go_on(self, data, what):
        lease = data.draw(st.sampled_from(self.leases))
        {"prefilled": lambda: lease.prefilled(1.0), "decoding": lambda: lease.decoding(1.0), "end": lease.end}[what]()
        if what == "end" and data.draw(st.booleans()):
            self.leases.remove(lease)
        if data.draw(st.booleans()):
            self.step()

    @rule(data=st.data(), together=st.booleans())
    @precondition(lambda self: self.tasks)
    def cancel(self, data, together):
        task = data.draw(st.sampled_from(list(self.tasks)))
        if together and self.leases:
            self.leases[0].end()
        task.cancel()
        self.step()

    @rule(data=st.data(), refreshed=st.booleans())
    def change(self, data, refreshed):
        pool = members() if refreshed else self.everybody
        states = data.draw(st.lists(st.sampled_from("rrrs-"), min_size=len(pool), max_size=len(pool)))
        ready = [found for found, state in zip(pool, states, strict=True) if state == "r"]
        suspect = [found for found, state in zip(pool, states, strict=True) if state == "s"]
        ready = data.draw(st.permutations(ready))
        run = data.draw(st.booleans())
        self.everybody = pool
        self.view = {found.key for found in [*ready, *suspect]}
        see(self.made, *ready, suspect=suspect)
        if run:
            self.step()

    @invariant()
    def loads_are_those_of_the_live_leases(self):
        """Recount every load from what the leases say of themselves."""
        wanted = {}
        for lease in self.made._leases:
            assert lease.ended_s is None
            prefill = wanted.setdefault(lease.prefill.key, [0, 0])
            decode = wanted.setdefault(lease.decode.key, [0, 0])
            decode[0] += 1
            if lease.prefill is not lease.decode:
                prefill[0] += lease.prefilled_s is None
                prefill[1] += lease.prefilled_s is not None and lease.decoding_s is None
        seen = {found.key: [load.requests, load.pinned] for found, load in self.made.loads()}
        assert {key: counts for key, counts in seen.items() if any(counts)} == {
            key: counts for key, counts in wanted.items() if any(counts)
        }
        for found, load in self.made.loads():
            assert min(load.requests, load.blocks, load.tokens, load.pinned) >= 0
            assert sum(load.lengths.values()) == load.requests
            assert sum(tokens * count for tokens, count in load.lengths.items()) == load.tokens
            assert load.requests <= (found.capacity.max_requests or 10**9)
            assert found.key in self.view or load.requests + load.pinned > 0
            assert self.made.in_flight(found) == load.requests + load.pinned

    @invariant()
    def the_index_is_in_order(self):
        """The incremental order is the one that sorting would give."""
        for pool in self.made._roster.pools(None):
            assert pool.cells == sorted(pool.cells)
            for cell in pool._all_cells.values():
                for ranking in (cell.prefill, cell.decode):
                    assert ranking.offers == sorted(seat.rank for seat in ranking.members if not seat.full)
                    assert ranking.ready == sum(seat.tier == 0 for seat in ranking.members)
                assert (cell.rank in pool.cells) == bool(cell.prefill.offers and cell.decode.offers)

    @invariant()
    def the_line_is_bounded_and_counted(self):
        waiting = sum(len(lane) for lane in self.made._line._lanes.values())
        assert self.made.queued == waiting <= MAX_QUEUE
        assert all(self.made._line._lanes.values())

    @invariant()
    def nobody_waits_who_could_go(self):
        for pools, avoid in self.made._line._lanes:
            for _, _, waiter in self.made._line._lanes[pools, avoid]:
                search = Search(self.made._roster.pricing, self.made._fallback, waiter.request)
                assert waiter.future.done() or search.best(pools, avoid) == (None, True)

    def teardown(self):
        if not hasattr(self, "loop"):
            return
        for task in list(self.tasks):
            task.cancel()
        self.step()
        for lease in self.leases:
            lease.end()
        self.step()
        for lease in self.leases:
            lease.end()
        self.loop.close()
        assert not self.tasks
        assert self.made.queued == 0
        assert not self.made._leases
        for found, load in self.made.loads():
            assert (load.requests, load.blocks, load.tokens, load.pinned, load.lengths) == (0, 0, 0, 0, {})
            assert found.key in self.view


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
