"""What every engine protocol must do, written against what goes in and what comes out, whatever its wire is.

Each scenario ends with `leaves_nothing`: no load, no pinned KV, no connection in use beyond the standing ones, nothing
sent after the end of an answer (the sink minds that itself).
"""

import asyncio

from cycles import left_to_the_collector, quick_looks
from engine_adapters import DONE, Script, say, token, words_of
from engine_world import GUARD_S, Out, held, turns, until

from coordinator.core.errors import EngineFailed, EngineRefused, RequestError, Side
from coordinator.core.ports import Completed

FAULTS_5XX = ("500", "503", "reset", "closed", "nonsense")


async def serve(engine, asked, lease, out):
    with lease:
        return await engine.serve(asked, lease, out)


class Run:
    """One attempt with a real lease."""

    def __init__(self, adapter, asked):
        self.adapter = adapter
        self.out = Out()
        self.lease = adapter.scheduler.try_place(asked)
        # no method: the task keeps its error, whose traceback would keep `self`, which keeps the task
        self.task = asyncio.create_task(serve(adapter.engine, asked, self.lease, self.out), name="serve")

    async def result(self):
        async with asyncio.timeout(GUARD_S):
            await asyncio.wait([self.task])
            await self.adapter.mended()
        if self.task.cancelled():
            return "cancelled"
        return self.task.exception() or self.task.result()

    @property
    def text(self):
        return words_of(self.out.body)


