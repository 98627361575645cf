"""The model names of instances: a request must bear exactly that of its prefill instance (xLLM protocol page §5.4)."""

import time

from coordinator.core.instance import Instance
from coordinator.engines.health import told_model
from coordinator.transport.client import HttpClient

EVERY_S = 30.0


class Models:
    """Asks instances, where the configuration does not say it, and remembers."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._known: dict[object, tuple[str | None, float]] = {}

    def known(self, instance: Instance) -> str | None:
        """The name, as far as it is known."""
        return instance.model or self._known.get(instance.key, (None, 0.0))[0]

    def learn(self, instance: Instance, name: str) -> None:
        """Somebody else has asked."""
        self._known[instance.key] = (name, time.monotonic())

    def forget(self, instance: Instance) -> None:
        """The instance is gone."""
        self._known.pop(instance.key, None)

    async def of(self, instance: Instance, within_s: float) -> str | None:
        """The name, asked for at most every half minute; an instance that does not tell it is no failure.

        Raises:
            EngineFailed: it refuses our key.
        """
        now_s = time.monotonic()
        name, asked_s = self._known.get(instance.key, (None, -EVERY_S))
        if name is None or now_s - asked_s >= EVERY_S:
            name = await told_model(self._client, instance, now_s + within_s) or name
            self._known[instance.key] = (name, now_s)
        return name
