"""A dispatcher over an engine under the kit: whole requests, from the client's side to the fake instances."""

import time

from client_side import Client
from engine_world import BY_NAME, held, request, until

from coordinator.core.view import ClusterView
from coordinator.dispatch import Dispatcher, DispatchLimits
from coordinator.observability.access import RequestRecord
from coordinator.relay import Relay


class FakeCluster:
    def __init__(self, instances):
        self.view = ClusterView(1, ready=tuple(instances))
        self.charged = []
        self.on_charge = lambda: None

    def charge(self, instance, error):
        self.charged.append(instance.id)
        self.on_charge()

    def credit(self, instance):
        pass


class DispatchedWorld:
    """Attributes: `clock`: by which deadlines are judged; may change."""

    def __init__(self, adapter, engine=None):
        self.adapter = adapter
        self.clock = time.monotonic
        self.cluster = FakeCluster(adapter.instances)
        self.dispatcher = Dispatcher(
            adapter.scheduler,
            self.cluster,
            {each.engine: engine or adapter.engine for each in adapter.instances},
            adapter.context.metrics,
            DispatchLimits(),
            clock=self._now_s,
        )

    def _now_s(self):
        return self.clock()

    def begin(self, **given):
        """A request's client, and the coroutine that serves it."""
        asked = request(**given)
        client = Client(body=asked.body, arrived_s=asked.arrived_s)
        record = RequestRecord(id=asked.id, api=asked.api, path=asked.path)
        metrics = self.adapter.context.metrics.for_api(asked.api)
        relay = Relay(client.exchange, BY_NAME[asked.api], metrics, record, limit_bytes=10000, tell_route=False)
        return client, self.dispatcher.run(asked, relay, record)

    async def forget_connections(self):
        """Let the next request begin with connecting."""
        client = self.adapter.context.client
        for each in self.adapter.instances:
            client.close_address(each.address)
        await until(lambda: client.open_connections == 0)

    async def leaves_nothing(self):
        adapter = self.adapter
        await adapter.settled()
        assert self.dispatcher.live == 0
        assert held(adapter.scheduler) == {}
        assert adapter.scheduler.queued == 0
        client = adapter.context.client
        await until(lambda: client.open_connections == client.idle_connections)
