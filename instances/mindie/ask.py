"""An inference request as the engine understands it, and its way through the instances."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from instances.answers import Plan, Wish


@dataclass(frozen=True, slots=True)
class Call:
    """What came over HTTP.

    Attributes:
        path: without query.
        body: the JSON object.
        recompute: the prompt field holds `N,prompt tokens,generated tokens`.
        dmi: prefill and decode are apart, so the restrictions of that mode hold.
        limit: tokens to generate where the body sets no limit and the family has no default.
    """

    path: str
    body: dict[str, Any]
    recompute: bool
    dmi: bool
    limit: int


@dataclass(frozen=True, slots=True)
class Ask:
    """A valid request.

    Attributes:
        prompt_text: text of the prompt, without the answer.
        done: tokens that were generated before a recompute.
        caller_id: the body's own `id` (Triton), echoed in the answer.
    """

    path: str
    stream: bool
    wish: Wish
    prompt_text: str
    body: Mapping[str, Any]
    done: tuple[int, ...] = ()
    caller_id: str | None = None


@dataclass(slots=True)
class Job:
    """A request at work.

    Attributes:
        sent: tokens that exist so far, those before a recompute included.
        prefill_ms: time of the prefill; decode_ms: of each decode step.
    """

    req_id: str
    model: str
    ask: Ask
    plan: Plan
    sent: int
    cached_tokens: int = 0
    prefill_ms: float = 0.0
    decode_ms: list[float] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def stream(self) -> bool:
        """Whether the answer is a stream."""
        return self.ask.stream

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV the request holds."""
        return len(self.ask.wish.prompt) + self.sent

    def is_last(self, index: int) -> bool:
        """Whether token `index` (from 0) ends the answer."""
        return index >= len(self.plan) - 1

    def csv(self) -> str:
        """`N,p1..pN,r1..rM`: what the prompt becomes in a recompute (MindIE protocol page §6)."""
        return ",".join(str(token) for token in self.csv_ids())

    def csv_ids(self) -> list[int]:
        """The same as numbers."""
        prompt = self.ask.wish.prompt
        return [len(prompt), *prompt, *self.plan.tokens[: self.sent]]


@dataclass(frozen=True, slots=True)
class Token:
    """One token of the answer: its place, who made it, and how long that took."""

    index: int
    by_prefill: bool
    took_ms: float


class Family(Protocol):
    """A dialect: reads bodies and writes answers (MindIE protocol page §2.1)."""

    name: str

    def parse(self, call: Call) -> Ask:
        """Read a body; raises Refused."""
        ...

    def opening(self, job: Job) -> bytes:
        """What comes before the first token of a stream; mostly nothing."""
        ...

    def piece(self, job: Job, token: Token) -> bytes:
        """Stream piece of a token that is not the last."""
        ...

    def last(self, job: Job, token: Token) -> tuple[bytes, ...]:
        """Stream pieces of the last token."""
        ...

    def whole(self, job: Job) -> bytes:
        """The complete answer that is not a stream."""
        ...

    def retry(self, job: Job) -> dict[str, Any]:
        """Body of a recompute request for what there is so far (MindIE protocol page §6)."""
        ...

    def filler(self, text: bytes) -> bytes:
        """A stream piece without a token, for faults."""
        ...
