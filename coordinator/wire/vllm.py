"""Bodies of the vLLM NIXL pull protocol: what prefill and decode are asked, and what prefill answers.

Sources: vLLM protocol page §0 (clamp), §1.1-§1.4 (bodies).
"""

from enum import StrEnum

import msgspec
from msgspec import Raw, Struct

from coordinator.core.body import RequestBody

from .json_edit import (
    NO_LISTS,
    Fields,
    Lists,
    given,
    is_true,
    items,
    number,
    object_fields,
    request_items,
    text,
    write_body,
)

PARAMS = "kv_transfer_params"
_WAYWARD = frozenset(("prompt", "prompt_embeds", "n", "best_of", "use_beam_search", "echo"))
"""The fields without which a body is served by a pair."""
LISTS = ("prompt", "prompt_embeds")
"""The fields that may list several prompts."""
MAX_PROMPTS = 16384
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_ONE = Raw(b"1")
_FALSE = Raw(b"false")
_TRUE = Raw(b"true")
_HOLD = Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
_TOKEN_OR_NONE = b"-0123456789]"  # how a prompt of token ids goes on after its bracket, and an empty list


class Way(StrEnum):
    """How a request can be served by a pair: one prefilled KV has exactly one consumer (protocol page §0).

    PAIR: prefill, then decode. SPLIT: so for each of its prompts. ALONE: by decode from the start to the end.
    """

    PAIR = "pair"
    SPLIT = "split"
    ALONE = "alone"


class EngineSaid(ValueError):
    """A 200 whose body is an error of the engine; the text is the engine's."""


class Prefilled(Struct, frozen=True):
    """What prefill's answer holds for decode and for the client.

    Attributes:
        params: the hand-over record, to be passed on as it is; None where there is none.
        ended: the answer is over with prefill's token, so that there is nothing to hand over.
        cached_tokens: the prompt tokens that prefill found in its cache, as JSON text; None where it does not tell.
        prompt_logprobs: of the answer (chat) and of its choice (completions); only prefill has run the whole prompt.
    """

    params: Raw | None = None
    ended: bool = False
    cached_tokens: Raw | None = None
    prompt_logprobs: tuple[Raw | None, Raw | None] = (None, None)

    @property
    def adds(self) -> bool:
        """Whether decode's answer lacks something that only prefill knows."""
        return self.cached_tokens is not None or self.prompt_logprobs != (None, None)


NOTHING_PREFILLED = Prefilled()


class _Answer(msgspec.Struct, frozen=True, gc=False):
    choices: Raw = Raw()
    usage: Raw = Raw()
    kv_transfer_params: Raw = Raw()
    prompt_logprobs: Raw = Raw()
    error: Raw = Raw()


_ANSWER = msgspec.json.Decoder(_Answer)


def _answer(body: bytes) -> _Answer:
    """The parts of an answer that are looked at; raises ValueError for what is no JSON object."""
    try:
        return _ANSWER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the answer is no JSON object: {error}") from error


# --- requests


def way_of(fields: Fields, listed: Lists = NO_LISTS) -> Way:
    """How a body (of chat completions or completions) can be served; see docs/engines/vllm.md for the reasons.

    Args:
        fields: the body's outermost ones.
        listed: of a long body, the elements of LISTS.
    """
    if _WAYWARD.isdisjoint(fields):
        return Way.PAIR
    several = len(prompts_of(fields, listed)) > 1
    alone = (
        (number(fields.get("n")) or 1) > 1
        or (number(fields.get("best_of")) or 1) > 1
        or is_true(fields.get("use_beam_search"))
        or (is_true(fields.get("echo")) and given(fields.get("logprobs")))
        or len(request_items(fields, "prompt_embeds", listed) or ()) > 1
        or (several and (is_true(fields.get("stream")) or given(fields.get("prompt_embeds"))))
    )
    if alone:
        return Way.ALONE
    return Way.SPLIT if several else Way.PAIR


