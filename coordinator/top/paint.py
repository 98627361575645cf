"""Lines of a frame: texts beside each other, some in colour, cut where the screen ends."""

from dataclasses import dataclass

from .words import fit, width

PLAIN, BOLD, SOFT, BAD, WARN, GOOD, TITLE = "", "1", "2", "1;31", "33", "32", "7"
Part = tuple[str, str]
"""A colour and a text."""


@dataclass(frozen=True, slots=True)
class Paint:
    """Makes lines of at most so many columns.

    Attributes:
        colours: false: no escape sequence is written (ECMA-48 §8.3.117 has those that are).
    """

    columns: int
    colours: bool

    def line(self, *parts: Part) -> str:
        """Texts one behind the other."""
        left, done = self.columns, []
        for code, text in parts:
            taken = width(text)
            shown = text if taken <= left else fit(text, left)
            left -= min(taken, left)
            done.append(f"\x1b[{code}m{shown}\x1b[0m" if code and self.colours and shown.strip() else shown)
        return "".join(done).rstrip()

    def title(self, text: str) -> str:
        """A bar over the whole width."""
        return self.line((TITLE, fit(text, self.columns)))
