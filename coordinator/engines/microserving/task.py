"""One attempt's work: what of the client's body goes into which call."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from msgspec import Raw

from coordinator.api.generation import MOST_CHOICES, MOST_TEMPERATURE
from coordinator.core.errors import BadRequest
from coordinator.core.request import Request
from coordinator.engines.microserving.chat import CHAT, completion_fields
from coordinator.engines.microserving.progress import FIELD, Progress, read_progress
from coordinator.engines.microserving.prompts import check_ids, is_text, single_prompt, with_sent
from coordinator.tokens import Tokenizer
from coordinator.wire.completion_stream import Reading
from coordinator.wire.events import wants_usage
from coordinator.wire.json_edit import Fields, given, is_true, number, object_fields, request_fields, text
from coordinator.wire.microserving import ONLY_GENERATE, OURS, debug_config

NAME = "microserving"
SPOKEN = "openai"
OWN_WORDS = frozenset({"debug_config", "ignore_eos", FIELD, *OURS})
_DROPPED = OWN_WORDS | ONLY_GENERATE
_ZERO = Raw(b"0")
_NUMBER = msgspec.json.Decoder(int | float | None)
_RANGES: Mapping[str, tuple[float, float]] = {
    "n": (1, MOST_CHOICES),
    "temperature": (0, MOST_TEMPERATURE),
    "top_p": (0, 1),
    "seed": (-(2**63), 2**63 - 1),
}


@dataclass(frozen=True, slots=True)
class Task:
    """What one attempt has to do.

    Attributes:
        given: the client's fields, to go on with them after a preempt.
        fields: prompt and parameters, the same in every call.
        last: what goes to start_generate alone.
        progress: how far earlier attempts have come.
        stream: whether the client wants a stream.
        chat: whether it wants the shapes of chat.
        prompt_tokens: length of `fields["prompt"]` where it was counted.
        several: more than one choice, or output bound to a grammar: what was begun cannot go on elsewhere.
        tokenizer: the model's, if it has one.
        hide_logprobs: they were asked for only to count tokens.
    """

    given: Fields
    fields: Fields
    last: Fields
    progress: Progress
    stream: bool
    chat: bool
    prompt_tokens: int | None
    several: bool
    tokenizer: Tokenizer | None
    hide_logprobs: bool

    @property
    def goes_on(self) -> bool:
        """Whether what was begun can go on elsewhere."""
        return not self.several and (self.tokenizer is not None or is_text(self.fields["prompt"]))

    @property
    def spent(self) -> bool:
        """Whether all of `max_tokens` was generated before the request was preempted."""
        limit = number(self.fields.get("max_tokens"))
        return self.progress.started and limit is not None and limit <= 0

    def reading(self, wire_id: str) -> Reading:
        """How this attempt's stream is edited."""
        return Reading(
            wire_id,
            self.progress.client_id,
            before=self.progress.before,
            keep=self.stream and not self.several,
            hide=self.hide_logprobs,
            echo=is_true(self.last.get("echo")),
        )


def body_fields(request: Request) -> Fields:
    """The outermost fields of a client's body; raises BadRequest."""
    if request.api != SPOKEN:
        raise BadRequest(
            f"the engines behind this coordinator do not speak the {request.api} API: use /v1/chat/completions or "
            "/v1/completions"
        )
    try:
        return request_fields(request)
    except ValueError as error:
        raise BadRequest("the body must be a JSON object with plain names", detail=str(error)) from None


def progress_of(request: Request, fields: Fields, fresh_id: str) -> Progress:
    """How far a request has come; `fresh_id` becomes the answer's id of one that has just come."""
    known = read_progress(fields) if request.wire_id else None
    prefix = "chatcmpl" if request.path.startswith(CHAT) else "cmpl"
    return known if known is not None else Progress(f"{prefix}-{fresh_id}")


