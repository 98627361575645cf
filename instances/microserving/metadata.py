"""Windows and KV addresses (microserving protocol page §3.1, §3.2)."""

import base64
import binascii
import json
from collections.abc import Sequence

Segments = tuple[tuple[int, int], ...]
"""(first slot, length) of each piece, of one model."""
_SLOTS = 2**31


def resolve(index: int, length: int) -> int:
    """An index as it is, or counted from the end if it is negative."""
    return index if index >= 0 else length + index


def encode(models: Sequence[Segments]) -> str:
    """`kv_append_metadata`: for each model the number of its segments, then slot and length of each."""
    numbers = [number for model in models for number in (len(model), *(x for segment in model for x in segment))]
    return base64.b64encode(json.dumps(numbers, separators=(",", ":")).encode()).decode()


def decode(text: str) -> tuple[Segments, ...]:
    """The segments of each model; raises ValueError for anything that `encode` does not make."""
    try:
        numbers = json.loads(base64.b64decode(text, validate=True))
    except (binascii.Error, UnicodeDecodeError) as wrong:
        raise ValueError(str(wrong)) from None
    if not isinstance(numbers, list) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("not a list of whole numbers")
    models: list[Segments] = []
    at = 0
    while at < len(numbers):
        end = at + 1 + 2 * numbers[at]
        flat = numbers[at + 1 : end]
        if len(flat) != 2 * numbers[at]:
            raise ValueError("a segment is cut off")
        models.append(tuple(zip(flat[::2], flat[1::2], strict=True)))
        at = end
    return tuple(models)


def length_of(segments: Segments) -> int:
    """Tokens that they hold."""
    return sum(length for _, length in segments)


class Slots:
    """Gives out KV slots, page by page, never the same ones twice within a long time."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._next = 0

    def take(self, kv_tokens: int, pieces: int) -> Segments:
        """Segments for so many tokens, at most `pieces` of them, with unused pages between them."""
        pages = -(-kv_tokens // self._page_tokens)
        share = -(-pages // max(1, min(pieces, pages)))
        taken: list[tuple[int, int]] = []
        left = kv_tokens
        while left:
            length = min(left, share * self._page_tokens)
            taken.append((self._next, length))
            left -= length
            used = -(-length // self._page_tokens) + (1 if left else 0)
            self._next = (self._next + used * self._page_tokens) % _SLOTS
        return tuple(taken)
