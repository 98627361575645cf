"""MindIE's own routes: text or token ids in, and the tokenizer."""

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Raw

from coordinator.core.errors import BadRequest
from coordinator.core.ports import Route
from coordinator.core.request import Ask

from . import bodies, values
from .bodies import ABSENT, Body
from .tgi import TextGeneration

_TOKENIZER: Final = "/v1/tokenizer"


class _Body(msgspec.Struct, frozen=True, gc=False):
    inputs: Raw = ABSENT
    input_id: Raw = ABSENT
    stream: Raw = ABSENT
    parameters: Raw = ABSENT


_BODY: Final = msgspec.json.Decoder(_Body)


class Mindie(TextGeneration):
    """`/infer`, `/infer_token` and `/v1/tokenizer`; errors look like TGI's (MindIE §3.2)."""

    name = "mindie"
    routes: Sequence[Route] = (
        Route("POST", "/infer", "infer"),
        Route("POST", "/infer_token", "infer"),
        Route("POST", _TOKENIZER, "tokenize"),
    )
    prefixes = ("/infer",)

    def parse(self, path: str, body: Body) -> Ask:
        """Read a request with exactly one of `inputs` and `input_id` (MindIE §2).

        `/infer_token` takes `input_id` alone, but a recompute body always carries `inputs` (MindIE §6).
        """
        given = bodies.read(_BODY, body)
        if path.startswith(_TOKENIZER):
            return Ask(stream=False, model=None, prompt_bytes=len(values.prompt(given.inputs, "inputs")))
        by_text, by_tokens = values.given(given.inputs), values.given(given.input_id)
        if by_text == by_tokens:
            problem = "both are given" if by_text else "both are missing"
            raise BadRequest(f"the body needs either `inputs` or `input_id`: {problem}")
        prompt = given.inputs if by_text else given.input_id
        return Ask(
            stream=values.flag(given.stream, "stream"),
            model=None,
            prompt_bytes=len(prompt),
            prompt_tokens=None if by_text else bodies.tokens(prompt, body),
            max_tokens=bodies.parameter_limit(given.parameters),
        )
