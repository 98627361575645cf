"""Any OpenAI-compatible engine that does both stages itself: the request goes through, the answer comes as it is."""

import time
from collections.abc import Mapping

from coordinator.config.errors import OptionError
from coordinator.core.instance import Instance
from coordinator.core.out import Out
from coordinator.core.ports import Answer, Outcome, Placement, Watcher
from coordinator.core.request import Request
from coordinator.engines.context import EngineContext
from coordinator.engines.health import alive, takes_key
from coordinator.engines.plain_call import pass_through, serve_alone

HEALTH_PATH = "/health"


class HybridEngine:
    """Engine protocol `hybrid`: implements core.ports.EngineProtocol with one plain call."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._client = context.client

    @staticmethod
    def options(given: Mapping[str, object]) -> Mapping[str, object]:
        """This engine's instances have no keys of their own."""
        for key in given:
            raise OptionError(key, "unknown key")
        return {}

    def attach(self, instance: Instance, watcher: Watcher) -> None:  # noqa: ARG002
        """Nothing stands open between requests."""
        watcher.linked()

    async def detach(self, instance: Instance) -> None:
        """Close idle connections."""
        self._client.close_address(instance.address)

    async def probe(self, instance: Instance) -> str | None:
        """Alive is whoever answers without a 5xx and does not refuse a key of ours; its model does not matter."""
        deadline_s = time.monotonic() + self._context.health_timeout_s
        path = self._context.health_path or HEALTH_PATH
        await alive(self._client, instance, path, deadline_s)
        await takes_key(self._client, instance, deadline_s)
        return None

    async def serve(self, request: Request, placement: Placement, out: Out) -> Outcome:
        """Pass one request through. Cancellation closes the connection, which ends it at the engine."""
        return await serve_alone(self._context, request, placement, placement.prefill, out)

    async def call(self, request: Request, instance: Instance) -> Answer:
        """Pass a call that is no inference through."""
        return await pass_through(self._context, request, instance)

    async def aclose(self) -> None:
        """Nothing is due."""
