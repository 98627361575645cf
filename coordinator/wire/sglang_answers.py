"""Answers of SGLang engines: prefill's failures behind a 200, whom a failure blames, logprobs that only prefill has.

Sources: SGLang protocol page §4 (failures), §5 (logprobs); messages of engines as their logs and users quote them.
"""

import re
from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Raw

from .events import ErrorEvent, find_error
from .json_edit import Fields, given, items, number, object_fields, read_fields, write_fields
from .refusal import message_of

# Only prefill runs the prompt, so only prefill has these (protocol page §5).
LOGPROBS: Final = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")
META: Final = "meta_info"
MAX_HELD_BYTES: Final = 8 << 20

PromptLogprobs = Mapping[int, Fields]
"""By number of the sequence: those of LOGPROBS that prefill has told, as they were written."""

_DATA: Final = b"data:"
_MAY_TELL: Final = b'"meta_info"'
_ABORTED: Final = re.compile(rb'"finish_reason"\s*:\s*(?:"abort"|\{"type"\s*:\s*"abort"[^}]*)')
_ERROR_BODY: Final = re.compile(rb'\s*\{\s*(?:"error"\s*:\s*[{"]|"object"\s*:\s*"error")')
_PEER: Final = re.compile(r"AbortReq|KVTransferError|KVPoll|(?:could|might) be dead", re.IGNORECASE)
_EMPTY_ARRAY: Final = re.compile(rb"\[\s*\]\s*")


def failure_in(body: bytes, *, stream: bool) -> ErrorEvent | None:
    """The failure that prefill tells behind a 200: an error event, an error body, or a request that was aborted."""
    error = find_error(body) if stream else None
    if error is None and not stream and _ERROR_BODY.match(body) is not None:
        error = ErrorEvent(0, message_of(body, 0))
    if error is None:
        aborted = _ABORTED.search(body)
        error = aborted and ErrorEvent(aborted.start(), aborted[0].decode("utf-8", "replace"))
    return error


def blames_peer(message: str) -> bool:
    """Whether an engine's message says that the hand-over failed, for which it or the other side may be guilty.

    Prefill says so after waiting for decode in vain, and decode after prefill is gone (protocol page §1, §4).
    """
    return _PEER.search(message) is not None


def prompt_logprobs(body: bytes, *, stream: bool) -> PromptLogprobs:
    """What prefill's answer to `/generate` tells of the prompt; nothing where it cannot be read."""
    found: dict[int, Fields] = {}
    if stream:
        for line in body.splitlines():
            if line.startswith(_DATA) and _MAY_TELL in line:
                _note(found, None, Raw(line[len(_DATA) :]))
    elif body.lstrip()[:1] == b"[":
        for at, answer in enumerate(items(Raw(body)) or ()):
            _note(found, at, answer)
    else:
        _note(found, 0, Raw(body))
    return found


def _note(found: dict[int, Fields], at: int | None, answer: Raw) -> None:
    fields = object_fields(answer) or {}
    meta = object_fields(fields.get(META)) or {}
    told = {name: meta[name] for name in LOGPROBS if _tells(meta.get(name))}
    if told:
        found.setdefault(_index(fields) if at is None else at, told)


def _index(fields: Fields) -> int:
    """The number of the sequence that a stream's event is about."""
    return int(number(fields.get("index")) or 0)


def _tells(value: Raw | None) -> bool:
    return value is not None and given(value) and not (len(value) < 16 and _EMPTY_ARRAY.fullmatch(value))


def _joined(fields: Fields, told: Fields) -> Fields:
    meta = object_fields(fields.get(META))
    missing = {name: value for name, value in told.items() if meta is not None and not _tells(meta.get(name))}
    if meta is None or not missing:
        return fields
    return {**fields, META: Raw(write_fields({**meta, **missing}))}


def with_logprobs(body: bytes, prompts: PromptLogprobs) -> bytes:
    """Decode's whole answer, or list of answers, with the prompt's logprobs; as it was where it cannot be read."""
    if not prompts:
        return body
    if body.lstrip()[:1] != b"[":
        try:
            return write_fields(_joined(read_fields(body), prompts.get(0, {})))
        except ValueError:
            return body
    answers = items(Raw(body)) or []
    several = [object_fields(answer) for answer in answers]
    if not (several and all(several)):
        return body
    joined = [Raw(write_fields(_joined(fields or {}, prompts.get(at, {})))) for at, fields in enumerate(several)]
    return msgspec.json.encode(joined)


class LogprobsEditor:
    """Puts the prompt's logprobs into the events of decode's stream; only a line that is not whole is held back."""

    __slots__ = ("_held", "_prompts")

    def __init__(self, prompts: PromptLogprobs) -> None:
        self._prompts = prompts
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Take stream bytes; returns those that can go on, edited."""
        data = self._held + data
        cut = data.rfind(b"\n") + 1
        if len(data) - cut > MAX_HELD_BYTES:
            cut = len(data)
        self._held = data[cut:]
        return b"".join(map(self._edited, data[:cut].splitlines(keepends=True)))

    def rest(self) -> bytes:
        """What is held back at the end of the stream."""
        held, self._held = self._held, b""
        return held

    def _edited(self, line: bytes) -> bytes:
        if not line.startswith(_DATA) or _MAY_TELL not in line:
            return line
        body = line[len(_DATA) :]
        try:
            fields = read_fields(body)
        except ValueError:
            return line
        end = body[len(body.rstrip()) :]
        return b"data: " + write_fields(_joined(fields, self._prompts.get(_index(fields), {}))) + end


class _Usage(msgspec.Struct, frozen=True, gc=False):
    prompt_tokens_details: dict[str, Raw] | None = None


class _Answer(msgspec.Struct, frozen=True, gc=False):
    usage: _Usage | None = None


_ANSWER: Final = msgspec.json.Decoder(_Answer)
_CACHED: Final = "cached_tokens"


def cached_tokens(body: bytes, *, stream: bool) -> Raw | None:
    """The prompt tokens that prefill found in its cache, as JSON text, out of an OpenAI answer; None if not told."""
    if body.find(b'"cached_tokens"') < 0:  # in less time than `in`
        return None
    parts = [body]
    if stream:
        parts = [line[len(_DATA) :] for line in body.splitlines() if line.startswith(_DATA) and b'"usage"' in line]
    for part in reversed(parts):
        try:
            usage = _ANSWER.decode(part).usage
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        details = usage.prompt_tokens_details if usage is not None else None
        told = details.get(_CACHED) if details is not None else None
        if told is not None and number(told) is not None:
            return told
    return None


def bootstrap_port(body: bytes) -> int | None:
    """`disaggregation_bootstrap_port` of `/get_server_info` (protocol page §7); None where it is not told."""
    try:
        port = number(read_fields(body).get("disaggregation_bootstrap_port"))
    except ValueError:
        return None
    return int(port) if port is not None and 1 <= port <= 65535 else None
