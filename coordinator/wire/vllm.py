"""Bodies of the vLLM NIXL pull protocol: what prefill and decode are asked.

Sources: vLLM protocol page §0 (clamp), §1.1-§1.5 (bodies).
"""

from enum import StrEnum

from msgspec import Raw

from coordinator.core.body import RequestBody

from .json_edit import (
    NO_LISTS,
    Fields,
    Lists,
    given,
    is_true,
    number,
    request_items,
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
