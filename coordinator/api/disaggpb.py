"""The JSON API of disaggpb's own gateway: token ids in, token ids out (disaggpb protocol page §3)."""

import re
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Raw

from coordinator.core.errors import BadRequest, RequestError
from coordinator.core.ports import Route
from coordinator.core.request import Ask

from . import bodies, values
from .bodies import ABSENT, Body
from .family import Family
from .generation import DISAGGPB

_END: Final = re.compile(rb'"done"\s*:\s*true')


class _Body(msgspec.Struct, frozen=True, gc=False):
    token_ids: Raw = ABSENT
    max_new_tokens: Raw = ABSENT
    model: Raw = ABSENT
    stream: Raw = ABSENT


_BODY: Final = msgspec.json.Decoder(_Body)


class Disaggpb(Family):
    """`token_ids` on a path of another family; the original takes any path, and its clients use these.

    Streams have an event for each token and no further sign of their end than `"done":true`. `model` and `stream` are
    additions: the original serves one model, and streams always.
    """

    name = DISAGGPB
    routes: Sequence[Route] = (
        Route("POST", "/v1/completions", "infer"),
        Route("POST", "/", "infer"),
        Route("POST", "/generate", "infer"),
    )

    def claims(self, path: str, body: Body) -> bool:  # noqa: ARG002 (the same on every path)
        """Whether the body has `token_ids`."""
        return bodies.has(_BODY, body, "token_ids")

    def parse(self, path: str, body: Body) -> Ask:  # noqa: ARG002 (the same on every path)
        """Read a request with `token_ids`; its `request_id` is the client's own affair."""
        given = bodies.read(_BODY, body)
        ids = values.prompt(given.token_ids, "token_ids")
        number = bodies.tokens(ids, body)
        if not number:
            raise BadRequest("`token_ids` must be a list of token ids, at least one")
        return Ask(
            stream=values.flag(given.stream, "stream") if values.given(given.stream) else True,
            model=values.text(given.model, "model"),
            prompt_bytes=len(ids),
            prompt_tokens=number,
            max_tokens=values.limit(given.max_new_tokens),
        )

    def error_event(self, error: RequestError) -> bytes:
        """An event named `error`."""
        return b"event: error\ndata: " + self.error_body(error) + b"\n\n"

    def ends(self, data: bytes) -> bool:
        """Whether a last token is there."""
        return _END.search(data) is not None
