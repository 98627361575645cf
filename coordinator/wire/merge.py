"""Answers of one request that come in parts: what prefill knows goes into decode's, batches become one."""

from collections.abc import Sequence

import msgspec
from msgspec import Raw

from .json_edit import Fields, given, items, object_fields, read_fields, write_fields
from .vllm_answers import Prefilled

DETAILS = "prompt_tokens_details"
CACHED = "cached_tokens"
LOGPROBS = "prompt_logprobs"


def with_prefill(body: bytes, prefilled: Prefilled) -> bytes:
    """Decode's whole answer with prefill's cached tokens and prompt logprobs; the same bytes where it adds nothing.

    Raises:
        ValueError: the answer is no JSON object.
    """
    if not prefilled.adds:
        return body
    fields = read_fields(body)
    if prefilled.cached_tokens is not None:
        fields = with_cached_tokens(fields, prefilled.cached_tokens)
    whole, of_choice = prefilled.prompt_logprobs
    if whole is not None:
        fields[LOGPROBS] = whole
    choices = items(fields.get("choices"))
    if of_choice is not None and choices:
        first = object_fields(choices[0])
        if first is not None:
            choices[0] = Raw(write_fields({**first, LOGPROBS: of_choice}))
            fields["choices"] = Raw(msgspec.json.encode(choices))
    return write_fields(fields)


def with_cached_tokens(fields: Fields, cached_tokens: Raw) -> Fields:
    """An answer, or chunk of one, whose usage (if it has one) tells prefill's cached tokens instead of decode's."""
    usage = object_fields(fields.get("usage"))
    if usage is None:
        return fields
    details = object_fields(usage.get(DETAILS)) or {}
    usage[DETAILS] = Raw(write_fields({**details, CACHED: cached_tokens}))
    return {**fields, "usage": Raw(write_fields(usage))}


def one_answer(bodies: Sequence[bytes]) -> bytes:
    """The answers to the prompts of a batch as the answer to the batch: choices numbered in order, usage summed.

    All else (id, model, ...) is the first answer's.

    Raises:
        ValueError: one of them is no answer with choices.
    """
    answers = [read_fields(body) for body in bodies]
    choices: list[Raw] = []
    for answer in answers:
        found = items(answer.get("choices"))
        if not found:
            raise ValueError("an answer has no choices")
        choices += (_numbered(choice, len(choices) + at) for at, choice in enumerate(found))
    merged = {**answers[0], "choices": Raw(msgspec.json.encode(choices))}
    usages = [_decoded(answer["usage"]) for answer in answers if given(answer.get("usage"))]
    if usages:
        merged["usage"] = Raw(msgspec.json.encode(_sum(usages)))
    return write_fields(merged)


def _numbered(choice: Raw, index: int) -> Raw:
    fields = object_fields(choice)
    if fields is None:
        raise ValueError("a choice is no object")
    return Raw(write_fields({**fields, "index": Raw(b"%d" % index)}))


def _decoded(value: Raw) -> object:
    return msgspec.json.decode(value)


def _sum(values: Sequence[object]) -> object:
    """Numbers added up, objects field by field; of anything else the first."""
    known = [value for value in values if value is not None]
    objects = [value for value in known if isinstance(value, dict)]
    if objects:
        names = dict.fromkeys(name for value in objects for name in value)
        return {name: _sum([value.get(name) for value in objects]) for name in names}
    numbers = [value for value in known if isinstance(value, int | float) and not isinstance(value, bool)]
    if numbers and len(numbers) == len(known):
        return sum(numbers)
    return known[0] if known else None
