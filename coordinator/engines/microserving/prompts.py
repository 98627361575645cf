"""The prompt of a request: text or token ids, and what was generated after it before a preempt."""

from typing import Annotated

import msgspec
from msgspec import Raw

from coordinator.api.asked import MOST_ID
from coordinator.core.errors import BadRequest
from coordinator.tokens import Tokenizer
from coordinator.wire.json_edit import given, items, text

_IDS = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, le=MOST_ID)]])
_TOKEN_START = b"-0123456789]"


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


def check_ids(prompt: Raw, tokenizer: Tokenizer | None) -> None:
    """Refuse token ids that no engine can take; its 500 would look like a failure of its own.

    Raises:
        BadRequest: one is no id, or none of the model's.
    """
    if not _is_ids(prompt):
        return
    highest = max(_token_ids(prompt))
    if tokenizer is not None and highest > tokenizer.highest_id:
        raise BadRequest(f"`prompt` has a token id above {tokenizer.highest_id}, the model's highest")


def is_text(prompt: Raw) -> bool:
    """Whether a prompt is text, and no token ids."""
    return _mark(prompt) == b'"'


def _token_ids(value: Raw) -> list[int]:
    try:
        return _IDS.decode(value)
    except msgspec.MsgspecError:
        raise BadRequest(f"`prompt` must be a string or a list of token ids from 0 to {MOST_ID}") from None


def _is_ids(value: Raw) -> bool:
    """Whether a prompt is a list of token ids, be it empty."""
    head = bytes(memoryview(value)[:64])
    return head[:1] == b"[" and head[1:].lstrip()[:1] in _TOKEN_START


def _mark(value: Raw) -> bytes:
    """The first byte, by which a string or a list is known."""
    return bytes(memoryview(value)[:1])


async def with_sent(prompt: Raw, said: str, tokenizer: Tokenizer | None, *, count: bool) -> tuple[Raw, int | None]:
    """The prompt of an attempt: the client's and the text `said` that was generated after it.

    As token ids, and with their number, where they must be counted.

    Raises:
        BadRequest: it is no text, or nobody can count it.
    """
    if not (said or count):
        return prompt, None
    if _is_ids(prompt):
        ids = _token_ids(prompt)
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
