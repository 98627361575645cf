"""The terminal: keys come from it, frames go to it, and it is left as it was found."""

import os
import termios
import tty
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

SEQUENCES = {
    "\x1b[A": "up", "\x1bOA": "up", "\x1b[B": "down", "\x1bOB": "down",
    "\x1b[5~": "page up", "\x1b[6~": "page down",
    "\x1b[H": "home", "\x1bOH": "home", "\x1b[1~": "home",
    "\x1b[F": "end", "\x1bOF": "end", "\x1b[4~": "end",
}  # fmt: skip
"""What terminals send for keys that are no character (xterm's control sequences, normal and application mode)."""
KEYS = frozenset(SEQUENCES.values()) | {"escape"}
READ_BYTES = 1024
LOCAL_FLAGS = 3

# the other screen, no cursor; and back
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"
_LEAVE = "\x1b[0m\x1b[?25h\x1b[?1049l"
# what is between them is shown at once, by terminals that know it; others ignore it
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"


def split_keys(text: str) -> Iterator[str]:
    """Keys in what a terminal has sent: single characters, and names of KEYS. What is not known is passed over."""
    at = 0
    while at < len(text):
        if text[at] != "\x1b":
            yield text[at]
            at += 1
            continue
        found = next((sequence for sequence in SEQUENCES if text.startswith(sequence, at)), None)
        if found is not None:
            yield SEQUENCES[found]
            at += len(found)
            continue
        end = at + 1
        if text[end : end + 1] in ("[", "O"):
            end += 1
            while end < len(text) and not text[end].isalpha() and text[end] != "~":
                end += 1
            end += 1
        else:
            yield "escape"
        at = end


class Terminal:
    """Takes the whole screen for as long as its scope lasts.

    Args:
        source: descriptor that keys are read from.
        sink: descriptor that frames are written to.
    """

    def __init__(self, source: int, sink: int) -> None:
        self.source = source
        self._sink = sink
        self._shown: list[str] = []
        self._size = (0, 0)

    def __enter__(self) -> Self:
        self._before = termios.tcgetattr(self.source)
        tty.setcbreak(self.source, termios.TCSADRAIN)
        mode = termios.tcgetattr(self.source)
        mode[LOCAL_FLAGS] &= ~termios.ISIG  # Ctrl-C is a key here, so that the screen is given back in good order
        termios.tcsetattr(self.source, termios.TCSADRAIN, mode)
        self._write(_ENTER)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._write(_LEAVE)
        finally:
            termios.tcsetattr(self.source, termios.TCSADRAIN, self._before)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        found = os.get_terminal_size(self._sink)
        return max(1, found.columns), max(1, found.lines)

    def keys(self) -> list[str]:
        """Keys that are there; an empty list means that the terminal is gone."""
        try:
            return list(split_keys(os.read(self.source, READ_BYTES).decode("utf-8", "ignore")))
        except OSError:
            return []

    def show(self, lines: Sequence[str]) -> None:
        """Put a frame on the screen: only lines that differ from what is there, so that nothing flickers."""
        size = self.size
        if size != self._size:
            self._size, self._shown = size, []
        parts = [] if self._shown else ["\x1b[2J"]
        before = [*self._shown, *[""] * (len(lines) - len(self._shown))]
        for number, (old, new) in enumerate(zip(before, lines, strict=False), 1):
            if old != new:
                parts.append(f"\x1b[{number};1H{new}\x1b[K")
        if len(self._shown) > len(lines):
            parts.append(f"\x1b[{len(lines) + 1};1H\x1b[J")
        if parts:
            self._write(f"{_BEGIN}{''.join(parts)}{_END}")
        self._shown = list(lines)

    def _write(self, text: str) -> None:
        data = text.encode("utf-8", "replace")
        while data:
            data = data[os.write(self._sink, data) :]
