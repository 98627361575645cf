"""Answers of the vLLM NIXL pull protocol: what prefill hands over, and whether decode's answer is one.

Sources: vLLM protocol page §1.2, §1.3.
"""

import msgspec
from msgspec import Raw, Struct

from .json_edit import Fields, given, items, object_fields, text


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


class _Answer(Struct, frozen=True, gc=False):
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
