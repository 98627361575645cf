"""Two halves of the engine: one that instances call, and serving ones."""

from engine_world import context, count, turns, until
from test_xllm_engine import at_completions, text_of
from xllm_pair import Pair, generation, output, settings, tokenizers

from coordinator.core.abilities import AnsweringEngine, DiscoveringEngine, InformingEngine, PreparingEngine
from coordinator.core.errors import EngineFailed
from coordinator.core.ids import WireIds
from coordinator.core.ports import Completed, SplitEngine
from coordinator.engines.xllm import XllmEngine
from coordinator.engines.xllm import split as split_module


class Halves(Pair):
    """The pair's engine is the owner's half; `workers` are the serving ones. Messages between them wait in a queue."""

    def __init__(self, workers=2, **more):
        super().__init__(**more)
        self.number = workers
        self.queue = []
        self.instant = True

    async def __aenter__(self):
        await super().__aenter__()
        self.owner = self.engine
        return self

    @property
    def address(self):
        return getattr(self, "owner", self.engine)._inbound.address

    def tell(self, worker, data):
        for number, half in self.workers.items():
            if worker in (None, number):
                self.queue.append((half.told, data))
        self.flush()

    def flush(self):
        while self.instant and self.queue:
            take, data = self.queue.pop(0)
            take(data)

    def half(self, number):
        given = {"ids": WireIds(number), "settings": settings(), "tokenizers": tokenizers()}
        half = XllmEngine(context(**given))
        half.follow()
        half.answer_with(lambda data: (self.queue.append((self.owner.answered, data)), self.flush()))
        self.workers[number] = half
        for made in self.instances.values():
            half.attach(made, self.watchers_of_workers)
        self.owner.introduce(number)
        return half

    async def start(self):
        from engine_world import Watcher

        self.workers = {}
        self.watchers_of_workers = Watcher()
        self.owner.own(self.tell)
        self.owner._office.opened(self.address)
        for number in range(1, self.number + 1):
            self.half(number)
        for made in self.instances.values():
            await self.owner.probe(made)

    def ask(self, number, **more):
        self.engine = self.workers[number]
        return self.serve(**at_completions(**more))

    async def __aexit__(self, *exit_):
        for half in self.workers.values():
            await half.aclose()
            await half._context.client.aclose()
        self.engine = self.owner
        await super().__aexit__(*exit_)


def test_the_engine_has_its_abilities():
    made = XllmEngine(context(settings=settings()))
    for ability in (SplitEngine, AnsweringEngine, DiscoveringEngine, InformingEngine, PreparingEngine):
        assert isinstance(made, ability)


async def test_results_reach_the_process_that_asked():
    async with Halves() as halves:
        await halves.start()
        one, two = halves.ask(1), halves.ask(2)
        bodies = [await one.body(), await two.body()]
        assert len({one.wire_id, two.wire_id}) == 2
        by_id = {body["service_request_id"]: served for body, served in zip(bodies, (one, two), strict=True)}
        assert {body["source_xservice_addr"] for body in bodies} == {halves.address}
        firsts = [generation(ident, output("A"), first=True) for ident in by_id]
        assert await halves.p.push(*firsts) == [True, True]
        ends = [generation(ident, output("B", finish="stop"), finished=True) for ident in by_id]
        assert await halves.d.push(*ends) == [True, True]
        for served in (one, two):
            assert await served.result() == Completed()
            assert text_of(served.out.body) == ({0: "AB"}, {0: "stop"})
        assert await halves.d.push(*ends) == [False, False], "late"


async def test_all_results_of_one_call_travel_in_one_message_per_process():
    async with Halves() as halves:
        await halves.start()
        asked = [halves.ask(1), halves.ask(1), halves.ask(2)]
        ids = [(await served.body())["service_request_id"] for served in asked]
        halves.instant = False
        await halves.p.push(*[generation(ident, output("A"), first=True) for ident in ids])
        assert len(halves.queue) == 2
        halves.instant = True
        halves.flush()
        for served in asked:
            served.task.cancel()
            await served.result()


