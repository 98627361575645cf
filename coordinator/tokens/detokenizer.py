"""Token ids to text as they come: whatever is certain at once, never half a character.

Each way to decode has its own detokenizer; which one fits is read off the tokenizer's file (`decoding.scheme_of`). All
of them take constant time for each token.
"""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from os.path import commonprefix
from typing import Final

BROKEN: Final = "\ufffd"  # what stands for bytes that are no character
MOST_HELD: Final = 4  # a character has at most four bytes, and a token at least one


class Detokenizer(ABC):
    """The text of one sequence of tokens.

    The pieces that `push` and `end` return make up the whole text, however the ids are divided among the calls. Ids
    that the tokenizer does not know have no text.
    """

    __slots__ = ()

    @abstractmethod
    def push(self, ids: Sequence[int]) -> str:
        """Take the next tokens; returns the text that is certain, which may be none."""

    @abstractmethod
    def end(self) -> str:
        """What is left: the bytes of a character that was never completed become U+FFFD."""


class ByteLevelText(Detokenizer):
    """Tokens are bytes: byte-level BPE (GPT-2 and its heirs).

    Args:
        pieces: the bytes of each token; none for a token that is not shown.
    """

    __slots__ = ("_held", "_pieces")

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._pieces = pieces
        self._held = b""

    def push(self, ids: Sequence[int]) -> str:
        """Take the next tokens."""
        pieces = self._pieces
        data = self._held + (pieces[ids[0]] if len(ids) == 1 else b"".join([pieces[token] for token in ids]))
        text, used = codecs.utf_8_decode(data, "replace", False)  # noqa: FBT003 - takes no keywords
        self._held = data[used:]
        return text

    def end(self) -> str:
        """What is left."""
        held, self._held = self._held, b""
        return held.decode("utf-8", "replace")


class ByteFallbackText(Detokenizer):
    """Tokens are text, or single bytes of characters that the vocabulary lacks (SentencePiece as Llama 2 has it).

    A run of bytes that is not UTF-8 becomes one U+FFFD for each byte. As far as such a run begins with whole
    characters, these stay: they were shown before the rest was known.

    Args:
        pieces: text or byte of each token; None for a token that is not shown.
        strip: spaces that the decoder takes off the beginning of the text.
    """

    __slots__ = ("_bad", "_pieces", "_run", "_strip")

    def __init__(self, pieces: Mapping[int, str | int | None], strip: int) -> None:
        self._pieces = pieces
        self._strip = strip
        self._run = b""  # bytes of a character that is not complete
        self._bad = False  # the run is not UTF-8

    def push(self, ids: Sequence[int]) -> str:
        """Take the next tokens."""
        text = ""
        for token in ids:
            piece = self._pieces[token]
            if isinstance(piece, str):
                text += self._run_ends() + piece if self._run or self._bad else piece
            elif piece is not None:
                text += self._byte(piece)
        return self._stripped(text) if self._strip else text

    def end(self) -> str:
        """What is left."""
        text = self._run_ends()
        return self._stripped(text) if self._strip else text

    def continues(self) -> None:
        """There is text before this one: nothing is stripped."""
        self._strip = 0

    def _byte(self, byte: int) -> str:
        if self._bad:
            return BROKEN
        self._run += byte.to_bytes()
        try:
            text, used = codecs.utf_8_decode(self._run, "strict", False)  # noqa: FBT003 - takes no keywords
        except UnicodeDecodeError:
            self._bad = True
            text, used = BROKEN * len(self._run), len(self._run)
        self._run = self._run[used:]
        return text

    def _run_ends(self) -> str:
        text = BROKEN * len(self._run)
        self._run, self._bad = b"", False
        return text

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


class WindowText(Detokenizer):
    """Any other decoder, by the difference that the next tokens make behind the last few ones.

    Args:
        decode: the tokenizer's decoder; shows every token.
        shown: whether a token has text.
        holds: whether the decoder puts characters together from bytes, so that one may be incomplete.
        before: the shown tokens before this text.
    """

    __slots__ = ("_before", "_decode", "_held", "_holds", "_shown", "_text_before")

    def __init__(
        self, decode: Callable[[list[int]], str], shown: Callable[[int], bool], *, holds: bool, before: Iterable[int]
    ) -> None:
        self._decode = decode
        self._shown = shown
        self._holds = holds
        self._held: list[int] = []
        self._look_back(list(before))
        while holds and len(self._before) > 1 and self._text_before.startswith(BROKEN):
            self._look_back(self._before[1:])  # it began in the middle of a character

    def push(self, ids: Sequence[int]) -> str:
        """Take the next tokens."""
        self._held += filter(self._shown, ids)
        return self._difference(wait=self._holds)

    def end(self) -> str:
        """What is left."""
        return self._difference(wait=False)

    def _look_back(self, before: list[int]) -> None:
        """Remember what was taken last: it ends with a whole character, and so does what was taken before it."""
        self._before = before
        self._text_before = self._decode(before) if before else ""

    def _difference(self, *, wait: bool) -> str:
        if not self._held:
            return ""
        before, cut = self._text_before, len(self._held)
        text = self._decode(self._before + self._held)
        if wait and text.endswith(BROKEN):
            cut, text = self._certain(text)
        same = len(before) if text.startswith(before) else len(commonprefix((before, text)))  # noqa: RUF071 - no paths
        taken, self._held = self._held[:cut], self._held[cut:]
        if taken:
            self._look_back(taken)
        return text[same:]

    def _certain(self, text: str) -> tuple[int, str]:
        """How many of the tokens are whole characters, and their text; of what cannot become one, all."""
        held = self._held
        for cut in range(len(held) - 1, max(len(held) - MOST_HELD, -1), -1):
            if not cut:
                return 0, self._text_before
            part = self._decode(self._before + held[:cut])
            if not part.endswith(BROKEN):
                return cut, part
        return len(held), text
