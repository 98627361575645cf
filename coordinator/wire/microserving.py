"""Bodies of the MLC microserving calls, and what is read of their answers.

Sources: microserving protocol page §2 (common body), §3 (the three calls), §3.2 (metadata), §4 (answers), §7 (errors).
"""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from msgspec import Raw

from .json_edit import Fields, object_fields, write_fields

PREPARE = "/microserving/prep_recv"
SEND = "/microserving/remote_send"
GENERATE = "/microserving/start_generate"
COMPLETIONS = "/v1/completions"

OURS = frozenset({"user", "begin", "end", "kv_addr_info", "recv_rank"})
"""Fields that only the coordinator sets; a client's are never passed on."""
ONLY_GENERATE = frozenset({"stream", "stream_options", "echo", "suffix"})
"""Fields that go to start_generate alone: prep_recv and remote_send refuse `suffix`, and answer in one piece."""
ONLY_DECODE = frozenset({"n", "best_of"})
"""Fields that mean nothing to prefill, which never samples."""
KEPT_DEBUG = ("ignore_eos", "grammar_execution_mode")
"""Keys of a client's `debug_config` that say how to generate; the others would steer the engine itself."""

MAX_METADATA_CHARS = 16 << 20
_TRUE = Raw(b"true")


class _Prepared(msgspec.Struct, frozen=True, gc=False):
    kv_append_metadata: str
    prefix_matched_length: int


_PREPARED = msgspec.json.Decoder(_Prepared)
_NUMBERS = msgspec.json.Decoder(list[int])


@dataclass(frozen=True, slots=True)
class Prepared:
    """What decode answers to prep_recv: where it wants the KV, and how much of it.

    Attributes:
        metadata: base64, to be passed on as it is.
        prefix: tokens of the prompt that it has cached.
        missing: tokens whose KV has to come from prefill; with `prefix` they make the window.
    """

    metadata: str
    prefix: int
    missing: int

    @property
    def window(self) -> int:
        """The end of the window, counted from the prompt's start."""
        return self.prefix + self.missing


def read_prepared(body: bytes) -> Prepared:
    """Read decode's answer to prep_recv.

    Raises:
        ValueError: it is not what the protocol asks for, in a sentence.
    """
    try:
        answer = _PREPARED.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"prep_recv's answer cannot be read: {error}") from error
    if answer.prefix_matched_length < 0:
        raise ValueError("prefix_matched_length is negative")
    lengths = window_lengths(answer.kv_append_metadata)
    if len(set(lengths)) > 1:
        raise ValueError("kv_append_metadata has windows of different lengths for its models")
    return Prepared(answer.kv_append_metadata, answer.prefix_matched_length, lengths[0])


def window_lengths(metadata: str) -> list[int]:
    """The tokens that each model of the engine wants: one number per model (speculative decoding has several).

    The metadata is base64 of a JSON array: for each model the number of segments, then start slot and length of each.

    Raises:
        ValueError: it is anything else.
    """
    if len(metadata) > MAX_METADATA_CHARS:
        raise ValueError("kv_append_metadata is too long")
    try:
        numbers = _NUMBERS.decode(base64.b64decode(metadata, validate=True))
    except (binascii.Error, ValueError, RecursionError) as error:
        raise ValueError(f"kv_append_metadata cannot be read: {error}") from error
    if not numbers or min(numbers) < 0:
        raise ValueError("kv_append_metadata is empty or has a negative number")
    lengths, at = [], 0
    while at < len(numbers):
        start, at = at + 1, at + 1 + 2 * numbers[at]
        if at > len(numbers):
            raise ValueError("kv_append_metadata ends within a segment")
        lengths.append(sum(numbers[start + 1 : at : 2]))
    return lengths


# --- bodies


def prepare_body(fields: Fields, user: str, end: int) -> bytes:
    """The body of prep_recv. `fields`: prompt and parameters of generation, none of ONLY_GENERATE."""
    return write_fields({**fields, "user": _text(user), "end": _number(end)})


def send_body(fields: Fields, user: str, prepared: Prepared, end: int, rank: int) -> bytes:
    """The body of remote_send: the rest of the window, to the PEs that begin with `rank`."""
    kept = {name: value for name, value in fields.items() if name not in ONLY_DECODE}
    return write_fields(
        {
            **kept,
            "user": _text(user),
            "begin": _number(prepared.prefix),
            "end": _number(end),
            "kv_addr_info": _text(prepared.metadata),
            "recv_rank": _number(rank),
        }
    )


def generate_body(fields: Fields, last: Fields, user: str, begin: int) -> bytes:
    """The body of start_generate. `last`: those of ONLY_GENERATE."""
    return write_fields({**fields, **last, "user": _text(user), "begin": _number(begin)})


def free_body(fields: Fields, user: str, begin: int) -> bytes:
    """The body of the start_generate that frees a reservation: a stream, so that leaving it is noticed at once (§8)."""
    return write_fields({**fields, "stream": _TRUE, "user": _text(user), "begin": _number(begin)})


def plain_body(fields: Fields, last: Fields, user: str) -> bytes:
    """The body of a completion that one engine serves alone."""
    return write_fields({**fields, **last, "user": _text(user)})


def debug_config(given: Raw | None, ignore_eos: Raw | None = None) -> Raw:
    """The `debug_config` to send: an object in any case (§2), with what a client may say about generation.

    `ignore_eos`: the same wish as other engines' clients write it, at the top of the body.
    """
    fields = object_fields(given) or {}
    kept = {name: fields[name] for name in KEPT_DEBUG if name in fields}
    if ignore_eos is not None and bytes(ignore_eos) == b"true":
        kept["ignore_eos"] = _TRUE
    return Raw(write_fields(kept))


def _text(value: str) -> Raw:
    return Raw(msgspec.json.encode(value))


def _number(value: int) -> Raw:
    return Raw(b"%d" % value)


# --- refusals


def plain_refusal(body: bytes) -> bytes:
    """An error body in one of the usual shapes: the engine wraps its JSON in a JSON string (400) or lists places (422).

    Anything else is returned as it is.
    """
    try:
        value = msgspec.json.decode(body)
        if isinstance(value, str) and value.lstrip().startswith("{"):
            value = msgspec.json.decode(value)
            return msgspec.json.encode(value)
        if isinstance(value, Mapping) and isinstance(value.get("detail"), list):
            return msgspec.json.encode({"message": "; ".join(map(_place, value["detail"])) or "refused"})
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        pass
    return body


def _place(problem: object) -> str:
    """One entry of FastAPI's list: where it is, and what is wrong there."""
    if not isinstance(problem, Mapping):
        return str(problem)
    place = problem.get("loc")
    where = ".".join(str(step) for step in place if step != "body") if isinstance(place, list) else ""
    what = str(problem.get("msg", "is wrong"))
    return f"{where}: {what}" if where else what
