"""A toy tokenizer: deterministic, lossless, the same on every instance.

Known words are one token each; everything else is cut into groups of at most three UTF-8 bytes, so a character of four
bytes is always split over two tokens, as real tokenizers do.
"""

import codecs
import re
from collections.abc import Iterable, Sequence

EOS = 0
MAX_TOKEN = 2**32 - 1

_WORD_LIST = (
    "the of and to in is that for it as with on be by this are from at or an which have has its one more other "
    "new some time people water light city river stone paper music garden winter summer morning evening house "
    "street window table story letter number colour system engine memory model answer question reason result "
    "example method small large early late quiet bright simple strong open clear warm cold deep narrow gentle "
    "careful modern ancient green silver golden northern southern common single second every little great long "
    "short high low near far good moves keeps finds gives takes makes shows holds reads writes opens closes "
    "follows becomes remains carries turns brings leads grows begins ends rests waits sees hears knows means "
    "works plays builds learns tells asks covers slowly quickly often always never perhaps almost together again "
    "already between through under over around behind beyond within without because although while before after "
    "until since where when there here then thus two three four five seven ten hundred thousand part place world "
    "country market school science history language nature forest mountain valley island ocean bridge road train "
    "ship bird horse child friend teacher farmer writer café naïve über Übung señor façade 東京 言葉 море слово λόγος"
)
_WORDS = _WORD_LIST.split()
_FORMS: dict[str, int] = {}
_TEXT: list[bytes] = [b""]  # index is the token id; EOS has no text


def _fill() -> None:
    for word in [".", ",", "?", ":", "\n", " ", *_WORDS]:
        capital = word[:1].upper() + word[1:]
        for form in (word, f" {word}", capital, f" {capital}"):
            if form not in _FORMS:
                _FORMS[form] = len(_TEXT)
                _TEXT.append(form.encode())


_fill()
FORM_COUNT = len(_TEXT)
"""Ids below are the end of text and the known word forms."""
WORDS = tuple(word for word in _WORDS if word.islower() or not word.isascii())
_GROUP_BASE = 1 << 20
_GROUP_STEP = 1 << 24
_PIECE = re.compile(r" ?\w+|\W")


def _group(data: bytes) -> int:
    return _GROUP_BASE + (len(data) - 1) * _GROUP_STEP + int.from_bytes(data, "big")


def single_byte(value: int) -> int:
    """Token id of a group of one byte."""
    return _group(bytes((value,)))


def encode(text: str) -> tuple[int, ...]:
    """Token ids of `text`; lossless: `decode(encode(text)) == text` for every text without lone surrogates."""
    ids: list[int] = []
    for match in _PIECE.finditer(text):
        piece = match.group()
        known = _FORMS.get(piece)
        if known is not None:
            ids.append(known)
            continue
        data = piece.encode("utf-8", "surrogatepass")
        ids.extend(_group(data[start : start + 3]) for start in range(0, len(data), 3))
    return tuple(ids)


def token_bytes(token: int) -> bytes:
    """Bytes that stand for one token; an id outside of the vocabulary shows as ` #<id>`."""
    if token < len(_TEXT):
        return _TEXT[token]
    length, value = divmod(token - _GROUP_BASE, _GROUP_STEP)
    if 0 <= length <= 2 and value < 256 ** (length + 1):
        return value.to_bytes(length + 1, "big")
    return b" #%d" % token


def decode(ids: Iterable[int]) -> str:
    """Text of the tokens; bytes that are not UTF-8 show as the replacement character."""
    return b"".join(token_bytes(token) for token in ids).decode("utf-8", "replace")


def pieces(ids: Sequence[int]) -> tuple[str, ...]:
    """The text that each token adds: empty where a token ends inside a character. Joined they give `decode(ids)`."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    last = len(ids) - 1
    return tuple(decoder.decode(token_bytes(token), index == last) for index, token in enumerate(ids))


def word(text: str) -> int:
    """Token id of a known word form; raises KeyError for anything else."""
    return _FORMS[text]


def split_character(character: str) -> tuple[int, int]:
    """Two tokens for one character of four bytes: the first has no text of its own."""
    data = character.encode()
    return _group(data[:2]), _group(data[2:])
