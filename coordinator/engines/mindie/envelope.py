"""What a MindIE prefill instance answers with 200 (MindIE protocol page §4.3)."""

from dataclasses import dataclass

import msgspec


class EnvelopeError(ValueError):
    """The reply is not the envelope that was due; the text is for the log."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Prefill's share of the answer.

    Attributes:
        output: bytes for the client, in the family's own shape; may be empty.
        last: the answer ended with its first token, and decode never speaks.
    """

    output: bytes
    last: bool


class _Envelope(msgspec.Struct):
    req_id: str = msgspec.field(name="reqId")
    is_last_resp: bool | None = msgspec.field(name="isLastResp", default=None)
    output: str | None = None


_DECODER = msgspec.json.Decoder(_Envelope)


def read_envelope(body: bytes, wire_id: str, *, stream: bool) -> FirstToken:
    """Read prefill's reply to a request sent under `wire_id`.

    Raises:
        EnvelopeError: no JSON, another request's id, or a member missing that this kind of request needs.
    """
    try:
        envelope = _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EnvelopeError(f"the reply is no envelope: {error}") from error
    if envelope.req_id != wire_id:
        raise EnvelopeError(f"the reply is for request {envelope.req_id[:64]!r}")
    last, output = envelope.is_last_resp, envelope.output
    if stream and (last is None or output is None):
        raise EnvelopeError("a stream's envelope lacks isLastResp or output")
    if not stream:
        if not last:
            return FirstToken(b"", last=False)  # an output here is of no use: decode sends the whole answer
        if not output:
            raise EnvelopeError("a last response lacks its output")
    return FirstToken((output or "").encode(), last=bool(last))
