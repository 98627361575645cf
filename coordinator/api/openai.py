"""OpenAI: chat completions, completions and the list of models."""

import re
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from msgspec import Raw

from coordinator.core.errors import BadRequest, RequestError
from coordinator.core.ports import Route
from coordinator.core.request import Ask

from . import bodies, values
from .bodies import ABSENT, Body
from .family import Family

_CHAT: Final = "/v1/chat/completions"
_ERROR_TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_SERVER_ERRORS: Final = 500
_OWNER: Final = "pd-coordinator"


class _Body(msgspec.Struct, frozen=True, gc=False):
    model: Raw = ABSENT
    messages: Raw = ABSENT
    prompt: Raw = ABSENT
    stream: Raw = ABSENT
    max_completion_tokens: Raw = ABSENT
    max_tokens: Raw = ABSENT


class _Choice(msgspec.Struct, frozen=True):
    delta: dict[str, Raw]
    finish_reason: Raw = ABSENT
    logprobs: Raw = ABSENT
    token_ids: Raw = ABSENT


class _Usage(msgspec.Struct, frozen=True):
    completion_tokens: int = 0


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice]
    usage: _Usage | None = None


_BODY: Final = msgspec.json.Decoder(_Body)
_CHUNK: Final = msgspec.json.Decoder(_Chunk)
_END: Final = re.compile(rb'^data: ?\[DONE\]|"finish_reason"\s*:\s*"', re.MULTILINE)
_NOTHING: Final = frozenset((b"", b"null", b'""', b"[]"))


class OpenAi(Family):
    """Chat and text completions; streams end with `data: [DONE]`."""

    name = "openai"
    routes: Sequence[Route] = (
        Route("POST", _CHAT, "infer"),
        Route("POST", "/v1/completions", "infer"),
        Route("GET", "/v1/models", "models"),
        Route("GET", "/v1/models/{*model}", "model"),
    )
    prefixes = ("/v1/",)
    ends_with = b"data: [DONE]\n\n"

    def claims(self, path: str, body: Body) -> bool:  # noqa: ARG002 (the same on every path)
        """Whether the body has a prompt; looked at before `parse`, which for long ones is work."""
        try:
            given = bodies.read(_BODY, body)
        except BadRequest:
            return False
        return values.given(given.prompt) or values.given(given.messages)

    def parse(self, path: str, body: Body) -> Ask:
        """Read a chat or completion request.

        Either takes `messages` or `prompt` (MindIE §2) of any shape: recompute bodies carry them as strings of token
        numbers (MindIE §6), prompts may be arrays of token ids.
        """
        given = bodies.read(_BODY, body)
        first, second = given.messages, given.prompt
        if not path.startswith(_CHAT):
            first, second = second, first
        prompt = first if values.given(first) else second
        if not values.given(prompt):
            raise BadRequest("both `messages` and `prompt` are missing")
        return Ask(
            stream=values.flag(given.stream, "stream"),
            model=values.text(given.model, "model"),
            prompt_bytes=len(prompt),
            prompt_tokens=bodies.tokens(prompt, body) if prompt is given.prompt else None,
            max_tokens=values.limit(given.max_completion_tokens, given.max_tokens),
        )

    def error_body(self, error: RequestError) -> bytes:
        """`{"error":{"message","type","param","code"}}`."""
        shape = {"message": error.message, "type": _error_type(error.status), "param": None, "code": error.code}
        return bodies.dump({"error": shape})

    def opens(self, data: bytes) -> bool:
        """True for a chunk without choices, or with a role, no content, no token and no end in every choice."""
        if b'"role"' not in data and b'"choices":[]' not in data:
            return False
        try:
            chunk = _CHUNK.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        return not (chunk.usage and chunk.usage.completion_tokens) and all(map(_opens, chunk.choices))

    def ends(self, data: bytes) -> bool:
        """Whether `[DONE]` or a finish reason is there; quotes inside of texts are escaped and look different."""
        return _END.search(data) is not None


def _opens(choice: _Choice) -> bool:
    rest = [bytes(value) for key, value in choice.delta.items() if key != "role"]
    rest += bytes(choice.finish_reason), bytes(choice.logprobs), bytes(choice.token_ids)
    return values.given(choice.delta.get("role", ABSENT)) and _NOTHING.issuperset(rest)


def _error_type(status: int) -> str:
    default = "server_error" if status >= _SERVER_ERRORS else "invalid_request_error"
    return _ERROR_TYPES.get(status, default)


def models_body(names: Iterable[str], created: int) -> bytes:
    """The answer of `GET /v1/models`; `created` in Unix seconds."""
    return bodies.dump({"object": "list", "data": [_model(name, created) for name in names]})


def model_body(name: str, created: int) -> bytes:
    """The answer of `GET /v1/models/{id}`; `created` in Unix seconds."""
    return bodies.dump(_model(name, created))


def _model(name: str, created: int) -> dict[str, object]:
    return {"id": name, "object": "model", "created": created, "owned_by": _OWNER}