class EngineKit:
    """The scenarios for one engine; each raises AssertionError or passes."""

    def __init__(self, adapter):
        self.adapter = adapter

    def run(self, script=None, **more):
        self.adapter.script = script or Script()
        return Run(self.adapter, self.adapter.request(**more))

    async def leaves_nothing(self):
        adapter = self.adapter
        await adapter.settled()
        assert held(adapter.scheduler) == {}
        await until(lambda: adapter.context.client.open_connections == adapter.context.client.idle_connections)
        await until(lambda: adapter.open_request_connections() <= 0)

    # --- answers

    async def streams(self):
        run = self.run()
        assert await run.result() == Completed()
        assert run.text == "ABCD"
        assert run.out.over
        assert run.out.body.count(DONE.encode()) == 1
        assert run.out.body.endswith(DONE.encode())
        assert run.out.body.count(b'"role"') <= 1
        assert await self.adapter.aborted() == set()

    async def answers_whole(self):
        run = self.run(stream=False)
        assert await run.result() == Completed()
        assert run.text == "ABCD"
        assert [kind for kind, *_ in run.out.events] == ["whole"]
        assert await self.adapter.aborted() == set()

    async def answers_in_one_token(self):
        for stream in (True, False):
            run = self.run(Script(words=("A",)), stream=stream)
            assert await run.result() == Completed()
            assert run.text == "A"
            assert run.out.over
        assert await self.adapter.aborted() == set()

    async def reports_its_stages(self):
        for stream in (True, False):
            run = self.run(stream=stream)
            await run.result()
            lease = run.lease
            # decode may overtake prefill's reply, so these two have no order
            assert lease.sent_s <= min(lease.prefilled_s, lease.decoding_s)
            assert max(lease.prefilled_s, lease.decoding_s) <= lease.ended_s
            assert len(lease.wire_ids) == 1

    async def gives_prefills_share_back_when_prefill_is_over(self):
        if "transfer" not in self.adapter.stages:
            return
        run = self.run(Script(hold="transfer"))
        await self.adapter.reached.wait()
        await until(lambda: run.lease.prefilled_s is not None)
        load = held(self.adapter.scheduler)
        pinned = (0, int(self.adapter.pins))
        assert load.get(run.lease.prefill.id, (0, 0)) == pinned, "the share is over, the KV is pinned"
        assert load[run.lease.decode.id] == (1, 0)
        self.adapter.release.set()
        assert await run.result() == Completed()

    async def serves_many_at_once(self):
        texts = [f"{number:03}xyz" for number in range(40)]
        runs = [
            self.run(body=say(text, stream=number % 2 == 0), stream=number % 2 == 0, ident="the-same-for-all")
            for number, text in enumerate(texts)
        ]
        assert [await run.result() for run in runs] == [Completed()] * len(runs)
        assert [run.text for run in runs] == texts
        ids = self.adapter.wire_ids()
        assert len(set(ids)) == len(ids) == len(texts), "a client's id must not matter on the wire"
        assert "the-same-for-all" not in ids

    async def uses_connections_again(self):
        for _ in range(5):
            assert await self.run().result() == Completed()
            await self.leaves_nothing()
        assert sum(fake.accepted for fake in self.adapter.fakes) <= len(self.adapter.fakes) + self.adapter.stands

    async def leaves_no_cycles(self):
        """What ends with a request is freed with it: nothing waits for the garbage collector."""
        await self.run().result()  # whatever is made once is there
        await self.leaves_nothing()
        with left_to_the_collector() as found:
            for stream in (True, False):
                assert await self.run(stream=stream).result() == Completed()
            await self.leaves_nothing()
        assert not found

    # --- failures

    async def passes_refusals_on(self):
        for fault in self.adapter.refusals:
            for stream in (True, False):
                run = self.run(Script(prefill_fault=fault), stream=stream)
                error = await run.result()
                assert isinstance(error, EngineRefused), fault
                assert (error.status, error.message) == (int(fault), "so says the engine")
                assert error.retry_after_s == self.adapter.retry_after_s
                assert run.out.events == []
        if self.adapter.name != "hybrid":
            assert await self.adapter.aborted() == set()

    async def names_who_failed_first(self):
        for fault in FAULTS_5XX:
            for stream in (True, False):
                run = self.run(Script(prefill_fault=fault), stream=stream)
                error = await run.result()
                assert isinstance(error, EngineFailed), fault
                assert error.retryable
                assert not error.connecting
                assert error.instance_id == run.lease.prefill.id
                assert "127.0.0.1" not in error.message
                assert run.out.events == []

    async def tells_when_there_was_no_connection(self):
        await self.adapter.refuse()
        run = self.run()
        error = await run.result()
        assert isinstance(error, EngineFailed)
        assert error.connecting
        assert error.reason == "connect_refused"
        assert run.out.events == []
        assert self.adapter.asked() == []

    async def fails_before_output(self):
        for stream in (True, False):
            run = self.run(Script(decode_fault="before"), stream=stream)
            error = await run.result()
            assert isinstance(error, EngineFailed)
            assert error.side is Side.DECODE
            assert error.instance_id == run.lease.decode.id
            assert not run.out.over, "never an end that is made up"

    async def fails_after_output(self):
        run = self.run(Script(decode_fault="after"))
        error = await run.result()
        assert isinstance(error, EngineFailed)
        assert error.instance_id == run.lease.decode.id
        assert not run.out.over, "never an end that is made up"
        assert words_of(run.out.body) == "ABC"

    async def never_takes_a_cut_answer_for_a_whole_one(self):
        run = self.run(Script(decode_fault="after"), stream=False)
        assert isinstance(await run.result(), EngineFailed)
        assert run.out.events == []

    async def goes_on_after_failures(self):
        for fault in ("500", "reset", "closed"):
            await self.run(Script(prefill_fault=fault)).result()
            assert await self.run().result() == Completed()

    async def leaves_no_cycles_when_it_fails(self):
        """An error knows by its traceback all that served the request; none of that may know the error."""
        scripts = {f"prefill: {fault}": Script(prefill_fault=fault) for fault in (*self.adapter.refusals, *FAULTS_5XX)}
        scripts |= {f"decode: {fault}": Script(decode_fault=fault) for fault in self.adapter.decode_faults}
        found = {}
        with quick_looks():
            for name, script in scripts.items():
                await self.run().result()  # the next request finds connections
                found[name] = await self._cycles_of(script)
            await self.adapter.refuse()
            found["refused"] = await self._cycles_of(Script())
        assert not {name: each for name, each in found.items() if each}

    async def _cycles_of(self, script):
        await self.leaves_nothing()
        with left_to_the_collector() as found:
            for stream in (True, False):
                assert isinstance(await self.run(script, stream=stream).result(), RequestError)
            await self.leaves_nothing()
        return found

    async def leaves_no_cycles_when_it_is_cancelled(self):
        found = {}
        with quick_looks():
            for stage in self.adapter.stages:
                await self.run().result()
                found[stage] = await self._cycles_of_cancelled(stage)
        assert not {name: each for name, each in found.items() if each}

    async def _cycles_of_cancelled(self, stage):
        adapter = self.adapter
        adapter.reached.clear()
        adapter.release.clear()
        await self.leaves_nothing()
        with left_to_the_collector() as found:
            run = self.run(Script(hold=stage))
            await adapter.reached.wait()
            await turns()
            run.task.cancel()
            assert await run.result() == "cancelled"
            await adapter.aborted()
            adapter.release.set()
            await self.leaves_nothing()
            del run
        return found

    # --- cancellation

    async def cancels_in(self, stage, *, stream):
        """The client leaves while a request is held in a stage: whoever works on it is told, once."""
        run = self.run(Script(hold=stage), stream=stream)
        await self.adapter.reached.wait()
        await turns()
        run.task.cancel()
        assert await run.result() == "cancelled"
        assert held(self.adapter.scheduler) == {}, "the load is given back at once"
        assert await self.adapter.aborted() == set(self.adapter.wire_ids())
        before = list(run.out.events)
        self.adapter.release.set()
        await self.adapter.say_late(self.adapter.wire_ids()[0])
        await turns(20)
        assert run.out.events == before, "late events of a cancelled attempt"

    async def cancels_before_it_began(self):
        run = self.run()
        run.task.cancel()
        assert await run.result() == "cancelled"
        assert self.adapter.asked() == []
        run.lease.end()

    async def a_cancelled_one_spares_the_others(self):
        gone = self.run(Script(hold="prefill"))
        stays = Run(self.adapter, self.adapter.request())
        await until(lambda: len(self.adapter.asked()) == 2)
        gone.task.cancel()
        await gone.result()
        self.adapter.release.set()
        assert await stays.result() == Completed()
        assert stays.text == "ABCD"

    # --- what comes too late

    async def drops_what_comes_after_the_end(self):
        for stream in (True, False):
            run = self.run(Script(late=True), stream=stream)
            assert await run.result() == Completed()
            await turns(20)
            assert run.text == "ABCD"
        assert await self.run().result() == Completed()

    async def drops_what_an_old_attempt_says(self):
        old = self.run(Script(decode_fault="before"))
        assert isinstance(await old.result(), EngineFailed)
        await until(self.adapter.wire_ids)
        new = self.run()
        await self.adapter.say_late(self.adapter.wire_ids()[0])
        assert await new.result() == Completed()
        assert new.text == "ABCD"

    # --- the end of the engine

    async def closes_while_requests_run(self):
        run = self.run(Script(hold="prefill"))
        await self.adapter.reached.wait()
        run.task.cancel()
        await run.result()
        ids = set(self.adapter.wire_ids())
        await self.adapter.engine.aclose()
        assert await self.adapter.aborted() == ids, "aborts that are due are sent before the end"

    async def keeps_bytes_as_they_are(self):
        """Words that look like framing, and characters of several bytes."""
        text = "你好\N{EARTH GLOBE EUROPE-AFRICA}é:"
        run = self.run(body=say(text), stream=True)
        assert await run.result() == Completed()
        assert run.text == text
        if self.adapter.native:
            assert token(text[-1], last=True).encode() in run.out.body
