"""Interfaces between the packages. What implements one of them passes its conformance kit in tests/conformance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from .errors import RequestError
from .instance import Instance
from .request import Ask, Request


@dataclass(frozen=True, slots=True)
class Completed:
    """The answer is complete at the client (or in its socket's buffer)."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Decode gave the request back: it must be placed again, with this body; what was sent stays sent."""

    body: bytes


Outcome = Completed | Resume
COMPLETED = Completed()


class Out(Protocol):
    """Where an engine puts the answer of one request; the relay implements it, a list does in tests.

    All calls are synchronous and cheap; none blocks and none raises for a client that has left (the request's task is
    cancelled instead).
    """

    @property
    def started(self) -> bool:
        """Whether anything was sent to the client: from then on nothing can be retried."""
        ...

    def piece(self, data: bytes, now_s: float, *, token: bool = True) -> None:
        """Send stream bytes as they are. `now_s`: monotonic time of arrival. `token`: counts for TTFT and ITL."""
        ...

    def finish(self, data: bytes, now_s: float, *, token: bool = True) -> None:
        """Send the last stream bytes, what the family's streams end with if it is not there yet, and the end."""
        ...

    def only_opens(self, data: bytes) -> bool:
        """Whether a stream piece only opens the stream (a role without content), by the family's rules."""
        ...

    def whole(self, body: bytes, now_s: float, content_type: bytes = b"application/json") -> None:
        """Send a complete answer that is not a stream."""
        ...


class Stages(Protocol):
    """Where an engine reports the moments of one attempt, for metrics, logs and the KV count."""

    def prefill_sent(self, wire_id: str) -> None:
        """The request went out to prefill under this id of our own."""
        ...

    def prefilled(self, now_s: float) -> None:
        """Prefill's compute is over; its KV is pinned until decode has it. Ends prefill's share of the load."""
        ...

    def decoding(self, now_s: float) -> None:
        """Decode has the KV: its first output is there. Unpins prefill's KV."""
        ...


class Placement(Stages, Protocol):
    """Where one attempt runs, and the load that it holds there; leaving its scope gives everything back, once."""

    @property
    def prefill(self) -> Instance:
        """The prefill instance, or the hybrid one."""
        ...

    @property
    def decode(self) -> Instance:
        """The decode instance; the same object as `prefill` for a hybrid instance."""
        ...


class Watcher(Protocol):
    """What an engine tells the cluster about one attached instance's standing links."""

    def linked(self) -> None:
        """Every standing link that requests need is open."""
        ...

    def unlinked(self, reason: str) -> None:
        """A standing link is lost or not open yet; `reason` is for the log and the instances page."""
        ...


class EngineProtocol(Protocol):
    """The choreography of one engine family: which calls, in which order, to serve one request."""

    def options(self, given: Mapping[str, object]) -> Mapping[str, object]:
        """Validate the engine-specific keys of an instance; raises ValueError with a sentence that names the key."""
        ...

    def attach(self, instance: Instance, watcher: Watcher) -> None:
        """Start what the instance needs while it is known (standing streams). Returns at once."""
        ...

    async def detach(self, instance: Instance) -> None:
        """Stop what `attach` started; requests that still use it fail."""
        ...

    async def probe(self, instance: Instance) -> str | None:
        """One health check: returns the served model name where the engine tells it; raises EngineFailed."""
        ...

    async def serve(self, request: Request, placement: Placement, out: Out) -> Outcome:
        """Run one attempt. Raises RequestError. Cancellation stops both instances in the engine's own way."""
        ...

    async def aclose(self) -> None:
        """Send the aborts that are still due, then release everything."""
        ...


@dataclass(frozen=True, slots=True)
class Route:
    """One path of an API family.

    `template` holds `{name}` for one path segment. `operation` names what the family does there: `infer` for a request
    that goes to an engine, else one of `models`, `model`, `info`, `live`, `ready`, `tokenize`, `server`, `config`.
    """

    method: str
    template: str
    operation: str


class ApiFamily(Protocol):
    """A dialect that clients speak. Pure: bytes in, values and bytes out.

    `ends_with` is what every stream of the family must end with (b"" for most); other stream bytes of engines travel
    untouched.
    """

    name: str
    routes: Sequence[Route]
    stream_type: bytes
    ends_with: bytes

    def claims(self, path: str, body: bytes) -> bool:
        """Whether this body is of this family, where two families share a path. False for what cannot be read."""
        ...

    def parse(self, path: str, body: bytes) -> Ask:
        """Read a request body as far as routing needs it; raises BadRequest in plain words."""
        ...

    def engine_path(self, path: str) -> str:
        """The path under which engines know this call."""
        ...

    def error_body(self, error: RequestError) -> bytes:
        """A whole error answer (JSON)."""
        ...

    def error_event(self, error: RequestError) -> bytes:
        """The same as the last piece of a stream that has begun."""
        ...

    def only_opens(self, piece: bytes) -> bool:
        """Whether a stream piece only opens the stream (a role and no content), so that a second one may be dropped."""
        ...
