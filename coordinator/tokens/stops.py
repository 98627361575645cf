"""Stop strings, wherever they lie across the borders of tokens."""

from collections.abc import Sequence


class StopWatch:
    """Looks for stop strings in a text that comes in pieces.

    Text that may be the beginning of a stop string is held back until it is known what it is: at most one character
    less than the longest stop string. Of several stop strings the one that begins first wins; of those the longest one
    that is there when the first of them is complete.

    Args:
        stops: what to look for; empty strings are ignored.
        include: whether the text that may be shown ends with the stop string, or before it.
    """

    __slots__ = ("_held", "_include", "_longest", "_stops", "met")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._include = include
        self._held = ""
        self.met = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take a piece; returns (text that may be shown, whether a stop string was met).

        Once one was met, nothing that follows is shown, and `met` holds it.
        """
        if self.met:
            return "", True
        if not self._stops:
            return text, False
        whole = self._held + text
        found = self._first_in(whole)
        if found is not None:
            start, self.met = found
            self._held = ""
            return whole[: start + len(self.met) * self._include], True
        cut = len(whole) - self._begun(whole)
        self._held = whole[cut:]
        return whole[:cut], False

    def end(self) -> str:
        """What was held back: the text ends here, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_in(self, text: str) -> tuple[int, str] | None:
        places = [(start, -len(stop), stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if not places:
            return None
        start, _, stop = min(places)
        return start, stop

    def _begun(self, text: str) -> int:
        """Length of the longest end of the text that is a beginning of a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-size:]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0
