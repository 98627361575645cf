"""Text completions in the shapes of chat completions: the prompt was a chat, rendered by the model's template."""

from collections.abc import Mapping

import msgspec
from msgspec import Raw

from .completion_stream import CompletionEditor, Reading, edited, split_events, with_usage
from .json_edit import Fields, items, number, object_fields, read_fields, text, write_fields

_CHUNK = Raw(b'"chat.completion.chunk"')
_WHOLE = Raw(b'"chat.completion"')
_NULL = Raw(b"null")


class _Logprobs(msgspec.Struct, frozen=True, gc=False):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[Mapping[str, float] | None] | None = None


_LOGPROBS = msgspec.json.Decoder(_Logprobs)


class ChatEditor(CompletionEditor):
    """A stream of text completions as a stream of chat chunks.

    Args:
        reading: what to do with it.
        greeted: choices whose role has been told already, by an earlier attempt.
    """

    def __init__(self, reading: Reading, greeted: bool) -> None:  # noqa: FBT001  # one fact of two
        super().__init__(reading)
        self._greeted = {0} if greeted else set[int]()

    def feed(self, data: bytes) -> bytes:
        """Take whole events; returns those that go on, as chat chunks."""
        ready = super().feed(data)
        return b"".join(edited(event, self._chunk) for event in split_events(ready))

    def _chunk(self, fields: Fields) -> Fields:
        if "error" in fields or "choices" not in fields:
            return fields
        choices = [Raw(write_fields(self._delta(choice))) for choice in items(fields["choices"]) or []]
        return {**fields, "object": _CHUNK, "choices": Raw(msgspec.json.encode(choices))}

    def _delta(self, choice: Raw) -> Fields:
        inner = object_fields(choice) or {}
        index = int(number(inner.get("index")) or 0)
        said = text(inner.get("text")) or ""
        delta: dict[str, str] = {}
        if index not in self._greeted:
            self._greeted.add(index)
            delta = {"role": "assistant", "content": said}
        elif said:
            delta = {"content": said}
        return {
            "index": Raw(b"%d" % index),
            "delta": Raw(msgspec.json.encode(delta)),
            "logprobs": chat_logprobs(inner.get("logprobs")),
            "finish_reason": inner.get("finish_reason", _NULL),
        }


def chat_answer(fields: Fields) -> Fields:
    """A whole text completion as a chat completion."""
    choices = [Raw(write_fields(_message(choice))) for choice in items(fields.get("choices")) or []]
    return {**fields, "object": _WHOLE, "choices": Raw(msgspec.json.encode(choices))}


def _message(choice: Raw) -> Fields:
    inner = object_fields(choice) or {}
    message = {"role": "assistant", "content": text(inner.get("text")) or ""}
    return {
        "index": inner.get("index", Raw(b"0")),
        "message": Raw(msgspec.json.encode(message)),
        "logprobs": chat_logprobs(inner.get("logprobs")),
        "finish_reason": inner.get("finish_reason", _NULL),
    }


def chat_logprobs(value: Raw | None) -> Raw:
    """Log probabilities in the shape of chat: `{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}`."""
    try:
        given = _LOGPROBS.decode(value) if value is not None else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        given = None
    if given is None:
        return _NULL
    pairs = list(zip(given.tokens, given.token_logprobs, strict=False))
    tops = [*(given.top_logprobs or ()), *[None] * len(pairs)]
    content = [
        {**_entry(token, logprob), "top_logprobs": [_entry(*pair) for pair in (top or {}).items()]}
        for (token, logprob), top in zip(pairs, tops, strict=False)
    ]
    return Raw(msgspec.json.encode({"content": content}))


def _entry(token: str, logprob: float | None) -> dict[str, object]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", "replace"))}


def whole_answer(body: bytes, reading: Reading, *, chat: bool) -> tuple[bytes, bool]:
    """A whole text completion for the client, and whether the engine has given the request back instead.

    Raises:
        ValueError: it is no completion, or one that has not come to its end.
    """
    fields = read_fields(body)
    choices = [object_fields(choice) for choice in items(fields.get("choices")) or []]
    if not choices or None in choices:
        raise ValueError("the answer has no choices")
    ends = [text((choice or {}).get("finish_reason")) for choice in choices]
    if "preempt" in ends:
        return b"", True
    if None in ends:
        raise ValueError("the answer has no finish reason")
    fields = with_usage(fields, reading.before)
    fields["id"] = Raw(msgspec.json.encode(reading.client_id))
    return write_fields(chat_answer(fields) if chat else fields), False


def last_chunk(
    client_id: str, model: str | None, *, suffix: str, counts: tuple[int, int] | None, chat: bool, created_s: int
) -> bytes:
    """The end of a stream whose tokens are all there, up to `[DONE]`.

    Args:
        client_id: the answer's id.
        model: as the client named it.
        suffix: text that a completion ends with.
        counts: tokens of prompt and completion, for a chunk of usage; None: no such chunk.
        chat: the shapes of chat.
        created_s: Unix seconds.
    """
    said: dict[str, object] = {"delta": {}} if chat else {"text": suffix}
    shape: dict[str, object] = {
        "id": client_id,
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": created_s,
        "model": model,
        "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": "length"}],
    }
    events = [shape]
    if counts is not None:
        prompt, completion = counts
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        events.append({**shape, "choices": [], "usage": usage})
    return b"".join(b"data: %b\n\n" % msgspec.json.encode(event) for event in events)
