"""Interfaces between the packages. What implements one of them passes its conformance kit in tests/conformance."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from .errors import EngineFailed, RequestError
from .instance import Instance, Role
from .out import Out
from .request import Ask, Request
from .view import ClusterView


@dataclass(frozen=True, slots=True)
class Completed:
    """The answer is complete at the client (or in its socket's buffer)."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Decode gave the request back: it must be placed again, with this body; what was sent stays sent.

    `wire_id` is the id under which the engine protocol goes on with it, where it asks for the same one. `avoid` is the
    id of an instance on which it is not to be placed again while there is another.
    """

    body: bytes
    wire_id: str = ""
    avoid: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer of an instance to a call that is no inference."""

    status: int
    content_type: bytes
    body: bytes


Outcome = Completed | Resume
COMPLETED = Completed()


class Stages(Protocol):
    """Where an engine reports the moments of one attempt, for metrics, logs and the KV count."""

    def prefill_sent(self, wire_id: str) -> None:
        """The request went out to prefill under this id of our own."""
        ...

    def prefilled(self, now_s: float, *, pinned: bool = True) -> None:
        """Prefill's compute is over. Ends prefill's share of the load.

        `pinned`: prefill keeps the KV until decode has it; false where the KV has left prefill already.
        """
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

    def skip_prefill(self) -> None:
        """Decode serves the request alone: prefill's share ends untimed, and `prefilled` does nothing then."""
        ...

    def candidates(self, role: Role) -> Sequence[tuple[Instance, int]]:
        """Who could have a role in this attempt, its holder included, with the requests on each; best first."""
        ...

    def hand_to(self, instance: Instance) -> bool:
        """Give a role's load to one of its candidates; False: it is given back already, or the instance has left."""
        ...

    def another_decode(self, failure: EngineFailed) -> bool:
        """Exchange `decode`, which has failed before its first output, for another: for who holds the KV himself.

        It counts as a placement and its failure is charged, as if the whole request were placed again. False, and
        nothing has changed: nobody else is free, or there were `retry.max_attempts` placements; then raise the failure.
        """
        ...


class Members(Protocol):
    """The cluster as those see it who serve requests with it."""

    @property
    def view(self) -> ClusterView:
        """Who may be chosen."""
        ...

    def charge(self, instance: Instance, error: EngineFailed) -> None:
        """An instance has failed a request."""
        ...

    def credit(self, instance: Instance) -> None:
        """A request went well at an instance."""
        ...

    def models(self) -> Sequence[str]:
        """Model names for lists."""
        ...

    def accepts(self, model: str | None) -> bool:
        """Whether some member, whatever its state, serves this name or any name."""
        ...

    def ready_pair(self) -> tuple[bool, str]:
        """Whether a request could be placed, and a sentence why (not)."""
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

    @staticmethod
    def options(given: Mapping[str, object]) -> Mapping[str, object]:
        """Validate the engine-specific keys of an instance; raises config.OptionError, or ValueError with a sentence.

        Static, so that a configuration can be checked without anything being built.
        """
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

    async def call(self, request: Request, instance: Instance) -> Answer:
        """Pass one call that is no inference (a tokenizer's) to one instance; raises RequestError."""
        ...

    async def aclose(self) -> None:
        """Send the aborts that are still due, then release everything."""
        ...


@runtime_checkable
class KvHolder(Protocol):
    """An engine protocol under which prefill's KV can outlive the request that it was computed for."""

    def pinned(self) -> Mapping[str, int]:
        """Ended requests whose KV is still to be released, by prefill instance id."""
        ...


@runtime_checkable
class SplitEngine(Protocol):
    """An engine protocol with standing streams, which one process holds for all (`server.workers` above 1)."""

    def own(self, tell: Callable[[int | None, bytes], None]) -> None:
        """Become the half that holds the streams; `tell` sends bytes to the other half in one process, or in all."""
        ...

    def introduce(self, worker: int) -> None:
        """Tell a process that has just started what the others know."""
        ...

    def follow(self) -> None:
        """Become a half that serves requests with streams that another process holds."""
        ...

    def told(self, data: bytes) -> None:
        """Take what the other half has sent."""
        ...


@dataclass(frozen=True, slots=True)
class Route:
    """One path of an API family.

    `template` holds `{name}` for one path segment, or `{*name}` at its end for all that is left. `operation` names what
    the family does there: `infer` for a request that goes to an engine, else one of `models`, `model`, `info`, `live`,
    `ready`, `tokenize`, `server`, `config`.
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
        """Whether a stream piece only opens the stream: a role and no content, or comments, and no token yet."""
        ...

    def ends(self, data: bytes) -> bool:
        """Whether `data`, the last bytes of a stream (at least its last event), holds the sign of a whole answer.

        OpenAI: `[DONE]` or a finish reason; TGI and MindIE: `generated_text`; Triton, vLLM: nothing to go by, so true.
        """
        ...