def prompts_of(fields: Fields, listed: Lists = NO_LISTS) -> list[Raw]:
    """The prompts of a body that lists them, each as it was written; empty for one prompt and for messages."""
    prompt = fields.get("prompt")
    if prompt is None or bytes(memoryview(prompt)[:1]) != b"[":
        return []
    if bytes(memoryview(prompt)[1:64]).lstrip()[:1] in _TOKEN_OR_NONE:
        return []
    return request_items(fields, "prompt", listed) or []


def prefill_body(fields: Fields) -> RequestBody:
    """The body for prefill: one token, no stream, KV kept for decode; all else as the client sent it."""
    return write_body({**clamped(fields), PARAMS: _HOLD})


def decode_body(fields: Fields, params: Raw | None) -> RequestBody:
    """The body for decode: the client's own with prefill's record; a record that a client sends is never passed on."""
    if params is not None:
        return write_body({**fields, PARAMS: params})
    return write_body({name: value for name, value in fields.items() if name != PARAMS})


def release_body(fields: Fields, params: Raw, salt: str) -> RequestBody:
    """The body that makes a decode instance fetch the KV and stop (protocol page §1.5).

    It asks for a stream, whose head tells at once that the instance has taken the request on. What comes may be KV that
    prefill has already used for something else; `salt`, digits of our own, keeps later requests from finding it cached.
    """
    body = {**clamped(fields), "stream": _TRUE, "cache_salt": Raw(f'"{salt}"'.encode()), PARAMS: params}
    body.pop("prompt_logprobs", None)  # refused for streams
    return write_body(body)


def clamped(fields: Fields) -> Fields:
    """A body that yields one token (protocol page §0): every limit that is given is 1, no stream."""
    changed = dict(fields)
    changed.pop("stream_options", None)
    for name in LIMITS:
        if name in fields and given(fields[name]):
            changed[name] = _ONE
    if changed.get("max_tokens") is not _ONE and changed.get("max_completion_tokens") is not _ONE:
        changed["max_tokens"] = _ONE
    if "min_tokens" in fields and (number(fields.get("min_tokens")) or 0) > 1:
        changed["min_tokens"] = _ONE
    if "stream" in fields:
        changed["stream"] = _FALSE
    return changed


# --- prefill's answer


def read_prefill(body: bytes) -> Prefilled:
    """Read what prefill answered with status 200.

    Raises:
        EngineSaid: the answer is an error.
        ValueError: it is no answer at all.
    """
    answer = _answer(body)
    if given(answer.error):
        raise EngineSaid(bytes(answer.error).decode("utf-8", "replace"))
    params = answer.kv_transfer_params if object_fields(answer.kv_transfer_params) else None
    cached = _cached_tokens(answer.usage) if body.find(b"cached_tokens") >= 0 else None  # in less time than `in`
    if params is not None and body.find(b'"prompt_logprobs"') < 0:
        return Prefilled(params, cached_tokens=cached)
    choice = _first_choice(answer.choices)
    if choice is None and params is None:
        raise ValueError("the answer has no choices")
    choice = choice or {}
    whole, of_choice = answer.prompt_logprobs, choice.get("prompt_logprobs")
    return Prefilled(
        params=params,
        ended=text(choice.get("finish_reason")) == "stop",
        cached_tokens=cached,
        prompt_logprobs=(whole if given(whole) else None, of_choice if given(of_choice) else None),
    )


def _first_choice(choices: Raw) -> Fields | None:
    found = items(choices)
    return object_fields(found[0]) if found else None


def _cached_tokens(usage: Raw) -> Raw | None:
    details = object_fields((object_fields(usage) or {}).get("prompt_tokens_details")) or {}
    cached = details.get("cached_tokens")
    return cached if cached is not None and bytes(cached).isdigit() else None


# --- decode's answer


def check_answer(body: bytes) -> None:
    """Look at what decode answered with status 200.

    Raises:
        EngineSaid: the answer is an error.
        ValueError: it is no whole JSON object.
    """
    answer = _answer(body)
    if given(answer.error) and not given(answer.choices):
        raise EngineSaid(bytes(answer.error).decode("utf-8", "replace"))
