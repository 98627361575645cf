"""One client request, as far as routing, scheduling and engines need to know it."""

from collections.abc import Sequence
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from coordinator.core.body import RequestBody

Headers = tuple[tuple[bytes, bytes], ...]


class Ask(Struct, frozen=True):
    """What a body asks for: the part of it that is read.

    Attributes:
        stream: whether the client wants an event stream.
        model: the model name that the client gave; None when it gave none.
        prompt_bytes: length of the prompt as JSON text, the measure of prefill load where tokens are not known.
        prompt_tokens: number of prompt tokens where the client sent token ids; else None.
        max_tokens: limit of generated tokens, where given.
    """

    stream: bool
    model: str | None
    prompt_bytes: int
    prompt_tokens: int | None = None
    max_tokens: int | None = None


class Deadlines(Struct, frozen=True):
    """Absolute monotonic times (seconds); infinity where a deadline is off. Made once, on arrival, and passed on."""

    scheduled_s: float
    first_token_s: float
    finished_s: float
    inter_token_s: float  # relative: the longest silence between two events of a stream


class Prepared(Struct, frozen=True):
    """What an engine protocol has found out about a request before its placement.

    Attributes:
        token_ids: of the prompt.
        block_hashes: of its full blocks, each with all that stands before it; as prefix caches know them.
        content: the engine's own.
    """

    token_ids: Sequence[int]
    block_hashes: tuple[bytes, ...] = ()
    content: object = None


class Request(Struct, frozen=True):
    """An inference request on its way to an engine.

    Attributes:
        id: the id in logs and in the answer's X-Request-Id; never used on an engine's wire.
        api: name of the API family.
        path: path for the engine, without query.
        query: query string without `?`, passed on as it came.
        headers: end-to-end headers that may travel on, lower-case names; no hop-by-hop, framing or control header.
        body: the body as received (expanded if it came compressed), but for the model's name.
        wire_id: set when an engine gave the request back (recompute): the id under which its protocol goes on.
        prepared: what an engine protocol has read of it before its placement, where one does.
    """

    id: str
    api: str
    path: str
    query: str
    headers: Headers
    body: RequestBody
    ask: Ask
    arrived_s: float
    deadlines: Deadlines
    wire_id: str = ""
    prepared: Prepared | None = None

    @property
    def target(self) -> str:
        """Path and query for the request line."""
        return f"{self.path}?{self.query}" if self.query else self.path

    def resumed(self, body: bytes, ask: Ask, wire_id: str) -> Self:
        """The request that continues this one with a body given by an engine."""
        return replace(self, body=body, ask=ask, wire_id=wire_id, prepared=None)
