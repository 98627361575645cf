"""What attempts of one request hand on to each other when decode gives it back (microserving protocol page §10)."""

import msgspec
from msgspec import Raw

from coordinator.wire.completion_stream import Before
from coordinator.wire.json_edit import Fields, write_fields

FIELD = "pd_coordinator_progress"
"""Where it stands in the body of a request that goes on; read there only if an engine, never a client, has put it."""


class Progress(msgspec.Struct, frozen=True, gc=False):
    """How far a request has come.

    Attributes:
        client_id: the answer's id as the client knows it.
        preempts: how often it was preempted.
        text: generated text that the client has.
        tokens: how many tokens that is; None where nobody has counted them.
        prompt_tokens: tokens of the client's prompt; None where nobody knows.
        started: the client has something, be it without generated text.
    """

    client_id: str
    preempts: int = 0
    text: str = ""
    tokens: int | None = 0
    prompt_tokens: int | None = None
    started: bool = False

    @property
    def before(self) -> Before | None:
        """The same for who edits the next part of the answer; None while nothing was sent."""
        return Before(len(self.text), self.tokens, self.prompt_tokens) if self.started else None


_DECODER = msgspec.json.Decoder(Progress)


def read_progress(fields: Fields) -> Progress | None:
    """The progress in a body that an engine has made."""
    value = fields.get(FIELD)
    return None if value is None else _DECODER.decode(value)


def body_with(fields: Fields, progress: Progress) -> bytes:
    """The body of a request that goes on: the client's own, and how far it has come."""
    return write_fields({**fields, FIELD: Raw(msgspec.json.encode(progress))})