async def make_task(
    request: Request,
    fields: Fields,
    progress: Progress,
    tokenizer: Tokenizer | None,
    *,
    count: bool = False,
    alone: bool = False,
) -> Task:
    """Read a client's body.

    Args:
        request: whose body it is.
        fields: its outermost fields.
        progress: how far it has come.
        tokenizer: the model's, if it has one.
        count: the prompt must go out as token ids, for its length decides who prefills what.
        alone: one engine serves: a chat stays one, and nothing tells the length of a prompt.

    Raises:
        BadRequest: it cannot be served, in plain words.
    """
    fields = _checked(fields)
    chat = request.path.startswith(CHAT)
    if chat and alone:
        return _native_chat(request, fields, progress)
    if chat:
        fields = await completion_fields(fields, tokenizer)
    prompt = single_prompt(fields.get("prompt"))
    check_ids(prompt, tokenizer)
    own, last = _own(fields)
    own["prompt"], ids = await with_sent(prompt, progress.text, tokenizer, count=count)
    several = (number(fields.get("n")) or 1) > 1 or _has_grammar(fields.get("response_format"))
    limited = _with_limit(own, last, progress)
    must_count = given(limited.get("max_tokens")) or (alone and wants_usage(last.get("stream_options")))
    hide = request.ask.stream and not several and tokenizer is None and must_count and not given(own.get("logprobs"))
    if hide:
        limited["logprobs"] = _ZERO
    return Task(
        given={**fields, "prompt": prompt},
        fields=limited,
        last=last,
        progress=progress,
        stream=request.ask.stream,
        chat=chat,
        prompt_tokens=ids,
        several=several,
        tokenizer=tokenizer,
        hide_logprobs=hide,
    )


def _native_chat(request: Request, fields: Fields, progress: Progress) -> Task:
    """A chat for an engine's own chat endpoint, which knows no preempt."""
    own = {name: value for name, value in fields.items() if name not in OWN_WORDS}
    own["debug_config"] = debug_config(fields.get("debug_config"), fields.get("ignore_eos"))
    return Task(
        given=fields,
        fields=own,
        last={},
        progress=progress,
        stream=request.ask.stream,
        chat=True,
        prompt_tokens=None,
        several=True,
        tokenizer=None,
        hide_logprobs=False,
    )


def _own(fields: Fields) -> tuple[Fields, Fields]:
    """What goes into every call, and what into the last one alone."""
    last = {name: value for name, value in fields.items() if name in ONLY_GENERATE}
    _check_last(last)
    own = {name: value for name, value in fields.items() if name not in _DROPPED}
    own["debug_config"] = debug_config(fields.get("debug_config"), fields.get("ignore_eos"))
    return own, last


def _with_limit(own: Fields, last: Fields, progress: Progress) -> Fields:
    """The fields with what is left of `max_tokens`; nothing is echoed twice."""
    if progress.started:
        last.pop("echo", None)
    limit = number(own.get("max_tokens"))
    if limit is None or not progress.started:
        return own
    return {**own, "max_tokens": Raw(b"%d" % (int(limit) - (progress.tokens or 0)))}


def _has_grammar(value: Raw | None) -> bool:
    kind = text((object_fields(value) or {}).get("type"))
    return kind not in (None, "text")


def _checked(fields: Fields) -> Fields:
    """The fields that are given, for the engine refuses null for some; raises BadRequest."""
    found = {name: value for name, value in fields.items() if given(value)}
    _check_ranges(found)
    return found


def _check_ranges(fields: Fields) -> None:
    """Refuse numbers that the engine asserts (its pydantic models do not): its 500 would look like its own failure.

    What is no number at all is refused by the engine itself, in its own words.
    """
    for name, (least, most) in _RANGES.items():
        value = fields.get(name)
        try:
            found = _NUMBER.decode(value) if value is not None else None
        except msgspec.MsgspecError:
            continue
        if found is not None and not least <= found <= most:
            raise BadRequest(f"`{name}` must be from {least} to {most}")


def _check_last(last: Fields) -> None:
    """What prep_recv never sees must not be refused after it: decode would keep its reservation."""
    if given(last.get("suffix")) and text(last["suffix"]) is None:
        raise BadRequest("`suffix` must be a string")
    if given(last.get("echo")) and bytes(last["echo"]) not in (b"true", b"false"):
        raise BadRequest("`echo` must be true or false")
    if given(last.get("stream_options")) and object_fields(last["stream_options"]) is None:
        raise BadRequest("`stream_options` must be an object")
