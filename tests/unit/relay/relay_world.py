"""A relay for a client without a socket."""

from client_side import Client

from coordinator.api.families import FAMILIES
from coordinator.observability.access import RequestRecord
from coordinator.observability.metrics import Metrics
from coordinator.relay import Relay

BY_NAME = {family.name: family for family in FAMILIES}
T0 = 100.0  # arrival


class Case:
    def __init__(self, family="openai", *, limit_bytes=1000, tell_route=False, **client):
        self.client = Client(**client)
        self.family = BY_NAME[family]
        self.metrics = Metrics([family])
        self.cells = self.metrics.for_api(family)
        self.record = RequestRecord(id="client-7", api=family, path="/x")
        self.relay = Relay(
            self.client.exchange, self.family, self.cells, self.record, limit_bytes=limit_bytes, tell_route=tell_route
        )
        self.cuts = []
        self.relay.on_cut = self.cuts.append

    def congest(self, unsent):
        """The client's socket takes nothing more."""
        self.client.exchange.congested = True
        self.client.transport.unsent = unsent

    def relieve(self):
        """It takes bytes again, as the connection would tell."""
        self.client.transport.unsent = 0
        self.client.exchange.congested = False
        if self.client.exchange.on_writable is not None:
            self.client.exchange.on_writable()
