"""One process takes another configuration while it serves: all that is new is built first, then exchanged at once."""

import asyncio
from collections.abc import Callable, Mapping

from coordinator.config import Logging, Settings
from coordinator.dataplane import NOBODYS, DataPlane
from coordinator.engines.engine_set import EngineSet
from coordinator.parts import engine_habits, make_policies, renew_tokenizers, wanted_engines
from coordinator.policies import inform
from coordinator.scheduler import Scheduler
from coordinator.tokens import Tokenizers
from coordinator.transport.client import HttpClient

Apply = Callable[[], None]
BUILD_S = 120.0  # tokenizers take about a second each, from a slow disk more


class Renewal:
    """What goes by the configuration in one process.

    Args:
        settings: those it was started with.
        scheduler: None where no requests are served.
        data: as `scheduler`.

    Attributes:
        settings: those that it goes by.
        on_logging: sets the log up anew; None: it stays as it is.
    """

    def __init__(  # the composition root hands over what it has built
        self,
        settings: Settings,
        client: HttpClient,
        tokenizers: Tokenizers,
        engines: EngineSet,
        *,
        scheduler: Scheduler | None = None,
        data: DataPlane | None = None,
    ) -> None:
        self.settings = settings
        self._client = client
        self._tokenizers = tokenizers
        self._engines = engines
        self._scheduler = scheduler
        self._data = data
        self.on_logging: Callable[[Logging], None] | None = None

    @property
    def drain_s(self) -> float:
        """How long live requests get at the end, in seconds; infinity: as long as they need."""
        return self.settings.timeouts.effective.drain_s

    def belonging(self) -> Mapping[str, str]:
        """Fields of the request whose work runs just now, for a line of the log."""
        return NOBODYS if self._data is None else self._data.belonging()

    def log_by(self, logging: Logging) -> None:
        """Log in this way from the next line on."""
        if self.on_logging is not None:
            self.on_logging(logging)

    async def prepare(self, settings: Settings) -> Apply:
        """Build what these settings need; the result, when called, exchanges everything in one go.

        Loads, leases, links and requests that run stay as they are. Cancellation leaves nothing behind.

        Raises:
            ConfigError: something cannot be built.
            TimeoutError: it takes more than two minutes.
            ValueError: an engine that was not in use cannot be made.
        """
        async with asyncio.timeout(BUILD_S):
            adopt_tokenizers = await asyncio.to_thread(renew_tokenizers, settings, self._tokenizers)
            retrace = await self._data.prepare_tracing(settings) if self._data is not None else None
        renew_engines = self._engines.prepare(wanted_engines(settings), engine_habits(settings))
        old, new = self.settings.scheduling, settings.scheduling
        fresh = old != new.model_copy(update={"fallback": old.fallback})
        policies = make_policies(settings) if fresh and self._scheduler is not None else None

        def apply() -> None:
            self.settings = settings
            self._client.limit_connecting(settings.timeouts.connect_s)
            adopt_tokenizers()
            renew_engines()
            if self._scheduler is not None:
                told = inform(policies, self._engines.values()) if policies is not None else None
                self._scheduler.renew(told, max_queue=settings.limits.max_queue, fallback=new.fallback)
            if self._data is not None:
                self._data.renew(settings)
            if retrace is not None:
                retrace()
            self.log_by(settings.logging)

        return apply
