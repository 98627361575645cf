"""One attempt's work: what of the client's body goes into which call."""

from dataclasses import dataclass

import msgspec
from msgspec import Raw

from coordinator.core.errors import BadRequest
from coordinator.core.request import Request
from coordinator.engines.microserving.chat import CHAT, completion_fields
from coordinator.engines.microserving.progress import FIELD, Progress, read_progress
from coordinator.tokens import Tokenizer
from coordinator.wire.completion_stream import Reading
from coordinator.wire.events import wants_usage
from coordinator.wire.json_edit import Fields, given, is_true, items, number, object_fields, request_fields, text
from coordinator.wire.microserving import ONLY_GENERATE, OURS, debug_config

NAME = "microserving"
SPOKEN = "openai"
OWN_WORDS = frozenset({"debug_config", "ignore_eos", FIELD, *OURS})
_DROPPED = OWN_WORDS | ONLY_GENERATE
_ZERO = Raw(b"0")
_IDS = msgspec.json.Decoder(list[int])
_TOKEN_START = b"-0123456789]"


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
        return not self.several and (self.tokenizer is not None or _mark(self.fields["prompt"]) == b'"')

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
    chat = request.path.startswith(CHAT)
    if chat and alone:
        return _native_chat(request, fields, progress)
    if chat:
        fields = await completion_fields(fields, tokenizer)
    prompt = single_prompt(fields.get("prompt"))
    own, last = _own(fields)
    own["prompt"], ids = await _with_sent(prompt, progress, tokenizer, count=count)
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


def single_prompt(value: Raw | None) -> Raw:
    """The one prompt of a body: text or token ids, not empty.

    An empty one would kill the engine (§7: begin must lie below the prompt's length).

    Raises:
        BadRequest: there is none, or more than one.
    """
    if not given(value):
        raise BadRequest("`prompt` is missing")
    assert value is not None
    mark = _mark(value)
    if mark == b"[" and not _is_ids(value):
        listed = items(value) or []
        if len(listed) != 1:
            raise BadRequest("`prompt` must be one prompt: a list of prompts is not served by these engines")
        return single_prompt(listed[0])
    if mark not in (b'"', b"["):
        raise BadRequest("`prompt` must be a string or a list of token ids")
    if bytes(memoryview(value)[:2]) == b'""' or (mark == b"[" and memoryview(value)[1:64].tobytes().lstrip() == b"]"):
        raise BadRequest("`prompt` is empty")
    return value


def token_ids(value: Raw) -> list[int]:
    """A prompt of token ids; raises BadRequest."""
    try:
        return _IDS.decode(value)
    except msgspec.MsgspecError:
        raise BadRequest("`prompt` must be a string or a list of token ids") from None


def _is_ids(value: Raw) -> bool:
    """Whether a prompt is a list of token ids, be it empty."""
    head = bytes(memoryview(value)[:64])
    return head[:1] == b"[" and head[1:].lstrip()[:1] in _TOKEN_START


def _mark(value: Raw) -> bytes:
    """The first byte, by which a string or a list is known."""
    return bytes(memoryview(value)[:1])


async def _with_sent(
    prompt: Raw, progress: Progress, tokenizer: Tokenizer | None, *, count: bool
) -> tuple[Raw, int | None]:
    """The prompt of this attempt: the client's and what was generated, as token ids where they must be counted."""
    said = progress.text
    if not (said or count):
        return prompt, None
    if _is_ids(prompt):
        ids = token_ids(prompt)
        if said:
            assert tokenizer is not None, "without a tokenizer nothing goes on after token ids"
            ids = (await _with_generated(ids, said, tokenizer))[0]
        return Raw(msgspec.json.encode(ids)), len(ids)
    words = text(prompt)
    if words is None:
        raise BadRequest("`prompt` is not valid text")
    if not count:
        return Raw(msgspec.json.encode(words + said)), None
    ids = await _counted(words, said, tokenizer)
    return Raw(msgspec.json.encode(ids)), len(ids)


async def _counted(words: str, said: str, tokenizer: Tokenizer | None) -> list[int]:
    """The ids of a text and of what was generated after it."""
    if tokenizer is None:
        raise BadRequest("this model has no tokenizer here: send the prompt as token ids")
    ids = await tokenizer.encode(words, special=False)
    if not ids:
        raise BadRequest("`prompt` is empty")
    if not said:
        return ids
    longer, faithful = await _with_generated(ids, said, tokenizer)
    return longer if faithful else await tokenizer.encode(words + said, special=False)


async def _with_generated(ids: list[int], said: str, tokenizer: Tokenizer) -> tuple[list[int], bool]:
    """The ids of a prompt and of what was generated after it, and whether they stand for just this text.

    Encoded by itself the generated text begins where its first token began. Some tokenizers put a space in front.
    """
    more = await tokenizer.encode(said, special=False)
    text_of = tokenizer.detokenizer(ids)
    return ids + more, text_of.push(more) + text_of.end() == said


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


def _check_last(last: Fields) -> None:
    """What prep_recv never sees must not be refused after it: decode would keep its reservation."""
    if given(last.get("suffix")) and text(last["suffix"]) is None:
        raise BadRequest("`suffix` must be a string")
    if given(last.get("echo")) and bytes(last["echo"]) not in (b"true", b"false"):
        raise BadRequest("`echo` must be true or false")
    if given(last.get("stream_options")) and object_fields(last["stream_options"]) is None:
        raise BadRequest("`stream_options` must be an object")
