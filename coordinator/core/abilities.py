"""What an engine protocol may be able to do besides core.ports.EngineProtocol; each is looked for in its class."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from .instance import Instance
from .request import Request


class InstanceWork(Protocol):
    """What is on one instance, over all processes."""

    @property
    def instance(self) -> Instance:
        """The instance."""
        ...

    @property
    def requests(self) -> int:
        """Requests that it works for."""
        ...

    @property
    def blocks(self) -> int:
        """KV blocks that they are counted as."""
        ...


class Host(Protocol):
    """What an engine protocol needs that finds its instances by itself."""

    def make(self, keys: Mapping[str, object]) -> Instance:
        """An instance of this engine from the keys of the configuration file; raises ValueError with a sentence."""
        ...

    def announce(self, instances: Sequence[Instance]) -> Mapping[str, str]:
        """Make these all the members that the engine has found; those that are not used, by id, with the reason."""
        ...

    def works(self) -> Sequence[InstanceWork]:
        """What is on the engine's instances."""
        ...


@runtime_checkable
class DiscoveringEngine(Protocol):
    """An engine protocol whose instances may register themselves."""

    async def discover(self, host: Host) -> None:
        """Begin to look for instances, if the settings say so; ends with `aclose`. Raises OSError: a port is taken."""
        ...


@runtime_checkable
class PreparingEngine(Protocol):
    """An engine protocol that reads more of a request before it is placed, so that policies can go by it."""

    @property
    def prepares(self) -> bool:
        """Whether it has instances for which that is of use."""
        ...

    async def prepare(self, request: Request) -> Request:
        """The request with `prepared` and the number of its tokens; as it was where that fails, which `serve` tells.

        Called once for each request, before its first placement.
        """
        ...


@runtime_checkable
class RenewableEngine(Protocol):
    """An engine protocol that takes other settings while it serves."""

    @property
    def renewable(self) -> Collection[str]:
        """Names of the settings that it can exchange; the others of its section stay until the next start."""
        ...

    def renew(self, settings: Mapping[str, object]) -> None:
        """Go by these settings, all of them and validated, and by its context, which has changed as well.

        Requests that run go on as they are. Must not raise: nothing could be undone any more.
        """
        ...


@runtime_checkable
class CertificateUser(Protocol):
    """An engine protocol that reads certificates from files by itself."""

    def renew_certificates(self) -> None:
        """Open connections with the files as they are from here on; requests that run go on as they are.

        The files have been found good. Must not raise.
        """
        ...


@runtime_checkable
class AnsweringEngine(Protocol):
    """A SplitEngine (core.ports) whose serving halves talk back to the one that holds the streams."""

    def answer_with(self, say: Callable[[bytes], None]) -> None:
        """For a serving half: `say` sends bytes to the other one."""
        ...

    def answered(self, data: bytes) -> None:
        """Take what a serving half has sent."""
        ...


@dataclass(frozen=True, slots=True)
class Identity:
    """What an instance tells about itself; None and empty: it does not.

    Attributes:
        role: prefill, decode or hybrid.
        models: the names that it serves.
        version: of its software.
    """

    role: str | None = None
    models: tuple[str, ...] = ()
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a decode instance went on with prefill's KV; None: nothing tells.

    Attributes:
        why: what shows it, as the rest of a sentence.
        advice: what to do where it did not.
    """

    moved: bool | None
    why: str
    advice: str = ""


@runtime_checkable
class Examiner(Protocol):
    """Finds out what an engine's instances are and do, for the doctor; an engine protocol may be one itself."""

    async def identify(self, instance: Instance, within_s: float) -> Identity:
        """What it says about itself. Never raises for an instance that does not answer."""
        ...

    async def take_stock(self, decode: Instance, within_s: float) -> Mapping[str, float]:
        """Counters of a decode instance that a handover changes; empty where there are none."""
        ...

    def judge(self, before: Mapping[str, float], after: Mapping[str, float]) -> Verdict:
        """Whether the KV has moved, by what `take_stock` said before and after one request of a pair."""
        ...


@dataclass(slots=True)
class News:
    """What an instance last told about itself.

    Attributes:
        waiting: requests that wait in it.
        cache_usage: part of its KV cache that is in use, 0 to 1.
        blocks: hashes of the blocks in its prefix cache; the oldest come first.
    """

    waiting: int = 0
    cache_usage: float = 0.0
    blocks: dict[bytes, None] = field(default_factory=dict)


@runtime_checkable
class InformingEngine(Protocol):
    """An engine protocol whose instances tell how they are, for policies that go by it."""

    @property
    def news(self) -> Mapping[str, News]:
        """The last of each instance that has told any, by its id; the same mapping all the time."""
        ...