async def test_a_client_that_leaves_ends_the_request_at_the_next_result():
    async with Halves() as halves:
        await halves.start()
        served = halves.ask(1)
        await served.body()
        assert await halves.p.push(served.told(output("A"), first=True)) == [True]
        served.task.cancel()
        await served.result()
        await turns()
        assert await halves.d.push(served.told(output("B"))) == [False]
        assert count(halves.owner._context.metrics.late_frames) == 1


async def test_what_a_process_does_not_know_is_told_back():
    """As after a process has died and another has its number."""
    async with Halves() as halves:
        await halves.start()
        stray = WireIds(1).next()
        assert await halves.d.push(generation(stray, output("x"))) == [True], "nobody knows yet"
        assert await halves.d.push(generation(stray, output("y"))) == [False]
        assert await halves.d.push(generation("no-number", output("z"))) == [False]


async def test_what_is_over_is_remembered_within_bounds(monkeypatch):
    monkeypatch.setattr(split_module, "MAX_OVER", 3)
    async with Halves() as halves:
        await halves.start()
        office = halves.owner._office
        ids = [WireIds(1, start=n * 100).next() for n in range(5)]
        await halves.d.push(*[generation(ident, finished=True) for ident in ids])
        assert len(office._over) <= 3


async def test_an_instance_that_is_lost_is_lost_in_every_process():
    async with Halves() as halves:
        await halves.start()
        served = halves.ask(2)
        await served.body()
        await halves.d.channel.beat(halves.d.name, "one")
        await halves.d.channel.beat(halves.d.name, "two")
        error = await served.result()
        assert isinstance(error, EngineFailed)
        assert error.instance_id == "d0"


async def test_heartbeats_and_model_names_reach_every_process():
    async with Halves() as halves:
        await halves.start()
        await halves.p.channel.beat(halves.p.name, "one", waiting=7, usage=0.5, stored=[b"x" * 16])
        for half in halves.workers.values():
            news = half.news["p0"]
            assert (news.waiting, news.cache_usage, list(news.blocks)) == (7, 0.5, [b"x" * 16])
            assert half._models.known(halves.instances["p0"]) == "m"
        late = halves.half(9)
        assert late._serving.service == halves.address
        assert late._models.known(halves.instances["p0"]) == "m"


async def test_a_serving_half_opens_no_server_and_links_nobody():
    async with Halves() as halves:
        links = len(halves.d.peers_told)
        await halves.start()
        await turns(20)
        assert halves.watchers_of_workers.up
        assert all(not half._inbound.open.is_set() for half in halves.workers.values())
        assert len(halves.d.peers_told) == links
        await until(lambda: all(watcher.up for watcher in halves.watchers.values()))


# --- what is known before a request is placed


async def test_requests_are_prepared_once():
    from engine_world import request

    async with Pair() as pair:
        assert pair.engine.prepares
        asked = request(**at_completions("hello"))
        ready = await pair.engine.prepare(asked)
        ids = await tokenizers().for_model("m").encode("hello")
        assert list(ready.prepared.token_ids) == ids
        assert ready.ask.prompt_tokens == len(ids)
        assert ready.prepared.block_hashes == ()
        wrong = request(**at_completions("hello", temperature=9))
        assert await pair.engine.prepare(wrong) is wrong


async def test_blocks_are_named_once_an_instance_tells_of_its_cache():
    from engine_world import request

    from coordinator.policies.block_hashes import block_hashes

    async with Pair() as pair:
        await pair.p.channel.beat(pair.p.name, "one", stored=[b"y" * 16])
        ids = list(range(5, 305))
        ready = await pair.engine.prepare(request(**at_completions(ids)))
        assert ready.prepared.block_hashes == block_hashes(ids)
        assert len(ready.prepared.block_hashes) == 2
        await pair.p.channel.beat(pair.p.name, "one", removed=[b"y" * 16])
        assert pair.engine.news["p0"].blocks == {}


async def test_hybrid_instances_need_no_preparing():
    async with Pair(0, 0) as pair:
        await pair.add("h0")
        assert not pair.engine.prepares
