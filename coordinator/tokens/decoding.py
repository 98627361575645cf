"""How a tokenizer's decoder makes text out of tokens, read off its description in tokenizer.json.

Source: the decoders of the tokenizers library (`ByteLevel`, `Replace`, `ByteFallback`, `Fuse`, `Strip`, `Sequence`).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeVar

T = TypeVar("T")

BYTE_LEVEL: Final = "ByteLevel"
BYTE_FALLBACK: Final = "ByteFallback"
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MOST_ID: Final = 2**32 - 1
_PRINTABLE: Final = (*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1))


@dataclass(frozen=True, slots=True)
class Scheme:
    """How tokens become text.

    Attributes:
        kind: BYTE_LEVEL or BYTE_FALLBACK where this module knows the decoder through and through; else empty.
        replaces: with BYTE_FALLBACK: what is replaced in each token, in order.
        strip: with BYTE_FALLBACK: spaces that are taken off the beginning of the whole.
        from_bytes: whether characters may be put together from the bytes of several tokens.
    """

    kind: str = ""
    replaces: tuple[tuple[str, str], ...] = ()
    strip: int = 0
    from_bytes: bool = False


def scheme_of(decoder: Any) -> Scheme:
    """The scheme of `decoder` in tokenizer.json, as it was parsed; None: tokens are joined by spaces."""
    steps = list(_steps(decoder))
    types = [step.get("type") for step in steps]
    if types == [BYTE_LEVEL]:
        return Scheme(BYTE_LEVEL, from_bytes=True)
    if BYTE_FALLBACK in types:
        cut = types.index(BYTE_FALLBACK)
        replaces = [_replace(step) for step in steps[:cut]]
        strip = _strip(steps[cut + 1 :])
        if strip is not None and None not in replaces:
            return Scheme(BYTE_FALLBACK, tuple(pair for pair in replaces if pair), strip, from_bytes=True)
    return Scheme(from_bytes=BYTE_LEVEL in types or BYTE_FALLBACK in types)


def _steps(decoder: Any) -> Sequence[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return ()
    if decoder.get("type") != "Sequence":
        return (decoder,)
    return [step for part in decoder.get("decoders") or () for step in _steps(part)]


def _replace(step: Mapping[str, Any]) -> tuple[str, str] | None:
    """What a step replaces; None where it is no plain replacement."""
    pattern = step.get("pattern")
    old = pattern.get("String") if isinstance(pattern, dict) else None
    new = step.get("content")
    return (old, new) if step.get("type") == "Replace" and old and isinstance(new, str) else None


def _strip(steps: Sequence[Mapping[str, Any]]) -> int | None:
    """Spaces that the steps after ByteFallback take off the beginning; None where they do anything else."""
    types = [step.get("type") for step in steps]
    if types in ([], ["Fuse"]):
        return 0
    if types != ["Fuse", "Strip"]:
        return None
    last = steps[1]
    plain = last.get("content") == " " and last.get("stop") == 0 and isinstance(last.get("start"), int)
    return int(last["start"]) if plain else None


class Pieces(dict[int, T]):
    """What each token stands for, worked out when it is first needed.

    Args:
        make: from a token as the vocabulary has it.
        text_of: the vocabulary; None for an id that is none.
        hidden: ids that are not shown.
        nothing: stands for tokens that are not shown and ids that are none.
    """

    def __init__(
        self, make: Callable[[str], T], text_of: Callable[[int], str | None], hidden: frozenset[int], nothing: T
    ) -> None:
        super().__init__(dict.fromkeys(hidden, nothing))
        self._make = make
        self._text_of = text_of
        self._nothing = nothing

    def __missing__(self, token: int) -> T:
        text = self._text_of(token) if 0 <= token <= _MOST_ID else None
        if text is None:
            return self._nothing  # not kept: there is no bound on what an engine may send
        piece = self[token] = self._make(text)
        return piece


def byte_level_piece(token: str) -> bytes:
    """The bytes of a token of a byte-level vocabulary; of one that is not written in its alphabet, its UTF-8."""
    alphabet = _alphabet()
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode()


@cache
def _alphabet() -> Mapping[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others for 256 and up, in order."""
    others = [byte for byte in range(256) if byte not in _PRINTABLE]
    return {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + at): byte for at, byte in enumerate(others)}


def fallback_piece(scheme: Scheme, token: str) -> str | int:
    """The text of a token, or the byte that it stands for."""
    for old, new in scheme.replaces:
        token = token.replace(old, new)
    byte = _BYTE_TOKEN.fullmatch(token)
    return int(byte[1], 16) if byte else token
