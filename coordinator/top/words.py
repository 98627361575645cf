"""Numbers, times and texts as they stand in a frame."""

import unicodedata
from collections.abc import Iterable
from itertools import repeat

from coordinator.observability.lines import printable

BARS = "▁▂▃▄▅▆▇█"
UNKNOWN = "-"
_WIDE = "WF"
_SPANS = ((0.0995, 1000, 1, "ms"), (0.9995, 1000, 0, "ms"), (99.5, 1, 2, "s"))


def count(number: float | None) -> str:
    """A number in at most 6 characters."""
    if number is None:
        return UNKNOWN
    for limit, divisor, unit in ((1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if number >= limit:
            return f"{number / divisor:.{1 if number / divisor < 100 else 0}f}{unit}"
    return f"{number:.0f}" if number >= 100 or number == int(number) else f"{number:.1f}"


def span(seconds: float | None) -> str:
    """A duration in at most 7 characters."""
    if seconds is None:
        return UNKNOWN
    for limit_s, factor, digits, unit in _SPANS:
        if seconds < limit_s:
            return f"{seconds * factor:.{digits}f}{unit}"
    return f"{seconds:.0f}s"


def age(seconds: float) -> str:
    """How long ago, roughly."""
    whole = max(0, round(seconds))
    for limit, divisor, unit in ((60, 1, "s"), (3600, 60, "m"), (86400, 3600, "h")):
        if whole < limit:
            return f"{whole // divisor}{unit}"
    return f"{whole // 86400}d"


def words(name: str) -> str:
    """A name from a fixed set, as people write it."""
    return name.replace("_", " ")


def clean(text: str) -> str:
    """A text of others without anything that a terminal could take for a command."""
    return printable(text, 500)


def width(text: str) -> int:
    """Columns that a text takes; there are no escape sequences in it."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in _WIDE else 1 for c in text)


def fit(text: str, columns: int, *, right: bool = False) -> str:
    """A text in exactly so many columns: cut (`…` says so) or filled up with blanks, `right`: on its left."""
    taken = width(text)
    if taken > columns:
        kept, taken = "", 0
        for c in text:
            if taken + width(c) > columns - 1:
                break
            kept, taken = kept + c, taken + width(c)
        text, taken = (f"{kept}…", taken + 1) if columns > 0 else ("", 0)
    blanks = " " * (columns - taken)
    return blanks + text if right else text + blanks


def spark(values: Iterable[float | None], columns: int) -> str:
    """The last `columns` values as bars; blanks where nobody knows one."""
    last = list(values)[-columns:] if columns > 0 else []
    most = max((value for value in last if value is not None), default=0.0)
    bars = [
        " " if value is None else BARS[min(len(BARS) - 1, int(value / most * len(BARS))) if most else 0]
        for value in last
    ]
    return "".join([*repeat(" ", columns - len(bars)), *bars])
