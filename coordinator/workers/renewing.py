"""Another configuration in all processes or in none: the supervisor asks, every worker builds, then all exchange it."""

import asyncio
import logging
from collections.abc import Callable

from coordinator.config import ConfigError, Logging, Problem, Settings
from coordinator.renewal import BUILD_S, Apply, Renewal
from coordinator.workers.crew import Crew
from coordinator.workers.messages import Commit, LogBy, Prepare, Prepared

LOG = logging.getLogger("pd_coordinator.workers")
ANSWERS_S = BUILD_S + 10.0


class CrewRenewal:
    """The supervisor's half; implements reloading.Processes."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._number = 0
        self._settings: Settings | None = None
        self._answers: dict[int, asyncio.Future[str]] = {}

    async def prepare(self, settings: Settings) -> None:
        """Have every worker build what it needs.

        Raises:
            ConfigError: one of them cannot, or takes too long.
        """
        self._number += 1
        self._settings = settings
        loop = asyncio.get_running_loop()
        self._answers = {number: loop.create_future() for number in self._crew.pids}
        self._crew.tell(None, Prepare(self._number, settings.model_dump_json()))
        if not self._answers:
            return
        await asyncio.wait(self._answers.values(), timeout=ANSWERS_S)
        for worker, answer in self._answers.items():
            reason = answer.result() if answer.done() else "it takes too long"
            if reason:
                name = settings.source.name
                raise ConfigError(name, [Problem("", None, f"worker {worker} cannot take it: {reason}")])

    def commit(self) -> None:
        """Have them all exchange it, those too that have started meanwhile."""
        if self._settings is None:
            return
        late = self._crew.pids.keys() - self._answers.keys()
        for worker in late:
            self._crew.tell(worker, Prepare(self._number, self._settings.model_dump_json()))
        self._crew.tell(None, Commit(self._number))
        self._settings = None

    def drop(self) -> None:
        """Have them forget it."""
        self._settings = None
        self._crew.tell(None, Commit(0))

    def log_by(self, logging: Logging, worker: int | None = None) -> None:
        """Have one of them, or all, log in this way."""
        self._crew.tell(worker, LogBy(logging.model_dump_json()))

    def heard(self, message: Prepared) -> None:
        """A worker has built it, or cannot."""
        answer = self._answers.get(message.worker)
        if message.number == self._number and answer is not None and not answer.done():
            answer.set_result(message.reason)

    def ended(self, worker: int) -> None:
        """A worker has ended; the one in its place counts as one that was not asked."""
        answer = self._answers.pop(worker, None)
        if answer is not None and not answer.done():
            answer.set_result("")


class WorkerRenewal:
    """A worker's half.

    Args:
        worker: its number.
        say: sends a message to the supervisor.
        leave: has this worker give its place to a new one, which starts with what counts.
    """

    def __init__(self, worker: int, renewal: Renewal, say: Callable[[object], None], leave: Callable[[], None]) -> None:
        self._worker = worker
        self._renewal = renewal
        self._say = say
        self._leave = leave
        self._number = 0
        self._due = False
        self._apply: Apply | None = None
        self._building: asyncio.Task[None] | None = None

    def take(self, message: Prepare | Commit | LogBy) -> None:
        """Do what the supervisor says."""
        if isinstance(message, LogBy):
            self._renewal.log_by(Logging.model_validate_json(message.logging))
        elif isinstance(message, Prepare):
            self._forget()
            self._number = message.number
            work = self._build(message)
            self._building = asyncio.get_running_loop().create_task(work, name="build another configuration")
        elif message.number != self._number:
            self._forget()
        elif self._apply is not None:
            self._exchange(self._apply)
        else:
            self._due = True

    async def aclose(self) -> None:
        """Build no more; idempotent."""
        building = self._building
        self._forget()
        if building is not None:
            await asyncio.wait([building])

    async def _build(self, message: Prepare) -> None:
        reason = ""
        try:
            self._apply = await self._renewal.prepare(Settings.model_validate_json(message.settings))
        except (ConfigError, TimeoutError, ValueError) as error:
            reason = str(error) or type(error).__name__
        except Exception as error:  # the border to engines and policies of the user's own
            LOG.exception("another configuration could not be built")
            reason = type(error).__name__
        self._say(Prepared(self._worker, message.number, reason))
        if self._due and self._apply is not None:
            self._exchange(self._apply)
        elif self._due:
            LOG.error("the configuration that the others have cannot be taken: %s", reason)
            self._leave()

    def _exchange(self, apply: Apply) -> None:
        self._apply, self._due = None, False
        apply()

    def _forget(self) -> None:
        self._number, self._due, self._apply = 0, False, None
        if self._building is not None:
            self._building.cancel()
