"""Request bodies of the SGLang bootstrap protocol: rooms, and what a client may not say about them.

Sources: SGLang protocol page §1 (triple, arrays for batches and n > 1), §2 (rank = room % dp_size).
"""

import re
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Raw

from coordinator.core.body import RequestBody

from .json_edit import (
    BLANKS_BYTES,
    NO_LISTS,
    ONE_GO_BYTES,
    Fields,
    Lists,
    given,
    is_true,
    items,
    number,
    object_fields,
    request_items,
    write_body,
)

HOST: Final = "bootstrap_host"
PORT: Final = "bootstrap_port"
ROOM: Final = "bootstrap_room"
# What steers the transfer, the choice of a rank or another request's state: a client has no say in it.
CONTROL: Final = frozenset(
    (
        HOST, PORT, ROOM, "bootstrap_pair_key", "decode_tp_size", "routed_dp_rank", "data_parallel_rank",
        "disagg_prefill_dp_rank", "rid", "http_worker_ipc",
    )
)  # fmt: skip
PROMPTS: Final = ("text", "input_ids", "input_embeds")  # SGLang takes the first that is given
VECTORS: Final = PROMPTS[2]  # one prompt is an array of arrays there
MAX_SEQUENCES: Final = 16384

_ROOM_BITS: Final = 63
_ROOMS: Final = (1 << _ROOM_BITS) - 1
_BATCH: Final = re.compile(rb'\s*\[\s*["\[]')
_BATCH_OF_VECTORS: Final = re.compile(rb'\s*\[\s*\[\s*["\[]')
_OBJECTS: Final = re.compile(rb"\s*\[\s*\{")


class TooManySequences(ValueError):
    """A request for more sequences than rooms are given out for."""


def room_of(number: int) -> int:
    """The room of an id: 0 to 2^63-1, another one for each id of 63 bits, scattered over that range.

    Ids are counted up, so `id % dp_size` would tie each prefill instance to some of its ranks wherever requests are
    dealt out in turn.
    """
    mixed = number & _ROOMS
    mixed ^= mixed >> 31
    mixed = mixed * 0x3C79AC492BA7B653 & _ROOMS
    mixed ^= mixed >> 33
    mixed = mixed * 0x1C69B3F74AC4AE35 & _ROOMS
    return mixed ^ mixed >> 27


def sequences_of(fields: Fields, listed: Lists = NO_LISTS, *, native: bool) -> int | None:
    """How many sequences a body asks for where the engine treats it as a batch; None where there is just one.

    Args:
        fields: the body's outermost ones.
        listed: of a long body, the elements of its `batch_field`.
        native: the body is one of SGLang's own `/generate`, not of an OpenAI path.

    Raises:
        TooManySequences: above MAX_SEQUENCES.
    """
    name = batch_field(fields, native=native)
    prompts = len(request_items(fields, name, listed) or ()) if name is not None else 0
    each = _samples(fields.get("sampling_params")) if native else number(fields.get("n")) or 1
    count = (prompts or 1) * max(1.0, each)
    if count > MAX_SEQUENCES:
        raise TooManySequences(f"a request may ask for {MAX_SEQUENCES} sequences at most")
    return None if not prompts and count < 2 else int(count)


def batch_field(fields: Fields, *, native: bool) -> str | None:
    """The field with the prompts of a body that opens like a batch, which is an array of texts or of arrays.

    An array of token ids is looked at no further than its first byte.
    """
    name = next((name for name in PROMPTS if given(fields.get(name))), PROMPTS[0]) if native else "prompt"
    value = fields.get(name)
    opening = _BATCH_OF_VECTORS if name == VECTORS else _BATCH
    return None if value is None or opening.match(value, 0, BLANKS_BYTES) is None else name


def _samples(sampling_params: Raw | None) -> float:
    """`n` of the sampling parameters, or of the first of several; beams of one search are one sequence.

    What is so long that reading it takes a while is no sampling parameters.
    """
    if sampling_params is None or len(sampling_params) >= ONE_GO_BYTES:
        return 1
    several = items(sampling_params) if _OBJECTS.match(sampling_params) else None
    told = object_fields(several[0] if several else sampling_params) or {}
    if (number(told.get("beam_width")) or 1) > 1:
        return 1
    return number(told.get("n")) or 1


def with_rooms(fields: Fields, host: str, port: int, rooms: Sequence[int], *, batch: bool) -> RequestBody:
    """The body for both legs.

    Args:
        fields: the client's outermost ones; they lose what a client may not say.
        host: prefill's, an IPv6 address without brackets.
        port: prefill's bootstrap port.
        rooms: one for each sequence.
        batch: whether the three are arrays.
    """
    said: Sequence[object] = (host, port, rooms[0])
    if batch:
        said = ([host] * len(rooms), [port] * len(rooms), rooms)
    for name in CONTROL.intersection(fields):
        del fields[name]
    for name, value in zip((HOST, PORT, ROOM), said, strict=True):
        fields[name] = Raw(msgspec.json.encode(value))
    return write_body(fields)


def without_control(fields: Fields) -> RequestBody | None:
    """The body for an instance that does both stages; None where the client's own will do."""
    if CONTROL.isdisjoint(fields):
        return None
    return write_body({name: value for name, value in fields.items() if name not in CONTROL})


def asks_logprobs(fields: Fields) -> bool:
    """Whether a body of `/generate` asks for logprobs, be it for some prompts of a batch only."""
    value = fields.get("return_logprob")
    return value is not None and (is_true(value) or bytes(memoryview(value)[:1]) == b"[")
