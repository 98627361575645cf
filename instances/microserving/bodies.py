"""Request bodies, checked as MLC's server checks them: by models, with FastAPI's answers (protocol page §2, §3)."""

import json
from typing import Any, Literal, Self, TypeVar

from aiohttp import web
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from instances.microserving.refusal import Refused

_MOST_LOGPROBS, _MOST_CHAT_LOGPROBS = 5, 20
_PENALTY, _BIAS = 2, 100
_Body = TypeVar("_Body", bound=BaseModel)


class DisaggConfig(BaseModel):
    """`debug_config.disagg_config`."""

    kind: Literal["prepare_receive", "remote_send", "start_generation"] | None = None
    kv_append_metadata: str | None = None
    kv_window_begin: int | None = None
    kv_window_end: int | None = None
    dst_group_offset: int | None = None


class DebugConfig(BaseModel):
    """`debug_config`."""

    ignore_eos: bool = False
    pinned_system_prompt: bool = False
    special_request: Literal["query_engine_metrics"] | None = None
    grammar_execution_mode: Literal["constraint", "jump_forward"] = "jump_forward"
    disagg_config: DisaggConfig | None = None


class StreamOptions(BaseModel):
    """`stream_options`."""

    include_usage: bool | None


class ResponseFormat(BaseModel):
    """`response_format`."""

    type: Literal["text", "json_object"] = "text"
    json_schema: str | None = Field(default=None, alias="schema")


class _Shared(BaseModel):
    """What completions and chat have in common."""

    model: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    max_tokens: int | None = None
    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    debug_config: DebugConfig | None = None

    @field_validator("frequency_penalty", "presence_penalty")
    @classmethod
    def _penalty(cls, value: float | None) -> float | None:
        if value and abs(value) > _PENALTY:
            raise ValueError("Penalty value should be in range [-2, 2].")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _bias(cls, value: dict[int, float] | None) -> dict[int, float] | None:
        for token, bias in (value or {}).items():
            if abs(bias) > _BIAS:
                raise ValueError(
                    f"Logit bias value should be in range [-100, 100], while value {bias} is given for token id {token}"
                )
        return value

    @property
    def usage_wanted(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop texts."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class Completion(_Shared):
    """`POST /v1/completions`, and the base of the three calls."""

    prompt: str | list[int]
    best_of: int = 1
    echo: bool = False
    logprobs: int | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _logprobs(self) -> Self:
        if self.logprobs is not None and not 0 <= self.logprobs <= _MOST_LOGPROBS:
            raise ValueError(f'"logprobs" must be in range [0, {_MOST_LOGPROBS}]')
        return self


class PrepRecv(Completion):
    """`POST /microserving/prep_recv`."""

    end: int


class RemoteSend(Completion):
    """`POST /microserving/remote_send`."""

    begin: int
    end: int
    kv_addr_info: str
    recv_rank: int


class StartGenerate(Completion):
    """`POST /microserving/start_generate`."""

    begin: int


class Message(BaseModel):
    """One message of a chat."""

    content: str | list[dict[str, Any]] | None = None
    role: Literal["system", "user", "assistant", "tool"]

    @property
    def text(self) -> str:
        """Its text, parts joined."""
        if isinstance(self.content, list):
            return "".join(str(part.get("text", "")) for part in self.content)
        return self.content or ""


class Chat(_Shared):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    logprobs: bool = False
    top_logprobs: int = 0

    @model_validator(mode="after")
    def _logprobs(self) -> Self:
        if not 0 <= self.top_logprobs <= _MOST_CHAT_LOGPROBS:
            raise ValueError(f'"top_logprobs" must be in range [0, {_MOST_CHAT_LOGPROBS}]')
        if not self.logprobs and self.top_logprobs > 0:
            raise ValueError('"logprobs" must be True to support "top_logprobs"')
        return self

    @model_validator(mode="after")
    def _stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream must be set to True when stream_options is present")
        return self

    @property
    def text(self) -> str:
        """The messages under a plain chat template."""
        return "".join(f"{message.role}: {message.text}\n" for message in self.messages) + "assistant:"


def _invalid(**problem: Any) -> Refused:
    return Refused(422, "the body is not valid", [problem])


async def read(request: web.Request, kind: type[_Body]) -> _Body:
    """The body as `kind`; raises Refused (422)."""
    raw = await request.read()
    if not raw:
        raise _invalid(type="missing", loc=["body"], msg="Field required", input=None)
    value: Any = raw.decode("utf-8", "replace")
    if request.content_type.endswith("json") or "Content-Type" not in request.headers:
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError) as wrong:
            at, why = getattr(wrong, "pos", 0), getattr(wrong, "msg", "not readable")
            raise _invalid(
                type="json_invalid", loc=["body", at], msg="JSON decode error", input={}, ctx={"error": why}
            ) from None
    if not isinstance(value, dict):
        said = "Input should be a valid dictionary or object to extract fields from"
        raise _invalid(type="model_attributes_type", loc=["body"], msg=said, input=value)
    try:
        return kind.model_validate(value)
    except ValidationError as wrong:
        detail = [
            {**error, "loc": ["body", *error["loc"]], **({"ctx": _shown(error["ctx"])} if "ctx" in error else {})}
            for error in wrong.errors(include_url=False)
        ]
        raise Refused(422, "the body is not valid", detail) from None


def _shown(context: dict[str, Any]) -> dict[str, Any]:
    """FastAPI shows an exception as an empty object."""
    return {name: {} if isinstance(value, Exception) else value for name, value in context.items()}
