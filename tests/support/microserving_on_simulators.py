"""The microserving engine, or a pattern, behind a dispatcher over simulated instances."""

import json

from engine_world import Watcher, context, instance, scheduler, until
from pair_on_simulators import Members, World

from coordinator.core.instance import Address
from coordinator.dispatch import Dispatcher, DispatchLimits
from coordinator.engines.microserving import MicroservingEngine, pattern_of
from coordinator.engines.microserving.settings import checked_settings
from instances import tokens
from instances.options import Options
from instances.run import Fleet
from instances.timing import Timing

RANKS_OF_PREFILL = 2


class SimText:
    """The text of ids, whole characters only."""

    def push(self, ids):
        return tokens.decode(ids)

    def end(self):
        return ""


class SimTokenizer:
    """The simulators' own tokenizer, and a template for chats."""

    highest_id = tokens.MAX_TOKEN

    async def encode(self, text, *, special=True):
        assert not special, "the engines add no marks"
        return list(tokens.encode(text))

    def detokenizer(self, prompt_ids=(), *, skip_special=True):
        return SimText()

    async def chat(self, messages, *, tools=None, add_generation_prompt=True, extra=()):
        return "\n".join([f"{message['role']}: {message['content']}" for message in messages]) + "\nassistant:"


class MicroWorld(World):
    """As `World`.

    Args:
        hybrids: instances that serve alone.
        tokenizer: whether the model has one.
        router: a pattern's class.
        options: of the simulators besides their settings.
        engine: settings of the engine.
        settings: of the simulators.
    """

    def __init__(
        self, *, prefill=1, decode=1, hybrids=0, timing=None, attempts=2, tokenizer=False, router=None, options=None,
        engine=None, recomputes=16, context_more=None, **settings,
    ):  # fmt: skip
        self.name = "microserving"
        self.context = context(settings=checked_settings(engine or {}), **(context_more or {}))
        self.engine = (MicroservingEngine if router is None else pattern_of(router))(self.context)
        self.engine._means.errands.sending_s = 1.0
        if tokenizer:
            made = SimTokenizer()
            self.engine._tokenizer = lambda instance: made
        self.limits = DispatchLimits(max_attempts=attempts, max_recomputes=recomputes)
        self.members = Members()
        roles = ["prefill"] * prefill + ["decode"] * decode + ["hybrid"] * hybrids
        self.fleet = Fleet(
            [
                Options(
                    engine=self.name,
                    role=role,
                    model="m",
                    timing=timing or Timing(),
                    settings={**settings, "num_gpus": 1 + at % 3},
                    **(options or {}),
                )
                for at, role in enumerate(roles)
            ]
        )

    async def __aenter__(self):
        await self.fleet.__aenter__()
        groups = (("p", self.fleet.prefill), ("d", self.fleet.decode), ("h", self.fleet.hybrid))
        made = [self._made(f"{role}{at}", each) for role, found in groups for at, each in enumerate(found)]
        self.prefills, self.decodes, self.hybrids = ([one for one in made if one.id[0] == role] for role in "pdh")
        for each in made:
            watcher = Watcher()
            self.engine.attach(each, watcher)
            assert await self.engine.probe(each) == "m"
            assert watcher.up, watcher.told
        self.scheduler = scheduler(*made, max_queue=1000)
        engines = {self.name: self.engine}
        self.dispatcher = Dispatcher(self.scheduler, self.members, engines, self.context.metrics, self.limits)
        return self

    def _made(self, name, simulated):
        options = {"recv_rank": simulated.engine.recv_rank}
        return instance(name, Address("127.0.0.1", simulated.port), engine=self.name, options=options)

    def bodies(self, call):
        """What instances were asked by one of the calls (`prep_recv`, ...), each instance's in order."""
        records = [record for each in self.fleet.instances for record in each.records if record.path.endswith(call)]
        return [json.loads(record.body) for record in records]

    @property
    def dead(self):
        """Why engine loops have died, by themselves or of what we have asked."""
        return [each.engine.loop.died_of for each in self.fleet.instances if each.engine.loop.dead]

    async def leaves_nothing(self, within_s=10.0):
        """Nothing is reserved, running or pinned anywhere, and every engine lives."""
        await until(lambda: not self.engine._means.errands._tasks, within_s)
        assert self.dead == []
        await super().leaves_nothing(within_s)
