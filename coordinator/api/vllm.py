"""vLLM's own `/generate`: stream pieces are JSON documents, each ended by a NUL."""

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Raw

from coordinator.core.errors import RequestError
from coordinator.core.ports import Route
from coordinator.core.request import Ask

from . import bodies, values
from .bodies import ABSENT, Body
from .family import Family

_NO_ADAPTER: Final = "None"


class _Body(msgspec.Struct, frozen=True, gc=False):
    prompt: Raw = ABSENT
    model: Raw = ABSENT
    stream: Raw = ABSENT
    max_tokens: Raw = ABSENT


_BODY: Final = msgspec.json.Decoder(_Body)


class Vllm(Family):
    """`/generate` with `prompt`; the path is shared with TGI."""

    name = "vllm"
    routes: Sequence[Route] = (Route("POST", "/generate", "infer"),)

    def claims(self, path: str, body: Body) -> bool:  # noqa: ARG002 (one path only)
        """Whether the body has `prompt`."""
        return bodies.has(_BODY, body, "prompt")

    def parse(self, path: str, body: Body) -> Ask:  # noqa: ARG002 (one path only)
        """Read a request with `prompt`.

        The model "None" counts as none: recompute bodies name the LoRA adapter there, and so the lack of one
        (MindIE §6).
        """
        given = bodies.read(_BODY, body)
        prompt = values.prompt(given.prompt, "prompt")
        model = values.text(given.model, "model")
        return Ask(
            stream=values.flag(given.stream, "stream"),
            model=None if model == _NO_ADAPTER else model,
            prompt_bytes=len(prompt),
            prompt_tokens=bodies.tokens(prompt, body),
            max_tokens=values.limit(given.max_tokens),
        )

    def error_event(self, error: RequestError) -> bytes:
        """The same, ended by a NUL as every piece of these streams."""
        return self.error_body(error) + b"\x00"
