"""TGI: text generation by `inputs`, and its error shape, which MindIE's own routes share."""

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

_END: Final = re.compile(rb'"generated_text"\s*:\s*"')
_OVERLOADED: Final = frozenset((429, 503))
_SERVER_ERRORS: Final = 500
_DEADLINE: Final = 504


class _Body(msgspec.Struct, frozen=True, gc=False):
    inputs: Raw = ABSENT
    parameters: Raw = ABSENT
    stream: Raw = ABSENT


_BODY: Final = msgspec.json.Decoder(_Body)


class TextGeneration(Family):
    """What TGI and MindIE share: errors with an `error_type`, streams whose last event has the whole text."""

    def error_body(self, error: RequestError) -> bytes:
        """A whole error answer (JSON)."""
        return bodies.dump({"error": error.message, "error_type": _error_type(error.status)})

    def error_event(self, error: RequestError) -> bytes:
        """The same, where a deadline leaves an incomplete text behind."""
        kind = "incomplete_generation" if error.status == _DEADLINE else _error_type(error.status)
        return b"data: " + bodies.dump({"error": error.message, "error_type": kind}) + b"\n\n"

    def ends(self, data: bytes) -> bool:
        """Whether the whole text is there; it is null or absent in all but the last event (MindIE §2.1)."""
        return _END.search(data) is not None


class Tgi(TextGeneration):
    """`/` streams by the body's flag, `/generate` never, `/generate_stream` always (MindIE §2)."""

    name = "tgi"
    routes: Sequence[Route] = (
        Route("POST", "/", "infer"),
        Route("POST", "/generate", "infer"),
        Route("POST", "/generate_stream", "infer"),
        Route("GET", "/info", "info"),
        Route("GET", "/health", "ready"),
    )
    prefixes = ("/generate", "/info")

    def claims(self, path: str, body: Body) -> bool:  # noqa: ARG002 (the same on every path)
        """Whether the body has `inputs`; it wins over `prompt` where both are there (MindIE §2)."""
        return bodies.has(_BODY, body, "inputs")

    def parse(self, path: str, body: Body) -> Ask:
        """Read a request with `inputs`; the family knows no model names."""
        given = bodies.read(_BODY, body)
        if not values.given(given.inputs):
            shared = path.startswith("/generate") and not path.startswith("/generate_stream")
            needed = "the body needs `inputs` (TGI), `prompt` (vLLM) or `text` (SGLang)"
            raise BadRequest(needed if shared else "`inputs` is missing")
        if path.startswith("/generate"):
            stream = path.startswith("/generate_stream")
        else:
            stream = values.flag(given.stream, "stream")
        return Ask(
            stream=stream,
            model=None,
            prompt_bytes=len(given.inputs),
            max_tokens=bodies.parameter_limit(given.parameters),
        )


def _error_type(status: int) -> str:
    if status in _OVERLOADED:
        return "overloaded"
    return "generation" if status >= _SERVER_ERRORS else "validation"


def info_body(model: str | None, version: str) -> bytes:
    """The answer of `GET /info`: clients need `model_id`; it is empty where any model name is passed through."""
    return bodies.dump({"model_id": model or "", "model_sha": None, "router": "pd-coordinator", "version": version})


def health_body(*, ready: bool) -> bytes:
    """The answer of `GET /health`; its status tells the same."""
    return bodies.dump({"status": "ok" if ready else "unavailable"})
