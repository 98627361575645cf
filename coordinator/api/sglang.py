"""SGLang's own `/generate`: text, token ids or embeddings in, server-sent events out."""

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

_ERROR_TYPES: Final = {429: "rate_limit_error"}
_SERVER_ERRORS: Final = 500
_END: Final = re.compile(rb'^data: ?\[DONE\]|"finish_reason"\s*:\s*\{', re.MULTILINE)


class _Body(msgspec.Struct, frozen=True, gc=False):
    text: Raw = ABSENT
    input_ids: Raw = ABSENT
    input_embeds: Raw = ABSENT
    model: Raw = ABSENT
    stream: Raw = ABSENT
    sampling_params: Raw = ABSENT


_BODY: Final = msgspec.json.Decoder(_Body)


class Sglang(Family):
    """`/generate` with `text`, `input_ids` or `input_embeds`; the path is shared with TGI and vLLM."""

    name = "sglang"
    routes: Sequence[Route] = (Route("POST", "/generate", "infer"),)
    ends_with = b"data: [DONE]\n\n"

    def claims(self, path: str, body: Body) -> bool:  # noqa: ARG002 (one path only)
        """Whether the body has one of the three kinds of prompt."""
        try:
            given = bodies.read(_BODY, body)
        except BadRequest:
            return False
        return any(map(values.given, (given.text, given.input_ids, given.input_embeds)))

    def parse(self, path: str, body: Body) -> Ask:  # noqa: ARG002 (one path only)
        """Read a request; of several prompts the first of `text`, `input_ids`, `input_embeds` counts, as in SGLang.

        Each may be a list of prompts. `model` is no field of SGLang's: it says which instances are asked for.
        """
        given = bodies.read(_BODY, body)
        prompt = next(filter(values.given, (given.text, given.input_ids, given.input_embeds)), None)
        if prompt is None:
            raise BadRequest("the body needs `text`, `input_ids` or `input_embeds`")
        return Ask(
            stream=values.flag(given.stream, "stream"),
            model=values.text(given.model, "model"),
            prompt_bytes=len(prompt),
            prompt_tokens=bodies.tokens(prompt, body) if prompt is given.input_ids else None,
            max_tokens=bodies.parameter_limit(given.sampling_params),
        )

    def error_body(self, error: RequestError) -> bytes:
        """`{"error":{"message","type","code"}}`, where the code is the status."""
        default = "server_error" if error.status >= _SERVER_ERRORS else "invalid_request_error"
        kind = _ERROR_TYPES.get(error.status, default)
        return bodies.dump({"error": {"message": error.message, "type": kind, "code": error.status}})

    def ends(self, data: bytes) -> bool:
        """Whether `[DONE]` or a finish reason, which is an object here, is there."""
        return _END.search(data) is not None
