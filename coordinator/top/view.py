"""What the person in front of the screen wants to see, and what keys make of it."""

from dataclasses import dataclass, replace

SORTS = ("id", "state", "requests", "pinned", "blocks", "since_s")
LEAVE = ("q", "Q", "\x03", "\x04")
FAR = 1 << 30


@dataclass(frozen=True, slots=True)
class View:
    """What is wanted.

    Attributes:
        sort: one of SORTS.
        backwards: the other way round.
        filter: text that rows must hold.
        scroll: rows left out at the top.
        news: whether failures and requests are shown too.
        typing: whether the filter is being typed.
        keys: whether the last line says which keys do what.
    """

    sort: str = "id"
    backwards: bool = False
    filter: str = ""
    scroll: int = 0
    news: bool = True
    typing: bool = False
    keys: bool = True


def step(view: View, key: str, page: int) -> View | None:
    """The view after a key, one character or a name of `terminal.KEYS`; None: the person wants to leave.

    `page`: rows that are one page.
    """
    if view.typing:
        return _typed(view, key)
    if key in LEAVE:
        return None
    moves = {"up": -1, "down": 1, "page up": -page, "page down": page, "home": -FAR, "end": FAR}
    if key in moves:
        return replace(view, scroll=max(0, view.scroll + moves[key]))
    match key:
        case "s":
            return replace(view, sort=SORTS[(SORTS.index(view.sort) + 1) % len(SORTS)], backwards=False, scroll=0)
        case "r":
            return replace(view, backwards=not view.backwards)
        case "n":
            return replace(view, news=not view.news)
        case "/":
            return replace(view, typing=True, scroll=0)
        case "escape":
            return replace(view, filter="")
    return view


def _typed(view: View, key: str) -> View | None:
    match key:
        case "\x03":
            return None
        case "\r" | "\n":
            return replace(view, typing=False)
        case "escape":
            return replace(view, typing=False, filter="")
        case "\x7f" | "\b":
            return replace(view, filter=view.filter[:-1])
    return replace(view, filter=view.filter + key) if len(key) == 1 and key.isprintable() else view
