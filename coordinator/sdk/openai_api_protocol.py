"""Requests and responses of the completions API under the names that MLC-LLM gives them.

Source: microserving protocol page §2 and §4. Fields that are not listed here are kept. A model dumps itself under the
names of the wire, so that `response_format.schema` never becomes `json_schema`, which engines drop (§6, defect 8).
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Shape(BaseModel):
    """What all of these have in common."""

    model_config = ConfigDict(extra="allow", populate_by_name=True, serialize_by_alias=True, protected_namespaces=())


class StreamOptions(Shape):
    """Whether a stream ends with its usage."""

    include_usage: bool | None = None


class RequestResponseFormat(Shape):
    """The grammar that the output follows."""

    type: Literal["text", "json_object"] = "text"
    json_schema: str | None = Field(default=None, alias="schema")


class DisaggConfig(Shape):
    """What the microserving endpoints set themselves."""

    kind: Literal["prepare_receive", "remote_send", "start_generation"] | None = None
    kv_append_metadata: str | None = None
    kv_window_begin: int | None = None
    kv_window_end: int | None = None
    dst_group_offset: int | None = None


class DebugConfig(Shape):
    """Engine settings of one request; must be there in microserving calls."""

    ignore_eos: bool = False
    pinned_system_prompt: bool = False
    special_request: Literal["query_engine_metrics"] | None = None
    grammar_execution_mode: Literal["constraint", "jump_forward"] = "jump_forward"
    disagg_config: DisaggConfig | None = None


class CompletionRequest(Shape):
    """A completion request. `user` is the engine's id of the request."""

    model: str | None = None
    prompt: str | list[int]
    best_of: int = 1
    echo: bool = False
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    max_tokens: int | None = None
    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    suffix: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    response_format: RequestResponseFormat | None = None
    debug_config: DebugConfig | None = None


class CompletionLogProbs(Shape):
    """Log probabilities of the tokens of a chunk."""

    text_offset: list[int] | None = None
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class CompletionResponseChoice(Shape):
    """One choice of a response, or a chunk of one."""

    finish_reason: Literal["stop", "length", "preempt"] | None = None
    index: int = 0
    logprobs: CompletionLogProbs | None = None
    text: str = ""


class CompletionUsage(Shape):
    """How many tokens it was."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    extra: dict[str, Any] | None = None


class CompletionResponse(Shape):
    """A response, or one chunk of a stream."""

    id: str = ""
    choices: list[CompletionResponseChoice] = []
    created: int = 0
    model: str | None = None
    object: str = "text_completion"
    usage: CompletionUsage | None = None
